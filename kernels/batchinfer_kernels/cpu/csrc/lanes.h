// 16 float32 or 32-bit whole numbers at a time, on three kinds of processors; all vector code is written in these words.
//
//   lanes_avx512.h   one register of 16 lanes
//   lanes_avx2.h     two registers of 8 lanes
//   lanes_neon.h     four registers of 4 lanes, on 64-bit Arm
//
// Products of bfloat16 pairs are instructions of processors with avx512_bf16, those of four 8-bit (or 4-bit) values of
// processors with avx512_vnni, avx_vnni or i8mm; elsewhere, and where pairs are slow (pairs.cpp), their values are widened
// first, then multiplied one part at a time.
//
//   Floats, Ints     16 float32; 16 int32 (or the bits of two bfloat16 each)
//   Doubles          8 float64
//   First            the first `count` lanes, as rows end anywhere: lanes(count)
//   Mask             yes or no for each lane, as comparisons or the first 16 bits of a number (mask_of) give it
//
// Operations without a name are + - * / of Floats and Doubles, each rounded once. All kinds give the same bits. The bfloat16
// instructions of AVX-512 take subnormal numbers for zero and multiply the second value of a pair first; so do the other
// kinds, with the help of tasks.cpp, where subnormal numbers are zero for all instructions.

#pragma once

#include <cstdint>

#include "kernels.h"
#include "processor.h"

#ifdef __aarch64__
#include "lanes_neon.h"
#elif defined(__AVX512F__)
#include "lanes_avx512.h"
#else
#include "lanes_avx2.h"
#endif

namespace batchinfer {

// Groups of 16 columns whose sums stay in registers together with those of other rows.
constexpr int chunks_beside(int rows) { return 4 * rows <= kMostSums ? 4 : 2 * rows <= kMostSums ? 2 : 1; }

// Values of float32 rows in the words for those of bfloat16.
inline Floats load_wide(First first, const float* at) { return load(first, at); }
inline void store_rounded(float* at, First first, Floats values) { store(at, first, values); }

// Rounded to what rows of Value hold, and wide again.
template <class Value>
inline Floats rounded(Floats values) {
  if constexpr (sizeof(Value) == sizeof(float)) {
    return values;
  } else {
    return low_values(rounded_bits(values));
  }
}

}  // namespace batchinfer
