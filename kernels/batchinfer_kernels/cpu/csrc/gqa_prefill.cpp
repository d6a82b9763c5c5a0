// Grouped-query attention of several requests' chunks over pages: a task is one key head and up to 64 rows of a chunk, a row
// being one of its query heads at one token.

#include <algorithm>
#include <vector>

#include "attention.h"

namespace batchinfer {
namespace {

// Some rows of one chunk at a key head.
struct Part {
  int64_t chunk, first, count;
};

std::vector<Part> parts_of(const PrefillChunk* chunks, int64_t num_chunks, int64_t group) {
  // whole tokens, where they are no more than fit
  const int64_t step = group <= kAttentionRows ? kAttentionRows / group * group : kAttentionRows;
  std::vector<Part> parts;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    // the last queries see the most keys: they go first, so that threads end together
    const int64_t num_rows = chunks[chunk].num_rows * group;
    for (int64_t row = (num_rows - 1) / step * step; row >= 0; row -= step) {
      parts.push_back({chunk, row, std::min(step, num_rows - row)});
    }
  }
  return parts;
}

}  // namespace

template <class Value>
void gqa_prefill(const GroupedHeads& heads, const PrefillChunk* chunks, int64_t num_chunks, const Value* q,
                 const Value* pages, const int64_t* positions, Value* out) {
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  const std::vector<Part> parts = parts_of(chunks, num_chunks, group);
  run_tasks(parts.size() * heads.num_kv_heads, [&](int64_t task) {
    const Part& part = parts[task / heads.num_kv_heads];
    const PrefillChunk& chunk = chunks[part.chunk];
    const int64_t key_head = task % heads.num_kv_heads;
    Attention<Value>& attention = Attention<Value>::begin(heads.width, heads.value_dim, heads.scale, Lanes::kRows);
    load_group(attention, heads, q, positions, key_head, chunk.first_row, part.first, part.count, 0);
    const int64_t *const own = positions + chunk.first_row + part.first / group;
    const auto [least, most] = std::minmax_element(own, own + (part.first % group + part.count + group - 1) / group);
    const int64_t num_tokens = std::min(*most + 1, chunk.context_tokens);
    const int64_t first = heads.window > 0 ? std::max<int64_t>(0, *least - heads.window + 1) : 0;
    for (int64_t start = first / kPageTokens * kPageTokens; start < num_tokens; start += kPageTokens) {
      const Value* const page = pages + chunk.page_ids[start / kPageTokens] * kPageTokens * heads.row_step;
      const Rows<Value> keys{page + key_head * heads.width, heads.row_step};
      const Rows<Value> values{page + heads.first_value + key_head * heads.value_dim, heads.row_step};
      const int64_t num_keys = std::min(kPageTokens, num_tokens - start);
      attention.add_page(0, part.count, keys, attention.values_of(values, num_keys), start, num_keys);
    }
    for (int64_t i = 0; i < part.count; ++i) {
      attention.finish(i, out + heads.row_of(chunk.first_row, key_head, part.first + i) * heads.value_dim);
    }
  });
}

template void gqa_prefill(const GroupedHeads&, const PrefillChunk*, int64_t, const bf16*, const bf16*, const int64_t*,
                          bf16*);
template void gqa_prefill(const GroupedHeads&, const PrefillChunk*, int64_t, const float*, const float*,
                          const int64_t*, float*);

}  // namespace batchinfer
