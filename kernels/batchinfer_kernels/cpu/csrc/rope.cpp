// Rotary positions (arXiv 2104.09864) in place, and the latents of new tokens on their way into the pages.

#include <algorithm>
#include <vector>

#include "turn.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskRows = 32;

template <class Row>
void for_rows(int64_t num_rows, Row row) {
  run_tasks((num_rows + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    for (int64_t i = task * kTaskRows; i < std::min(num_rows, (task + 1) * kTaskRows); ++i) row(i);
  });
}

}  // namespace

template <class Value>
void rope(Value* x, int64_t row_stride, int64_t head_stride, int64_t num_heads, int64_t num_rows,
          const Rotary& rotary) {
  const int64_t half = rotary.rotary / 2;
  for_rows(num_rows, [&](int64_t row) {
    for (int64_t head = 0; head < num_heads; ++head) {
      turn(x + row * row_stride + head * head_stride, rotary.cos + row * half, rotary.sin + row * half, rotary.rotary,
           rotary.is_interleaved);
    }
  });
}

template <class Value>
void scale_rows(Value* x, const float* factors, int64_t num_rows, int64_t width) {
  for_rows(num_rows, [&](int64_t row) {
    const Floats factor = floats(factors[row]);
    for (int64_t i = 0; i < width; i += 16) {
      const First those = lanes(width - i);
      Value* const at = x + row * width + i;
      store_rounded(at, those, load_wide(those, at) * factor);
    }
  });
}

template <class Value>
void write_latents(Rows<Value> x, const Value* norm, float eps, const Rotary& rotary, int64_t latent_dim,
                   const int64_t* slots, Value* pages, int64_t row_step, int64_t num_rows) {
  const int64_t half = rotary.rotary / 2;
  for_rows(num_rows, [&](int64_t row) {
    Value* out = pages + slots[row] * row_step;
    norm_row(x.at(row), norm, eps, out, latent_dim);
    std::copy_n(x.at(row) + latent_dim, rotary.rotary, out + latent_dim);
    turn(out + latent_dim, rotary.cos + row * half, rotary.sin + row * half, rotary.rotary, rotary.is_interleaved);
  });
}

template <class Value, class Factor>
void write_heads(Rows<Value> x, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, const HeadNorms<Factor>& norms,
                 const Rotary& rotary, const int64_t* slots, Value* q, Value* pages, int64_t row_step,
                 int64_t num_rows) {
  const int64_t half = rotary.rotary / 2, width = num_kv_heads * head_dim;
  for_rows(num_rows, [&](int64_t row) {
    const auto place = [&](const Value* from, int64_t count, const Factor* norm, bool is_whole, Value* to) {
      if (!norm) {
        std::copy_n(from, count * head_dim, to);
      } else if (is_whole) {
        norm_row(from, norm, norms.eps, to, count * head_dim);
      } else {
        for (int64_t i = 0; i < count * head_dim; i += head_dim) norm_row(from + i, norm, norms.eps, to + i, head_dim);
      }
      for (int64_t head = 0; head < count; ++head) {
        turn(to + head * head_dim, rotary.cos + row * half, rotary.sin + row * half, rotary.rotary,
             rotary.is_interleaved);
      }
    };
    const Value* const from = x.at(row);
    Value* const held = pages + slots[row] * row_step;
    place(from, num_heads, norms.q, norms.is_q_whole, q + row * num_heads * head_dim);
    place(from + num_heads * head_dim, num_kv_heads, norms.k, norms.is_k_whole, held);
    std::copy_n(from + num_heads * head_dim + width, width, held + width);
  });
}

#define BATCHINFER_FOR_VALUE(Value)                                                                          \
  template void rope(Value*, int64_t, int64_t, int64_t, int64_t, const Rotary&);                             \
  template void scale_rows(Value*, const float*, int64_t, int64_t);                                          \
  template void write_latents(Rows<Value>, const Value*, float, const Rotary&, int64_t, const int64_t*,      \
                              Value*, int64_t, int64_t);                                                     \
  template void write_heads(Rows<Value>, int64_t, int64_t, int64_t, const HeadNorms<Value>&, const Rotary&,  \
                            const int64_t*, Value*, Value*, int64_t, int64_t);
BATCHINFER_FOR_VALUE(bf16)
BATCHINFER_FOR_VALUE(float)
template void write_heads(Rows<bf16>, int64_t, int64_t, int64_t, const HeadNorms<float>&, const Rotary&, const int64_t*,
                          bf16*, bf16*, int64_t, int64_t);
#undef BATCHINFER_FOR_VALUE

}  // namespace batchinfer
