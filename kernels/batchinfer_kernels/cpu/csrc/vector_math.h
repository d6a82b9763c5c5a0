// exp, 2 to a power and SiLU of 16 float32 values, exp of 8 float64 values; each lane depends on its own value only, so
// bits do not depend on the place.

#pragma once

#include <cmath>

#include "lanes.h"

namespace batchinfer {

// The sum of factors times falling powers of x, by Horner's rule; the last factor is that of x^0.
inline Floats lanes_of(Floats, float factor) { return floats(factor); }
inline Doubles lanes_of(Doubles, double factor) { return doubles(factor); }
inline double lanes_of(double, double factor) { return factor; }
inline double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class Values, class Factor, class... Factors>
inline Values polynomial(Values x, Factor first, Factors... others) {
  Values sum = lanes_of(x, first);
  ((sum = multiply_add(sum, x, lanes_of(x, others))), ...);
  return sum;
}

// exp(x) to about one unit in the last place: 2^n * p(r), x = n ln 2 + r, |r| <= ln 2 / 2; -inf gives 0, NaN stays.
inline Floats exp_values(Floats x) {
  // limits first: beyond them 2^n under- or overflows anyway; a NaN is kept
  x = smaller(floats(89.0f), larger(floats(-104.0f), x));
  const Floats n = nearest_whole(x * floats(1.44269504f));
  const Floats r = subtract_product(subtract_product(x, n, floats(0.693359375f)), n, floats(-2.12194440e-4f));
  // the polynomial of Cephes expf
  Floats p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                        5.0000001201e-1f);
  p = multiply_add(p, r * r, r + floats(1.0f));
  return scaled(p, n);
}

// 2^x for x <= 0 to 5e-6, enough for weights that are rounded to bfloat16; exactly 1 at 0, 0 from -200 on, NaN stays.
inline Floats exp2_values(Floats x) {
  x = larger(floats(-200.0f), x);
  const Floats n = nearest_whole(x), r = x - n;
  const Floats p = polynomial(r, 9.5828530e-3f, 5.5906425e-2f, 2.4024099e-1f, 6.9312419e-1f, 1.0f);
  return scaled(p, n);
}

// The same to one unit in the last place: the polynomial of Cephes exp2f.
inline Floats fine_exp2_values(Floats x) {
  x = larger(floats(-200.0f), x);
  const Floats n = nearest_whole(x), r = x - n;
  Floats p = polynomial(r, 1.535336188319500e-4f, 1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f,
                        2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f);
  return scaled(p, n);
}

// 1 + exp(-x).
inline Floats sigmoid_divisor(Floats x) { return floats(1.0f) + exp_values(floats(0.0f) - x); }

inline Floats silu_values(Floats x) { return x / sigmoid_divisor(x); }

// A limit passes what is no number on.
inline Floats active_values(Floats gate, Floats up, const Activation& activation) {
  if (activation.is_plain()) return silu_values(gate) * up;
  const Floats limit = floats(activation.limit);
  gate = smaller(limit, gate);
  up = larger(floats(0.0f) - limit, smaller(limit, up));
  Floats inner = floats(activation.alpha) * gate;
  if (activation.cubic != 0.0f) inner = inner * multiply_add(floats(activation.cubic) * gate, gate, floats(1.0f));
  return gate / sigmoid_divisor(inner) * (up + floats(activation.shift));
}

inline Floats sigmoid_values(Floats x) { return floats(1.0f) / sigmoid_divisor(x); }

// exp of float64, for x <= 0: 2^n * p(r), x = n ln 2 + r, |r| <= ln 2 / 2, p a Taylor sum to r^13 / 13!; below -708 it
// gives 0, NaN stays.
inline Doubles exp_values(Doubles x) {
  const Doubles least = doubles(-708.0), limited = larger(least, x);
  const Doubles n = nearest_whole(limited * doubles(1.4426950408889634));
  Doubles r = subtract_product(limited, n, doubles(6.93147180369123816490e-01));
  r = subtract_product(r, n, doubles(1.90821492927058770002e-10));
  const Doubles p = polynomial(r, 1.6059043836821613e-10, 2.08767569878681e-09, 2.505210838544172e-08,
                               2.755731922398589e-07, 2.7557319223985893e-06, 2.48015873015873e-05,
                               1.984126984126984e-04, 1.3888888888888889e-03, 8.333333333333333e-03,
                               4.1666666666666664e-02, 1.6666666666666666e-01, 0.5, 1.0, 1.0);
  return zero_below(least, x, scaled(p, n));
}

// The largest of a row; what is not a number is passed over.
inline float largest_value(const float* values, int64_t count) {
  Floats best = floats(-INFINITY);
  for (int64_t i = 0; i < count; i += 16) best = larger(load_or(lanes(count - i), values + i, -INFINITY), best);
  return largest_of(best);
}

// sampling.cpp: the sum of exp(logit - largest) over a row. The powers go to `powers`, which has room for whole groups
// of 16 of them, unless it is null.
double powers_of(const float* logits, int64_t count, float largest, double* powers);

// rows.cpp: one row of rms_norm.
template <class Value, class Factor>
void norm_row(const Value* values, const Factor* weight, float eps, Value* out, int64_t width);

}  // namespace batchinfer
