// Row-wise operations: norm, activation, rounding to 8 bits, sums over experts.

#include <algorithm>
#include <cmath>

#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskValues = 16384;  // below this a thread costs more to wake than it does
constexpr float kMostInt8 = 127.0f;

// Calls row(i) for all rows, some at a time on each thread.
template <class Row>
void for_rows(int64_t num_rows, int64_t width, Row row) {
  const int64_t step = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, width));
  run_tasks((num_rows + step - 1) / step, [&](int64_t task) {
    for (int64_t index = task * step; index < std::min(num_rows, (task + 1) * step); ++index) row(index);
  });
}

// 16 values of a token's sum over its experts, products and sums rounded one by one.
inline __m512 weighted_sum(const bf16* rows, const int64_t* place, const float* weights, int64_t topk, int64_t width,
                           __mmask16 mask, int64_t column) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < topk; ++k) {
    const __m512 part = load_wide(mask, rows + place[k] * width + column);
    sum = _mm512_add_ps(sum, _mm512_mul_ps(part, _mm512_set1_ps(weights[k])));
  }
  return sum;
}

}  // namespace

void norm_row(const bf16* values, const bf16* weight, float eps, bf16* out, int64_t width) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += 16) {
    const __m512 part = load_wide(lanes(width - i), values + i);
    squares = _mm512_fmadd_ps(part, part, squares);
  }
  const float total = _mm512_reduce_add_ps(squares);
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(total / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < width; i += 16) {
    const __mmask16 mask = lanes(width - i);
    const __m512 normed = _mm512_mul_ps(load_wide(mask, values + i), factor);
    // rounded before the weight, as in the reference
    store_rounded(out + i, mask, _mm512_mul_ps(rounded(normed), load_wide(mask, weight + i)));
  }
}

void rms_norm(Rows x, const bf16* weight, float eps, bf16* out, int64_t num_rows, int64_t width) {
  for_rows(num_rows, width, [&](int64_t row) { norm_row(x.at(row), weight, eps, out + row * width, width); });
}

void silu_mul(Rows gate, Rows up, bf16* out, int64_t num_rows, int64_t width) {
  for_rows(num_rows, width, [&](int64_t row) {
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 mask = lanes(width - i);
      const __m512 active = silu_values(load_wide(mask, gate.at(row) + i));
      store_rounded(out + row * width + i, mask, _mm512_mul_ps(active, load_wide(mask, up.at(row) + i)));
    }
  });
}

void add_sums(const bf16* hidden, const float* sums, const bf16* added, bf16* out, int64_t num_values) {
  for_rows((num_values + 1023) / 1024, 1024, [&](int64_t part) {
    for (int64_t i = part * 1024; i < std::min(num_values, (part + 1) * 1024); i += 16) {
      const __mmask16 mask = lanes(num_values - i);
      __m512 sum = _mm512_maskz_loadu_ps(mask, sums + i);
      if (added) sum = _mm512_add_ps(sum, load_wide(mask, added + i));
      store_rounded(out + i, mask, _mm512_add_ps(load_wide(mask, hidden + i), rounded(sum)));
    }
  });
}

void to_bytes(Rows x, uint8_t* out, float* scales, int64_t num_rows, int64_t width) {
  const int64_t num_blocks = (width + kBlock - 1) / kBlock;
  for_rows(num_rows, width, [&](int64_t row) {
    for (int64_t block = 0; block < num_blocks; ++block) {
      const bf16* values = x.at(row) + block * kBlock;
      uint8_t* bytes = out + (row * num_blocks + block) * kBlock;
      const int64_t count = std::min(kBlock, width - block * kBlock);
      __m512 peaks = _mm512_setzero_ps();
      bool is_finite = true;
      for (int64_t i = 0; i < count; i += 16) {
        const __m512 part = _mm512_abs_ps(load_wide(lanes(count - i), values + i));
        is_finite = is_finite && !_mm512_cmp_ps_mask(part, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
        peaks = _mm512_max_ps(peaks, part);
      }
      const float peak = _mm512_reduce_max_ps(peaks);
      // a row that is not finite must not look finite afterwards: its scale is not
      scales[row * num_blocks + block] = is_finite ? peak / kMostInt8 : NAN;
      const __m512 factor = _mm512_set1_ps(is_finite && peak > 0 ? kMostInt8 / peak : 0.0f);
      for (int64_t i = 0; i < kBlock; i += 16) {
        const __m512 value = i < count ? load_wide(lanes(count - i), values + i) : _mm512_setzero_ps();
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(value, factor));
        const __m512i moved = _mm512_add_epi32(whole, _mm512_set1_epi32(128));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + i), _mm512_cvtusepi32_epi8(moved));
      }
    }
  });
}

void sum_per_token(const bf16* rows, const int64_t* place, const float* weights, float* sums, int64_t num_tokens,
                   int64_t topk, int64_t width) {
  for_rows(num_tokens, width * topk, [&](int64_t token) {
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 mask = lanes(width - i);
      const __m512 sum = weighted_sum(rows, place + token * topk, weights + token * topk, topk, width, mask, i);
      _mm512_mask_storeu_ps(sums + token * width + i, mask, sum);
    }
  });
}

void combine(const bf16* hidden, const bf16* rows, const int64_t* place, const float* weights, const bf16* added,
             bf16* out, int64_t num_tokens, int64_t topk, int64_t width) {
  for_rows(num_tokens, width * topk, [&](int64_t token) {
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 mask = lanes(width - i);
      __m512 sum = weighted_sum(rows, place + token * topk, weights + token * topk, topk, width, mask, i);
      if (added) sum = _mm512_add_ps(sum, load_wide(mask, added + token * width + i));
      store_rounded(out + token * width + i, mask,
                    _mm512_add_ps(load_wide(mask, hidden + token * width + i), rounded(sum)));
    }
  });
}

}  // namespace batchinfer
