// Attention to a window and to compressed entries (DeepSeek-V4 report section 2.3, see reference/compressed.py). Every query
// stands for itself: its keys are gathered page by page, those that are not there left out, and all its heads meet them.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention.h"
#include "best_keys.h"
#include "compressed.h"
#include "turn.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskRows = 16, kTaskKeys = 2048;
constexpr int64_t kMostScores = 16 << 20;  // at once

template <class Row>
void for_rows(int64_t num_rows, Row row) {
  run_tasks((num_rows + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    for (int64_t i = task * kTaskRows; i < std::min(num_rows, (task + 1) * kTaskRows); ++i) row(i);
  });
}

// Turns the last values of a row of `width`.
template <class Value>
void turn_end(Value* x, int64_t width, const Rotary& rotary, int64_t row) {
  const int64_t half = rotary.rotary / 2;
  turn(x + width - rotary.rotary, rotary.cos + row * half, rotary.sin + row * half, rotary.rotary, rotary.is_interleaved);
}

// A token's part of an entry: values and gates of all channels, and what is added to the gates, or null.
struct TokenPart {
  const float *values, *gates, *bias;
};

// The mean of the values by a softmax over the gates, channel by channel, tokens in their order.
void pool(const std::vector<TokenPart>& parts, int64_t width, float* out) {
  for (int64_t c = 0; c < width; c += 16) {
    const First first = lanes(width - c);
    const auto gate_of = [&](const TokenPart& part) {
      const Floats gate = load(first, part.gates + c);
      return part.bias ? gate + load(first, part.bias + c) : gate;
    };
    Floats peak = floats(-INFINITY), total = floats(0.0f), sum = floats(0.0f);
    for (const TokenPart& part : parts) peak = larger(peak, gate_of(part));
    for (const TokenPart& part : parts) {
      const Floats weight = exp_values(gate_of(part) - peak);
      total = total + weight;
      sum = multiply_add(weight, load(first, part.values + c), sum);
    }
    store(out + c, first, sum / total);
  }
}

inline void round_to(const float* from, int64_t count, float* to) { std::copy_n(from, count, to); }
inline void round_to(const float* from, int64_t count, bf16* to) {
  for (int64_t i = 0; i < count; i += 16) store_rounded(to + i, lanes(count - i), load(lanes(count - i), from + i));
}

// The keys of one query that are there, side by side, a page of them after the other.
template <class Value>
class GatheredKeys {
 public:
  // The calling thread's own.
  static GatheredKeys& of(int64_t row, int64_t width, const KeyRows<Value>& window, const KeyRows<Value>& entries) {
    static thread_local GatheredKeys own;
    // at equal places of a cache's lines they would displace each other
    own.stride_ = width * int64_t{sizeof(Value)} % 1024 == 0 ? width + 32 : width;
    own.keys_.grow(kPageTokens * own.stride_);
    own.pieces_.clear();
    own.starts_.clear();
    for (const KeyRows<Value>* rows : {&window, &entries}) {
      const int64_t* ids = rows->ids + row * rows->num_keys * rows->num_parts;
      for (int64_t key = 0; key < rows->num_keys; ++key, ids += rows->num_parts) {
        if (ids[0] == kNoRow) continue;
        own.starts_.push_back(own.pieces_.size());
        for (int64_t part = 0; part < rows->num_parts; ++part) {
          own.pieces_.push_back({rows->data + ids[part] * rows->part, rows->part});
        }
      }
    }
    own.starts_.push_back(own.pieces_.size());
    return own;
  }

  int64_t count() const { return starts_.size() - 1; }

  Rows<Value> page(int64_t start, int64_t num_keys) const {
    for (int64_t key = 0; key < num_keys; ++key) {
      Value* at = keys_.data() + key * stride_;
      for (size_t piece = starts_[start + key]; piece < starts_[start + key + 1]; ++piece) {
        std::memcpy(at, pieces_[piece].data, pieces_[piece].count * sizeof(Value));
        at += pieces_[piece].count;
      }
    }
    return {keys_.data(), stride_};
  }

  // For the cache: a page of keys from `start` on, as steps from one address.
  Rows<Value> coming(int64_t start) {
    if (start >= count()) return {};
    const auto offset_of = [&](int64_t key) { return pieces_[starts_[key]].data - pieces_[0].data; };
    next_.clear();
    for (int64_t key = start; key < std::min(start + kPageTokens, count()); ++key) next_.push_back(offset_of(key));
    next_.resize(2 * kPageTokens, next_.front());  // a step of a product may reach behind the page
    return {pieces_[0].data, 1, next_.data()};
  }

 private:
  struct Piece {
    const Value* data;
    int64_t count;
  };

  int64_t stride_ = 0;
  Scratch<Value> keys_;
  std::vector<Piece> pieces_;
  std::vector<size_t> starts_;  // first piece of each key, and the number of pieces
  std::vector<int64_t> next_;
};

}  // namespace

template <class Value>
void rotate_heads(Rows<Value> x, int64_t num_heads, int64_t head_dim, const Value* norm, float eps, const Rotary& rotary,
                  Value* out, int64_t num_rows) {
  run_tasks(num_rows, 1.0 * num_rows * num_heads * head_dim, [&](int64_t row) {
    Value* const to = out + row * num_heads * head_dim;
    const Value* const from = x.at(row);
    if (norm) {
      for (int64_t i = 0; i < num_heads * head_dim; i += head_dim) norm_row(from + i, norm, eps, to + i, head_dim);
    } else {
      std::copy_n(from, num_heads * head_dim, to);
    }
    for (int64_t head = 0; head < num_heads; ++head) turn_end(to + head * head_dim, head_dim, rotary, row);
  });
}

template <class Value>
void pool_entries(const PoolShape& shape, const float* values, const float* gates, const float* bias, const float* norm,
                  const Rotary& rotary, const PoolLists& lists, float* waiting, Value* pages) {
  const int64_t num_tokens = shape.num_tokens, width = shape.width, raw = shape.raw_width;
  const int64_t piece = std::min(width, shape.page_values), num_pieces = width / piece;
  const auto in_ring = [&](int64_t request, int64_t position) {
    return waiting + (lists.slots[request] * shape.ring_size + position % shape.ring_size) * 2 * raw;
  };
  std::vector<int64_t> ends;  // tokens that complete an entry
  for (int64_t row = 0; row < shape.num_rows; ++row) {
    if (lists.positions[row] % num_tokens == num_tokens - 1) ends.push_back(row);
  }
  run_tasks(ends.size(), [&](int64_t task) {
    static thread_local std::vector<TokenPart> parts;
    static thread_local std::vector<float> entry, normed;
    const int64_t row = ends[task], request = lists.requests[row], last = lists.positions[row];
    const int64_t start = lists.starts[request], begin = last + 1 - num_tokens;
    parts.clear();
    for (int64_t position = raw > width ? std::max<int64_t>(0, begin - num_tokens) : begin; position <= last; ++position) {
      const int64_t own = row - (last - position), offset = raw > width && position >= begin ? width : 0;
      if (own >= start) {
        parts.push_back({values + own * raw + offset, gates + own * raw + offset, bias + position % num_tokens * raw + offset});
      } else {
        const float* const held = in_ring(request, position);
        parts.push_back({held + offset, held + raw + offset, nullptr});
      }
    }
    entry.resize(width);
    normed.resize(width);
    pool(parts, width, entry.data());
    norm_row(entry.data(), norm, shape.eps, normed.data(), width);
    turn_end(normed.data(), width, rotary, row);
    const int64_t per_page = shape.page_values / piece, number = last / num_tokens;
    for (int64_t i = 0; i < num_pieces; ++i) {
      const int64_t place = number * num_pieces + i;
      const int64_t page = lists.page_table[request * shape.table_pages + place / per_page];
      round_to(normed.data() + i * piece, piece, pages + page * shape.page_values + place % per_page * piece);
    }
  });
  for_rows(shape.num_rows, [&](int64_t row) {
    const int64_t request = lists.requests[row];
    if (row < lists.starts[request + 1] - shape.ring_size) return;
    float* const held = in_ring(request, lists.positions[row]);
    const float* const added = bias + lists.positions[row] % num_tokens * raw;
    std::copy_n(values + row * raw, raw, held);
    for (int64_t c = 0; c < raw; c += 16) {
      const First first = lanes(raw - c);
      store(held + raw + c, first, load(first, gates + row * raw + c) + load(first, added + c));
    }
  });
}

template <class Value>
void choose_entries(const ChoiceShape& shape, const Value* q, const float* head_weights, const Value* pages,
                    const int64_t* page_table, const int64_t* requests, const int64_t* visible, int64_t* rows) {
  const auto row_of = [&](int64_t row, int64_t entry) {
    return page_table[requests[row] * shape.table_pages + entry / shape.per_page] * shape.per_page + entry % shape.per_page;
  };
  struct Part {
    int64_t row, first;
  };
  std::vector<int64_t> starts;  // of each query's scores
  std::vector<Part> parts;
  std::vector<float> scores;
  for (int64_t first = 0, end = 0; first < shape.num_rows; first = end) {
    int64_t num_scores = 0;
    starts.clear();
    parts.clear();
    for (; end < shape.num_rows && (end == first || num_scores < kMostScores); ++end) {
      const int64_t num_scored = visible[end] > shape.topk ? visible[end] : 0;
      for (int64_t entry = 0; entry < num_scored; entry += kTaskKeys) parts.push_back({end, entry});
      starts.push_back(num_scores);
      num_scores += num_scored;
    }
    if (static_cast<int64_t>(scores.size()) < num_scores + kPageTokens) scores.resize(num_scores + kPageTokens);
    run_tasks(parts.size(), [&](int64_t task) {
      static thread_local Scratch<Value> keys;
      const auto [row, begin] = parts[task];
      const int64_t last = std::min(begin + kTaskKeys, visible[row]);
      keys.grow(kPageTokens * shape.width);
      for (int64_t head = 0; head < shape.num_heads; head += kAttentionRows) {
        const int64_t num_heads = std::min(kAttentionRows, shape.num_heads - head);
        Attention<Value>& attention = Attention<Value>::begin(shape.width, 16, 1.0f, Lanes::kRows);
        attention.load_queries(0, num_heads, {q + (row * shape.num_heads + head) * shape.width, shape.width});
        for (int64_t entry = begin; entry < last; entry += kPageTokens) {
          const int64_t num_keys = std::min(kPageTokens, last - entry);
          for (int64_t key = 0; key < num_keys; ++key) {
            std::copy_n(pages + row_of(row, entry + key) * shape.width, shape.width, keys.data() + key * shape.width);
          }
          attention.score_page(num_heads, {keys.data(), shape.width}, num_keys, head_weights + row * shape.num_heads + head,
                               head > 0, {}, scores.data() + starts[row - first] + entry);
        }
      }
    });
    run_tasks(end - first, [&](int64_t task) {
      const int64_t row = first + task;
      int64_t* own = rows + row * shape.topk;
      int64_t* const behind = own + shape.topk;
      if (visible[row] > shape.topk) {
        take_best(scores.data() + starts[task], visible[row], shape.topk, [&](int64_t entry) { *own++ = row_of(row, entry); });
      } else {
        for (int64_t entry = 0; entry < visible[row]; ++entry) *own++ = row_of(row, entry);
      }
      std::fill(own, behind, kNoRow);
    });
  }
}

template <class Value>
void attend_entries(const EntryShape& shape, const Value* q, const KeyRows<Value>& window, const KeyRows<Value>& entries,
                    const float* sinks, const Rotary& back, Value* out) {
  const Lanes lanes = shape.num_heads < kFewHeads ? Lanes::kKeys : Lanes::kRows;
  int64_t most = kAttentionRows;
  while (most > 16 && shape.num_rows * ((shape.num_heads + most - 1) / most) < 4 * num_threads()) most /= 2;
  const int64_t parts = (shape.num_heads + most - 1) / most;
  run_tasks(shape.num_rows * parts, [&](int64_t task) {
    const int64_t row = task / parts, head = task % parts * most, num_heads = std::min(most, shape.num_heads - head);
    GatheredKeys<Value>& keys = GatheredKeys<Value>::of(row, shape.width, window, entries);
    const int64_t num_keys = keys.count();
    Attention<Value>& attention = Attention<Value>::begin(shape.width, shape.width, shape.scale, lanes);
    attention.load_queries(0, num_heads, {q + (row * shape.num_heads + head) * shape.width, shape.width});
    for (int64_t i = 0; i < num_heads; ++i) {
      attention.set_position(i, num_keys);  // it sees all of its keys
      attention.set_sink(i, sinks[head + i], shape.scale);
    }
    for (int64_t start = 0; start < num_keys; start += kPageTokens) {
      const int64_t count = std::min(kPageTokens, num_keys - start);
      const Rows<Value> page = keys.page(start, count);
      attention.add_page(0, num_heads, page, attention.values_of(page, count), start, count, keys.coming(start + kPageTokens));
    }
    for (int64_t i = 0; i < num_heads; ++i) {
      Value* const at = out + (row * shape.num_heads + head + i) * shape.width;
      attention.finish(i, at);
      turn_end(at, shape.width, back, row);
    }
  });
}

#define BATCHINFER_FOR_VALUE(Value)                                                                                    \
  template void rotate_heads(Rows<Value>, int64_t, int64_t, const Value*, float, const Rotary&, Value*, int64_t);      \
  template void pool_entries(const PoolShape&, const float*, const float*, const float*, const float*, const Rotary&,  \
                             const PoolLists&, float*, Value*);                                                        \
  template void choose_entries(const ChoiceShape&, const Value*, const float*, const Value*, const int64_t*,           \
                               const int64_t*, const int64_t*, int64_t*);                                              \
  template void attend_entries(const EntryShape&, const Value*, const KeyRows<Value>&, const KeyRows<Value>&,          \
                               const float*, const Rotary&, Value*);
BATCHINFER_FOR_VALUE(bf16)
BATCHINFER_FOR_VALUE(float)
#undef BATCHINFER_FOR_VALUE

}  // namespace batchinfer
