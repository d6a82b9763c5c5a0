// Attention of one request's chunk in the plain form (DeepSeek-V2 report section 2.1): every head has its own keys and
// values. A task is one head and up to 32 queries.

#include <algorithm>
#include <vector>

#include "attention.h"

namespace batchinfer {
namespace {

struct HeadPages : PageOf {
  const bf16 *head_keys, *head_values;
  int64_t key_stride, value_stride;

  HeadPages(const bf16* head_keys, int64_t key_stride, const bf16* head_values, int64_t value_stride)
      : head_keys(head_keys), head_values(head_values), key_stride(key_stride), value_stride(value_stride) {}
  Rows keys(int64_t start) const override { return {head_keys + start * key_stride, key_stride}; }
  Rows values(int64_t start) const override { return {head_values + start * value_stride, value_stride}; }
};

}  // namespace

void mla_prefill(const PrefillShape& shape, const bf16* q, const bf16* kv, Rows rotary, const int64_t* positions,
                 bf16* keys, bf16* out) {
  const int64_t width = shape.nope_dim + shape.rotary_dim;
  const int64_t head_values = shape.nope_dim + shape.value_dim, kv_stride = shape.num_heads * head_values;
  // a key is its own part from the latent, then the rotary part that all heads share
  run_tasks(shape.num_heads * shape.num_keys / kPageTokens, [&](int64_t task) {
    const int64_t head = task % shape.num_heads, start = task / shape.num_heads * kPageTokens;
    for (int64_t key = start; key < start + kPageTokens; ++key) {
      bf16* at = keys + (head * shape.num_keys + key) * width;
      std::copy_n(kv + key * kv_stride + head * head_values, shape.nope_dim, at);
      std::copy_n(rotary.data + key * rotary.stride, shape.rotary_dim, at + shape.nope_dim);
    }
  });

  const int64_t num_tiles = (shape.num_queries + kAttentionRows - 1) / kAttentionRows;
  run_tasks(shape.num_heads * num_tiles, [&](int64_t task) {
    // the last queries see the most keys: they go first, so that threads end together
    const int64_t head = task % shape.num_heads, row = (num_tiles - 1 - task / shape.num_heads) * kAttentionRows;
    const int64_t num_rows = std::min(kAttentionRows, shape.num_queries - row);
    const int64_t last = *std::max_element(positions + row, positions + row + num_rows);
    attend({{q + (row * shape.num_heads + head) * width, shape.num_heads * width},
            positions,
            row,
            1,
            num_rows,
            std::min(last + 1, shape.context_tokens),
            width,
            shape.value_dim,
            shape.scale,
            out + (row * shape.num_heads + head) * shape.value_dim,
            shape.num_heads * shape.value_dim},
           HeadPages(keys + head * shape.num_keys * width, width, kv + head * head_values + shape.nope_dim, kv_stride));
  });
}

}  // namespace batchinfer
