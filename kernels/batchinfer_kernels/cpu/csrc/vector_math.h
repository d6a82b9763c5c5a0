// exp, 2 to a power and SiLU of 16 float32 values; each lane depends on its own value only, so bits do not depend on the place.

#pragma once

#include "lanes.h"

namespace batchinfer {

// exp(x) to about one unit in the last place: 2^n * p(r), x = n ln 2 + r, |r| <= ln 2 / 2; -inf gives 0, NaN stays.
inline Floats exp_values(Floats x) {
  // limits first: beyond them 2^n under- or overflows anyway; a NaN is kept
  x = smaller(floats(89.0f), larger(floats(-104.0f), x));
  const Floats n = nearest_whole(x * floats(1.44269504f));
  const Floats r = subtract_product(subtract_product(x, n, floats(0.693359375f)), n, floats(-2.12194440e-4f));
  // the polynomial of Cephes expf
  Floats p = floats(1.9875691500e-4f);
  p = multiply_add(p, r, floats(1.3981999507e-3f));
  p = multiply_add(p, r, floats(8.3334519073e-3f));
  p = multiply_add(p, r, floats(4.1665795894e-2f));
  p = multiply_add(p, r, floats(1.6666665459e-1f));
  p = multiply_add(p, r, floats(5.0000001201e-1f));
  p = multiply_add(p, r * r, r + floats(1.0f));
  return scaled(p, n);
}

// 2^x for x <= 0 to 5e-6, enough for weights that are rounded to bfloat16; exactly 1 at 0, 0 from -200 on, NaN stays.
inline Floats exp2_values(Floats x) {
  x = larger(floats(-200.0f), x);
  const Floats n = nearest_whole(x), r = x - n;
  Floats p = floats(9.5828530e-3f);
  p = multiply_add(p, r, floats(5.5906425e-2f));
  p = multiply_add(p, r, floats(2.4024099e-1f));
  p = multiply_add(p, r, floats(6.9312419e-1f));
  p = multiply_add(p, r, floats(1.0f));
  return scaled(p, n);
}

// 1 + exp(-x).
inline Floats sigmoid_divisor(Floats x) { return floats(1.0f) + exp_values(floats(0.0f) - x); }

inline Floats silu_values(Floats x) { return x / sigmoid_divisor(x); }

inline Floats sigmoid_values(Floats x) { return floats(1.0f) / sigmoid_divisor(x); }

// rows.cpp: one row of rms_norm.
void norm_row(const bf16* values, const bf16* weight, float eps, bf16* out, int64_t width);

}  // namespace batchinfer
