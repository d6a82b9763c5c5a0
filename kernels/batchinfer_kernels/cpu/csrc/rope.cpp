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
    const First those = lanes(half - i);
    const Floats c = load(those, cos + i), s = load(those, sin + i);
    Floats first, second;
    if (is_interleaved) {
      const Ints pairs = load_ints(those, x + 2 * i);
      first = low_values(pairs);
      second = high_values(pairs);
    } else {
      first = load_wide(those, x + i);
      second = load_wide(those, x + half + i);
    }
    // products and their sum are rounded one by one, as in the reference
    const Floats turned_first = first * c - second * s, turned_second = second * c + first * s;
    if (is_interleaved) {
      store_ints(x + 2 * i, those, beside(rounded_bits(turned_first), rounded_bits(turned_second)));
    } else {
      store_rounded(x + i, those, turned_first);
      store_rounded(x + half + i, those, turned_second);
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
