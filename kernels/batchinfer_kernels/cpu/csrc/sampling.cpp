// The most likely token of each row of logits, and how likely all of them are.

#include <algorithm>
#include <cmath>
#include <vector>

#include "vector_math.h"

namespace batchinfer {

void argmax(const float* logits, int64_t num_rows, int64_t num_columns, int64_t* tokens, bool* is_finite) {
  const double nanoseconds = num_rows * num_columns / 10.0;  // on one thread, roughly
  run_tasks(num_rows, nanoseconds, [&](int64_t row) {
    const float* values = logits + row * num_columns;
    Floats best = floats(-INFINITY);
    Ints best_at = ints(0), at = steps();
    Mask strange = no_lanes();
    for (int64_t i = 0; i < num_columns; i += 16, at = plus(at, ints(16))) {
      const First first = lanes(num_columns - i);
      const Floats part = load_or(first, values + i, -INFINITY);
      strange = either(strange, both(first, not_below(magnitude(part), floats(INFINITY))));
      const Mask is_better = is_greater(part, best);
      best = choose(is_better, part, best);
      best_at = choose(is_better, at, best_at);
    }
    // of the lanes with the largest value the one that found it first
    const Mask has_it = is_equal(best, floats(largest_of(best)));
    tokens[row] = any(has_it) ? smallest_of(has_it, best_at) : 0;
    is_finite[row] = !any(strange);
  });
}

void powers_of(const float* logits, double temperature, int64_t count, double* powers, double* total) {
  float largest = -INFINITY;
  for (int64_t i = 0; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
  for (int64_t i = 0; i < count; ++i) {
    const double below = static_cast<double>(logits[i]) - static_cast<double>(largest);
    powers[i] = below == 0.0 ? 1.0 : exp_double(below / temperature);  // the temperature may count as zero
  }
  // eight sums side by side, added up in this order
  double sums[8] = {};
  const int64_t whole = count / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    for (int64_t lane = 0; lane < 8; ++lane) sums[lane] += powers[i + lane];
  }
  for (int64_t i = whole; i < count; ++i) sums[i - whole] += powers[i];
  for (int64_t half = 4; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  *total = sums[0];
}

void exponentials(const float* logits, const double* temperatures, int64_t num_rows, int64_t num_columns,
                  double* powers, double* totals) {
  const double nanoseconds = 1.0 * num_rows * num_columns;  // on one thread, roughly
  run_tasks(num_rows, nanoseconds, [&](int64_t row) {
    powers_of(logits + row * num_columns, temperatures[row], num_columns, powers + row * num_columns, totals + row);
  });
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
  const double nanoseconds = 1.0 * num_rows * num_columns;  // on one thread, roughly
  run_tasks(num_rows, nanoseconds, [&](int64_t row) {
    static thread_local std::vector<double> powers;
    powers.resize(num_columns);
    const float* const values = logits + row * num_columns;
    double total;
    powers_of(values, 1.0, num_columns, powers.data(), &total);
    out[row] = *std::max_element(values, values + num_columns) + log_double(total);
  });
}

}  // namespace batchinfer
