// DeepSeek Sparse Attention: index keys on their way into the pages, the best keys of a query, and attention to those
// alone (see reference/sparse.py). Every query stands for itself; all its heads meet the same keys.

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "best_keys.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskRows = 32, kTaskPages = 32;
constexpr int64_t kMostScores = 16 << 20;  // at once

// A layer norm, rounded once.
template <class Value>
void layer_norm_row(const Value* values, const Value* weight, const Value* bias, float eps, Value* out, int64_t width) {
  const float share = 1.0f / static_cast<float>(width);
  Floats sum = floats(0.0f), squares = floats(0.0f);
  for (int64_t i = 0; i < width; i += 16) sum = sum + load_wide(lanes(width - i), values + i);
  const Floats mean = floats(sum_of(sum) * share);
  const auto centred = [&](int64_t i) { return load_wide(lanes(width - i), values + i) - mean; };
  const int64_t whole = width / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) squares = multiply_add(centred(i), centred(i), squares);
  if (whole < width) {
    // lanes behind the last value are not far from the mean, they are not there
    alignas(64) float last[16];
    store(last, centred(whole));
    const Floats there = load(lanes(width - whole), last);
    squares = multiply_add(there, there, squares);
  }
  const Floats factor = floats(1.0f / std::sqrt(sum_of(squares) * share + eps));
  for (int64_t i = 0; i < width; i += 16) {
    const First first = lanes(width - i);
    const Floats normed = centred(i) * factor;
    store_rounded(out + i, first, multiply_add(normed, load_wide(first, weight + i), load_wide(first, bias + i)));
  }
}

// Writes the slots of the `topk` best of `num_keys` scores, in the order of positions; among equal ones the first.
void choose(const float* scores, int64_t num_keys, int64_t topk, const int64_t* page_ids, int32_t* slots) {
  take_best(scores, num_keys, topk, [&](int64_t key) {
    *slots++ = static_cast<int32_t>(page_ids[key / kPageTokens] * kPageTokens + key % kPageTokens);
  });
}

template <class Value>
struct Scorer {
  const IndexShape& shape;
  const Value* q;
  const float* head_weights;
  const Value* pages;

  // Scores of one query with up to kTaskPages pages, from page `first` on; `scores` is that of its first key.
  void run(int64_t row, const int64_t* page_ids, int64_t num_keys, int64_t first, float* scores) const {
    const int64_t last = std::min((first + kTaskPages) * kPageTokens, num_keys);
    for (int64_t head = 0; head < shape.num_heads; head += kAttentionRows) {
      const int64_t num_heads = std::min(kAttentionRows, shape.num_heads - head);
      Attention<Value>& attention = Attention<Value>::begin(shape.width, 16, 1.0f, Lanes::kRows);
      attention.load_queries(0, num_heads, {q + (row * shape.num_heads + head) * shape.width, shape.width});
      for (int64_t start = first * kPageTokens; start < last; start += kPageTokens) {
        const auto keys_of = [&](int64_t at) -> Rows<Value> {
          return {pages + page_ids[at / kPageTokens] * kPageTokens * shape.row_step, shape.row_step};
        };
        attention.score_page(num_heads, keys_of(start), std::min(kPageTokens, last - start),
                             head_weights + row * shape.num_heads + head, head > 0,
                             start + kPageTokens < last ? keys_of(start + kPageTokens) : Rows<Value>{}, scores + start);
      }
    }
  }
};

}  // namespace

template <class Value>
void write_index_keys(Rows<Value> x, const Value* norm, const Value* bias, float eps, const Rotary& rotary,
                      int64_t width, const int64_t* slots, Value* pages, int64_t row_step, int64_t num_rows) {
  const int64_t half = rotary.rotary / 2;
  run_tasks((num_rows + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    for (int64_t row = task * kTaskRows; row < std::min(num_rows, (task + 1) * kTaskRows); ++row) {
      Value* out = pages + slots[row] * row_step;
      layer_norm_row(x.at(row), norm, bias, eps, out, width);
      rope(out, 0, 0, 1, 1, {rotary.cos + row * half, rotary.sin + row * half, rotary.rotary, rotary.is_interleaved});
    }
  });
}

template <class Value>
void choose_keys(const IndexShape& shape, const Value* q, const float* head_weights, const Value* pages,
                 const int64_t* page_table, const int64_t* requests, const int64_t* positions, int32_t* slots) {
  const Scorer<Value> scorer{shape, q, head_weights, pages};
  const auto page_ids = [&](int64_t row) { return page_table + requests[row] * shape.table_pages; };
  struct Part {
    int64_t row, first_page;
  };
  std::vector<int64_t> starts;  // of each row's scores
  std::vector<Part> parts;
  std::vector<float> scores;
  for (int64_t first = 0, end = 0; first < shape.num_rows; first = end) {
    int64_t num_scores = 0;
    starts.clear();
    parts.clear();
    for (; end < shape.num_rows && (end == first || num_scores < kMostScores); ++end) {
      // who sees fewer keys than are chosen attends to all of them
      const int64_t num_pages = positions[end] + 1 < shape.topk ? 0 : positions[end] / kPageTokens + 1;
      for (int64_t page = 0; page < num_pages; page += kTaskPages) parts.push_back({end, page});
      starts.push_back(num_scores);
      num_scores += num_pages * kPageTokens;
    }
    if (static_cast<int64_t>(scores.size()) < num_scores) scores.resize(num_scores);
    run_tasks(parts.size(), [&](int64_t task) {
      const auto [row, page] = parts[task];
      scorer.run(row, page_ids(row), positions[row] + 1, page, scores.data() + starts[row - first]);
    });
    run_tasks(end - first, [&](int64_t task) {
      const int64_t row = first + task;
      int32_t* own = slots + row * shape.topk;
      if (positions[row] + 1 < shape.topk) {
        std::fill_n(own, shape.topk, kNoSlot);
      } else {
        choose(scores.data() + starts[task], positions[row] + 1, shape.topk, page_ids(row), own);
      }
    });
  }
}

template <class Value>
void mla_sparse(const SparseShape& shape, const Value* q, const Value* pages, const int32_t* slots, Value* out) {
  const Lanes lanes = shape.num_heads < kFewHeads ? Lanes::kKeys : Lanes::kRows;
  int64_t most = kAttentionRows;
  while (most > 16 && shape.num_rows * ((shape.num_heads + most - 1) / most) < 4 * num_threads()) most /= 2;
  const int64_t parts = (shape.num_heads + most - 1) / most;
  run_tasks(shape.num_rows * parts, [&](int64_t task) {
    const int64_t row = task / parts, head = task % parts * most, num_heads = std::min(most, shape.num_heads - head);
    const int32_t* own = slots + row * shape.num_keys;
    if (own[0] == kNoSlot) {
      std::fill_n(out + (row * shape.num_heads + head) * shape.latent_dim, num_heads * shape.latent_dim, Value{});
      return;
    }
    static thread_local Scratch<Value> keys;
    static thread_local std::vector<int64_t> rows;  // with room for a whole page of keys to come
    keys.grow(kPageTokens * shape.width);
    rows.assign(own, own + shape.num_keys);
    rows.resize(shape.num_keys + kPageTokens, own[0]);
    Attention<Value>& attention = Attention<Value>::begin(shape.width, shape.latent_dim, shape.scale, lanes);
    attention.load_queries(0, num_heads, {q + (row * shape.num_heads + head) * shape.width, shape.width});
    for (int64_t i = 0; i < num_heads; ++i) attention.set_position(i, shape.num_keys);  // it sees all of its keys
    for (int64_t start = 0; start < shape.num_keys; start += kPageTokens) {
      const int64_t num_keys = std::min(kPageTokens, shape.num_keys - start);
      for (int64_t key = 0; key < num_keys; ++key) {
        std::copy_n(pages + rows[start + key] * shape.row_step, shape.width, keys.data() + key * shape.width);
      }
      const Rows<Value> gathered{keys.data(), shape.width}, next{pages, shape.row_step, rows.data() + start + kPageTokens};
      attention.add_page(0, num_heads, gathered, attention.values_of(gathered, num_keys), start, num_keys,
                         start + kPageTokens < shape.num_keys ? next : Rows<Value>{});
    }
    for (int64_t i = 0; i < num_heads; ++i) {
      attention.finish(i, out + (row * shape.num_heads + head + i) * shape.latent_dim);
    }
  });
}

#define BATCHINFER_FOR_VALUE(Value)                                                                               \
  template void write_index_keys(Rows<Value>, const Value*, const Value*, float, const Rotary&, int64_t,          \
                                 const int64_t*, Value*, int64_t, int64_t);                                       \
  template void choose_keys(const IndexShape&, const Value*, const float*, const Value*, const int64_t*,          \
                            const int64_t*, const int64_t*, int32_t*);                                            \
  template void mla_sparse(const SparseShape&, const Value*, const Value*, const int32_t*, Value*);
BATCHINFER_FOR_VALUE(bf16)
BATCHINFER_FOR_VALUE(float)
#undef BATCHINFER_FOR_VALUE

}  // namespace batchinfer
