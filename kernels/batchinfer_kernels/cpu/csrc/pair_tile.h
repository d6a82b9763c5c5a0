// Products whose second operand is contiguous along the columns, x · y: two steps of the sum at a time.
//
//   y, interleaved        [y(k, c) y(k + 1, c)] side by side for 16 columns c     one vector
//   x                     [x(k) x(k + 1)] of one row, the same in all lanes       one pair, 32 bits
//   sums                  16 columns of one row in float32                        k = 0, 2, 4, … in this order
//
// Lanes are columns, so nothing is added across lanes, and a value depends on its own row and column only.

#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace batchinfer {

constexpr int64_t kLanes = 16;

// Rows of pairs: the pair of (row, step) is at data[row * row_stride + step * step_stride].
struct Pairs {
  const int32_t* data;
  int64_t row_stride, step_stride;
};

// sums[r][n] += pairs of row r times the n-th 16 columns at `values`, over all steps; a step of y is `stride` values.
template <int R, int N>
inline __attribute__((always_inline)) void add_pairs(__m512 (&sums)[R][N], Pairs pairs, const bf16* values,
                                                     int64_t stride, int64_t num_steps) {
  for (int64_t step = 0; step < num_steps; ++step, values += stride) {
    __m512bh columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) columns[n] = (__m512bh)_mm512_loadu_si512(values + 2 * n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(pairs.data[r * pairs.row_stride + step * pairs.step_stride]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], pair, columns[n]);
    }
  }
}

// 16 columns of two rows of y side by side; a row that is not there, and columns outside the mask, count as zero.
inline void interleave(const bf16* even, const bf16* odd, __mmask16 mask, bf16* out) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(odd ? mask : 0, odd ? odd : even));
  _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

}  // namespace batchinfer
