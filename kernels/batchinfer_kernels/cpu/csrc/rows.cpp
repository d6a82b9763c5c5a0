// Row-wise operations: root mean square norm and the SwiGLU activation.

#include <cmath>

#include "dot_tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskValues = 16384;  // below this a thread costs more to wake than it does

int64_t rows_per_task(int64_t width) { return std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, width)); }

void for_rows(int64_t num_rows, int64_t width, const std::function<void(int64_t)>& row) {
  const int64_t step = rows_per_task(width);
  run_tasks((num_rows + step - 1) / step, [&](int64_t task) {
    for (int64_t index = task * step; index < std::min(num_rows, (task + 1) * step); ++index) row(index);
  });
}

}  // namespace

void rms_norm(Rows x, const bf16* weight, float eps, bf16* out, int64_t num_rows, int64_t width) {
  for_rows(num_rows, width, [&](int64_t row) {
    const bf16* values = x.data + row * x.stride;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
      const __m512 part = load_wide(lanes(width - i), values + i);
      squares = _mm512_fmadd_ps(part, part, squares);
    }
    const __m512 sums = add_lanes(squares, squares, squares, squares);
    const __m512 pairs = add_groups(sums, sums);
    const float total = _mm512_cvtss_f32(add_groups(pairs, pairs));
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(total / static_cast<float>(width) + eps));
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 mask = lanes(width - i);
      const __m512 normed = _mm512_mul_ps(load_wide(mask, values + i), factor);
      // rounded before the weight, as in the reference
      const __m512 rounded = _mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(normed)), 16));
      store_rounded(out + row * width + i, mask, _mm512_mul_ps(rounded, load_wide(mask, weight + i)));
    }
  });
}

void silu_mul(Rows gate, Rows up, bf16* out, int64_t num_rows, int64_t width) {
  for_rows(num_rows, width, [&](int64_t row) {
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 mask = lanes(width - i);
      const __m512 active = silu_values(load_wide(mask, gate.data + row * gate.stride + i));
      store_rounded(out + row * width + i, mask, _mm512_mul_ps(active, load_wide(mask, up.data + row * up.stride + i)));
    }
  });
}

}  // namespace batchinfer
