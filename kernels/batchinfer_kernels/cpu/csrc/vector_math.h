// exp, 2 to a power and SiLU of 16 float32 values; each lane depends on its own value only, so bits do not depend on the place.

#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace batchinfer {

// exp(x) to about one unit in the last place: 2^n * p(r), x = n ln 2 + r, |r| <= ln 2 / 2; -inf gives 0, NaN stays.
inline __m512 exp_values(__m512 x) {
  const __m512 kLn2High = _mm512_set1_ps(0.693359375f), kLn2Low = _mm512_set1_ps(-2.12194440e-4f);
  // limits first: beyond them 2^n under- or overflows anyway; min and max keep a NaN in their second operand
  x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_fnmadd_ps(n, kLn2Low, _mm512_fnmadd_ps(n, kLn2High, x));
  // the polynomial of Cephes expf
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// 2^x for x <= 0 to 5e-6, enough for weights that are rounded to bfloat16; exactly 1 at 0, 0 from -200 on, NaN stays.
inline __m512 exp2_values(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(9.5828530e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5906425e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024099e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312419e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// 1 + exp(-x).
inline __m512 sigmoid_divisor(__m512 x) {
  return _mm512_add_ps(_mm512_set1_ps(1.0f), exp_values(_mm512_sub_ps(_mm512_setzero_ps(), x)));
}

inline __m512 silu_values(__m512 x) { return _mm512_div_ps(x, sigmoid_divisor(x)); }

inline __m512 sigmoid_values(__m512 x) { return _mm512_div_ps(_mm512_set1_ps(1.0f), sigmoid_divisor(x)); }

inline __mmask16 lanes(int64_t count) { return count >= 16 ? 0xFFFF : (__mmask16)((1u << count) - 1); }

inline __m512 load_wide(__mmask16 mask, const bf16* at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at)), 16));
}

// Rounded to bfloat16 and wide again.
inline __m512 rounded(__m512 values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)), 16));
}

inline void store_rounded(bf16* at, __mmask16 mask, __m512 values) {
  _mm256_mask_storeu_epi16(at, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// rows.cpp: one row of rms_norm.
void norm_row(const bf16* values, const bf16* weight, float eps, bf16* out, int64_t width);

}  // namespace batchinfer
