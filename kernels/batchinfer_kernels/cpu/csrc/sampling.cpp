// The most likely token of each row of logits, how likely all of them are, and tokens that may not come.

#include <cmath>

#include "vector_math.h"

namespace batchinfer {

void argmax(const float* logits, int64_t num_rows, int64_t num_columns, int64_t* tokens, bool* is_finite) {
  const double nanoseconds = num_rows * num_columns / 10.0;  // on one thread, roughly
  run_tasks(num_rows, nanoseconds, [&](int64_t row) {
    const float* values = logits + row * num_columns;
    Floats best = floats(-INFINITY), strange = floats(0.0f);
    Ints best_at = ints(0), at = steps();
    for (int64_t i = 0; i < num_columns; i += 16, at = plus(at, ints(16))) {
      // behind the last column the first value again, which changes nothing
      const Floats part = load_or(lanes(num_columns - i), values + i, values[0]);
      strange = strange + (part - part);  // what is not finite makes no number of it
      const Mask is_better = is_greater(part, best);
      best = choose(is_better, part, best);
      best_at = choose(is_better, at, best_at);
    }
    // of the lanes with the largest value the one that found it first
    const Mask has_it = is_equal(best, floats(largest_of(best)));
    tokens[row] = any(has_it) ? smallest_of(has_it, best_at) : 0;
    is_finite[row] = !any(not_below(strange, floats(INFINITY)));
  });
}

void apply_token_bitmask(float* logits, const int64_t* rows, const Allowed& allowed, int64_t num_rows, int64_t num_columns) {
  const double nanoseconds = num_rows * num_columns / 10.0;  // on one thread, roughly
  run_tasks(num_rows, nanoseconds, [&](int64_t row) {
    float* const values = logits + rows[row] * num_columns;
    for (int64_t i = 0; i < num_columns; i += 16) {
      const uint32_t bits = allowed.bits(row, i / 16);
      if (bits == 0xFFFF) continue;
      const First first = lanes(num_columns - i);
      store(values + i, first, choose(mask_of(bits), load(first, values + i), floats(kForbidden)));
    }
  });
}

double powers_of(const float* logits, int64_t count, float largest, double* powers) {
  const Doubles most = doubles(largest);
  Doubles sum = doubles(0.0);
  for (int64_t i = 0; i < count; i += 16) {
    const Floats part = load_or(lanes(count - i), logits + i, -INFINITY);
    const Doubles low = exp_values(low_doubles(part) - most), high = exp_values(high_doubles(part) - most);
    sum = sum + low;
    sum = sum + high;
    if (!powers) continue;
    store(powers + i, low);
    store(powers + i + 8, high);
  }
  return sum_of(sum);
}

// log(x) for normal x > 0: x = 2^n * m, sqrt(1/2) <= m < sqrt(2); log(m) = 2 atanh((m - 1) / (m + 1)).
static double log_double(double x) {
  int n;
  double m = std::frexp(x, &n);
  if (m < 0.7071067811865476) {
    m *= 2;
    --n;
  }
  const double s = (m - 1) / (m + 1), square = s * s;
  double sum = 0;
  for (int k = 25; k >= 3; k -= 2) sum = __builtin_fma(sum, square, 1.0 / k);
  const double of_m = 2 * __builtin_fma(sum * square, s, s);
  return __builtin_fma(n, 6.93147180369123816490e-01, __builtin_fma(n, 1.90821492927058770002e-10, of_m));
}

void log_sum_exp(const float* logits, int64_t num_rows, int64_t num_columns, double* out) {
  const double nanoseconds = num_rows * num_columns / 2.0;  // on one thread, roughly
  run_tasks(num_rows, nanoseconds, [&](int64_t row) {
    const float* const values = logits + row * num_columns;
    const float largest = largest_value(values, num_columns);
    out[row] = largest + log_double(powers_of(values, num_columns, largest, nullptr));
  });
}

}  // namespace batchinfer
