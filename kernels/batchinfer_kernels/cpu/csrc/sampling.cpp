// The most likely token of each row of logits.

#include <algorithm>
#include <cmath>

#include "vector_math.h"

namespace batchinfer {

void argmax(const float* logits, int64_t num_rows, int64_t num_columns, int64_t* tokens, bool* is_finite) {
  const double nanoseconds = num_rows * num_columns / 10.0;  // on one thread, roughly
  run_tasks(num_rows, nanoseconds, [&](int64_t row) {
    const float* values = logits + row * num_columns;
    __m512 best = _mm512_set1_ps(-INFINITY);
    __m512i best_at = _mm512_setzero_si512();
    __mmask16 strange = 0;
    __m512i at = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t i = 0; i < num_columns; i += 16, at = _mm512_add_epi32(at, _mm512_set1_epi32(16))) {
      const __mmask16 mask = lanes(num_columns - i);
      const __m512 part = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), mask, values + i);
      strange |= _mm512_mask_cmp_ps_mask(mask, _mm512_abs_ps(part), _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
      const __mmask16 is_better = _mm512_cmp_ps_mask(part, best, _CMP_GT_OQ);
      best = _mm512_mask_mov_ps(best, is_better, part);
      best_at = _mm512_mask_mov_epi32(best_at, is_better, at);
    }
    // of the lanes with the largest value the one that found it first
    const float largest = _mm512_reduce_max_ps(best);
    const __mmask16 has_it = _mm512_cmp_ps_mask(best, _mm512_set1_ps(largest), _CMP_EQ_OQ);
    tokens[row] = has_it ? _mm512_mask_reduce_min_epi32(has_it, best_at) : 0;
    is_finite[row] = strange == 0;
  });
}

}  // namespace batchinfer
