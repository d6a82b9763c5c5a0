// exp, 2 to a power and SiLU of 16 float32 values; each lane depends on its own value only, so bits do not depend on the place.

#pragma once

#include <cstring>

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

// The same to one unit in the last place: the polynomial of Cephes exp2f.
inline Floats fine_exp2_values(Floats x) {
  x = larger(floats(-200.0f), x);
  const Floats n = nearest_whole(x), r = x - n;
  Floats p = floats(1.535336188319500e-4f);
  p = multiply_add(p, r, floats(1.339887440266574e-3f));
  p = multiply_add(p, r, floats(9.618437357674640e-3f));
  p = multiply_add(p, r, floats(5.550332471162809e-2f));
  p = multiply_add(p, r, floats(2.402264791363012e-1f));
  p = multiply_add(p, r, floats(6.931472028550421e-1f));
  p = multiply_add(p, r, floats(1.0f));
  return scaled(p, n);
}

// 1 + exp(-x).
inline Floats sigmoid_divisor(Floats x) { return floats(1.0f) + exp_values(floats(0.0f) - x); }

inline Floats silu_values(Floats x) { return x / sigmoid_divisor(x); }

inline Floats sigmoid_values(Floats x) { return floats(1.0f) / sigmoid_divisor(x); }

// exp of float64, for x <= 0: 2^n * p(r), x = n ln 2 + r, |r| <= ln 2 / 2, p a Taylor sum to r^13 / 13!; below -708 it
// gives 0, NaN stays. Written for one value at a time: compilers make vectors of it, which changes no bit.
inline double exp_double(double x) {
  const double limited = x < -708.0 ? -708.0 : x;
  const double n = __builtin_nearbyint(limited * 1.4426950408889634);
  double r = __builtin_fma(n, -6.93147180369123816490e-01, limited);
  r = __builtin_fma(n, -1.90821492927058770002e-10, r);
  double p = 1.6059043836821613e-10;
  p = __builtin_fma(p, r, 2.08767569878681e-09);
  p = __builtin_fma(p, r, 2.505210838544172e-08);
  p = __builtin_fma(p, r, 2.755731922398589e-07);
  p = __builtin_fma(p, r, 2.7557319223985893e-06);
  p = __builtin_fma(p, r, 2.48015873015873e-05);
  p = __builtin_fma(p, r, 1.984126984126984e-04);
  p = __builtin_fma(p, r, 1.3888888888888889e-03);
  p = __builtin_fma(p, r, 8.333333333333333e-03);
  p = __builtin_fma(p, r, 4.1666666666666664e-02);
  p = __builtin_fma(p, r, 1.6666666666666666e-01);
  p = __builtin_fma(p, r, 0.5);
  p = __builtin_fma(p, r, 1.0);
  p = __builtin_fma(p, r, 1.0);
  // 2^n: n is whole and from -1022 to 0; adding 1.5 * 2^52 puts it into the low bits
  const double moved = n + 6755399441055744.0;
  uint64_t bits;
  std::memcpy(&bits, &moved, sizeof(bits));
  bits = (bits + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -708.0 ? 0.0 : p * power;
}

// sampling.cpp: exp((logit - largest) / temperature) of one row, and their sum.
void powers_of(const float* logits, double temperature, int64_t count, double* powers, double* total);

// rows.cpp: one row of rms_norm.
template <class Value>
void norm_row(const Value* values, const Value* weight, float eps, Value* out, int64_t width);

}  // namespace batchinfer
