// The most likely token of each row of logits.

#include <algorithm>
#include <cmath>

#include "lanes.h"

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

}  // namespace batchinfer
