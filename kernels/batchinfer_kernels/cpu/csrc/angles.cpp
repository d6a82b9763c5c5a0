// Cosine and sine in float64 from their own polynomials, so that no library decides their last bits. Compilers make
// vectors of these loops, which changes no bit.

#include <algorithm>
#include <cmath>

#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskValues = 4096;

// sin(r) and cos(r) for |r| <= pi / 4: Taylor sums to r^17 and r^16.
inline double sine(double r) {
  const double square = r * r;
  const double p = polynomial(square, 2.8114572543455206e-15, -7.647163731819816e-13, 1.6059043836821613e-10,
                              -2.505210838544172e-08, 2.7557319223985893e-06, -1.984126984126984e-04,
                              8.333333333333333e-03, -1.6666666666666666e-01);
  return __builtin_fma(p * square, r, r);
}

inline double cosine(double r) {
  const double square = r * r;
  return polynomial(square, 4.779477332387385e-14, -1.1470745597729725e-11, 2.08767569878681e-09,
                    -2.755731922398589e-07, 2.48015873015873e-05, -1.3888888888888889e-03, 4.1666666666666664e-02, -0.5,
                    1.0);
}

}  // namespace

void cos_sin(const float* angles, double scale, int64_t num_values, float* cos, float* sin) {
  run_tasks((num_values + kTaskValues - 1) / kTaskValues, [&](int64_t task) {
    for (int64_t i = task * kTaskValues; i < std::min(num_values, (task + 1) * kTaskValues); ++i) {
      const double angle = angles[i];
      // quarter turns, taken off in two parts of pi / 2: enough for angles below 2^30
      const double quarters = __builtin_nearbyint(angle * 0.6366197723675814);
      double r = __builtin_fma(quarters, -1.5707963267948966, angle);
      r = __builtin_fma(quarters, -6.123233995736766e-17, r);
      const int64_t quadrant = static_cast<int64_t>(quarters) & 3;
      const double s = sine(r), c = cosine(r);
      const double turned_cos = quadrant & 1 ? s : c, turned_sin = quadrant & 1 ? c : s;
      cos[i] = static_cast<float>((quadrant == 1 || quadrant == 2 ? -turned_cos : turned_cos) * scale);
      sin[i] = static_cast<float>((quadrant >= 2 ? -turned_sin : turned_sin) * scale);
    }
  });
}

}  // namespace batchinfer
