// Attention to a window and to compressed entries (compressed.cpp); see reference/compressed.py.

#pragma once

#include "kernels.h"

namespace batchinfer {

constexpr int64_t kNoRow = -1;
// Heads of `head_dim` values, normed unless `norm` is null, with the last ones turned.
template <class Value>
void rotate_heads(Rows<Value> x, int64_t num_heads, int64_t head_dim, const Value* norm, float eps, const Rotary& rotary,
                  Value* out, int64_t num_rows);
struct PoolShape {
  int64_t num_rows, num_requests, num_tokens, width, raw_width, ring_size, page_values, table_pages;
  float eps;
};
struct PoolLists {
  const int64_t *positions, *requests, *starts, *slots, *page_table;
};
template <class Value>
void pool_entries(const PoolShape& shape, const float* values, const float* gates, const float* bias, const float* norm,
                  const Rotary& rotary, const PoolLists& lists, float* waiting, Value* pages);
// Of the weights of heads the scale of a score is a part.
struct ChoiceShape {
  int64_t num_rows, num_heads, width, per_page, table_pages, topk;
};
template <class Value>
void choose_entries(const ChoiceShape& shape, const Value* q, const float* head_weights, const Value* pages,
                    const int64_t* page_table, const int64_t* requests, const int64_t* visible, int64_t* rows);
// Keys of each query, `num_keys` of `num_parts` rows of `part` values.
template <class Value>
struct KeyRows {
  const Value* data;
  const int64_t* ids;
  int64_t num_keys, num_parts, part;
};
struct EntryShape {
  int64_t num_rows, num_heads, width;
  float scale;
};
template <class Value>
void attend_entries(const EntryShape& shape, const Value* q, const KeyRows<Value>& window, const KeyRows<Value>& entries,
                    const float* sinks, const Rotary& back, Value* out);

}  // namespace batchinfer
