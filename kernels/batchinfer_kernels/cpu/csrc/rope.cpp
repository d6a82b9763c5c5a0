// Rotary positions (arXiv 2104.09864) in place, and the latents of new tokens on their way into the pages.

#include <algorithm>
#include <vector>

#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskRows = 32;

void turn(bf16* x, const float* cos, const float* sin, int64_t rotary, bool is_interleaved) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const __mmask16 mask = lanes(half - i);
    const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i), s = _mm512_maskz_loadu_ps(mask, sin + i);
    __m512 first, second;
    if (is_interleaved) {
      const __m512i pairs = _mm512_maskz_loadu_epi32(mask, x + 2 * i);
      first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
      second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
    } else {
      first = load_wide(mask, x + i);
      second = load_wide(mask, x + half + i);
    }
    // products and their sum are rounded one by one, as in the reference
    const __m512 turned_first = _mm512_sub_ps(_mm512_mul_ps(first, c), _mm512_mul_ps(second, s));
    const __m512 turned_second = _mm512_add_ps(_mm512_mul_ps(second, c), _mm512_mul_ps(first, s));
    if (is_interleaved) {
      const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(turned_first));
      const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(turned_second));
      _mm512_mask_storeu_epi32(x + 2 * i, mask, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    } else {
      store_rounded(x + i, mask, turned_first);
      store_rounded(x + half + i, mask, turned_second);
    }
  }
}

template <class Row>
void for_rows(int64_t num_rows, Row row) {
  run_tasks((num_rows + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    for (int64_t i = task * kTaskRows; i < std::min(num_rows, (task + 1) * kTaskRows); ++i) row(i);
  });
}

}  // namespace

void rope(bf16* x, int64_t row_stride, int64_t head_stride, int64_t num_heads, int64_t num_rows,
          const Rotary& rotary) {
  const int64_t half = rotary.rotary / 2;
  for_rows(num_rows, [&](int64_t row) {
    for (int64_t head = 0; head < num_heads; ++head) {
      turn(x + row * row_stride + head * head_stride, rotary.cos + row * half, rotary.sin + row * half, rotary.rotary,
           rotary.is_interleaved);
    }
  });
}

void write_latents(Rows x, const bf16* norm, float eps, const Rotary& rotary, int64_t latent_dim,
                   const int64_t* slots, bf16* pages, int64_t num_rows) {
  const int64_t half = rotary.rotary / 2, width = latent_dim + rotary.rotary;
  for_rows(num_rows, [&](int64_t row) {
    bf16* out = pages + slots[row] * width;
    norm_row(x.at(row), norm, eps, out, latent_dim);
    std::copy_n(x.at(row) + latent_dim, rotary.rotary, out + latent_dim);
    turn(out + latent_dim, rotary.cos + row * half, rotary.sin + row * half, rotary.rotary, rotary.is_interleaved);
  });
}

}  // namespace batchinfer
