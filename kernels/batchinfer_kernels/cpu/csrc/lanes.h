// 16 float32 or 32-bit whole numbers at a time, on two kinds of processors; all vector code is written in these words.
//
//   lanes_avx512.h   one register of 16 lanes; products of bfloat16 pairs and of four 8-bit values are instructions
//   lanes_avx2.h     two registers of 8 lanes; such products are widened first, then multiplied one part at a time
//
//   Floats, Ints     16 float32; 16 int32 (or the bits of two bfloat16 each)
//   First            the first so many lanes, as rows end anywhere: lanes(count)
//   Mask             yes or no for each lane, as comparisons give it
//
// Operations without a name are + - * / of Floats, each rounded once. Both kinds give the same bits but where bfloat16 is
// multiplied or rounded: there AVX-512 counts subnormal numbers as zero, and processors choose the order within a pair.

#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "lanes_avx512.h"
#else
#include "lanes_avx2.h"
#endif

namespace batchinfer {

// Groups of 16 columns whose sums stay in registers beside those of other rows.
constexpr int chunks_beside(int rows) { return 4 * rows <= kMostSums ? 4 : 2 * rows <= kMostSums ? 2 : 1; }

// Rounded to bfloat16 and wide again.
inline Floats rounded(Floats values) { return low_values(rounded_bits(values)); }

}  // namespace batchinfer
