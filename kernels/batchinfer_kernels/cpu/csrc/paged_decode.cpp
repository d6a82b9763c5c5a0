// Decode attention over pages: all rows (queries x query heads of a key head) of a request meet the same keys and values. In
// absorbed latent attention (DeepSeek-V2 report section 2.1.2) there is one key head, and its first values are the values
// too. Requests that share their first pages meet these together: their rows stand side by side, so that a page is read and
// interleaved once for all of them.

#include <algorithm>
#include <numeric>
#include <vector>

#include "attention.h"

namespace batchinfer {
namespace {

template <class Value>
struct Step {
  const DecodeShape& shape;
  const Value* pages;
  const int64_t *page_table, *kv_tokens;

  int64_t page_of(int64_t request, int64_t page) const { return page_table[request * shape.table_pages + page]; }
  Rows<Value> keys_of(int64_t request, int64_t page, int64_t key_head) const {
    return {pages + page_of(request, page) * kPageTokens * shape.row_step + key_head * shape.width, shape.row_step};
  }
  Rows<Value> values_of(int64_t request, int64_t page, int64_t key_head) const {
    return {pages + page_of(request, page) * kPageTokens * shape.row_step + shape.first_value + key_head * shape.value_dim,
            shape.row_step};
  }
  int64_t num_pages(int64_t request) const { return (kv_tokens[request] + kPageTokens - 1) / kPageTokens; }
  int64_t whole_pages(int64_t request) const { return kv_tokens[request] / kPageTokens; }
};

// Requests ordered so that those with the same first pages stand together.
template <class Value>
std::vector<int64_t> by_pages(const Step<Value>& step) {
  std::vector<int64_t> order(step.shape.num_requests);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const int64_t* pages_a = step.page_table + a * step.shape.table_pages;
    const int64_t* pages_b = step.page_table + b * step.shape.table_pages;
    return std::lexicographical_compare(pages_a, pages_a + step.num_pages(a), pages_b, pages_b + step.num_pages(b));
  });
  return order;
}

// The rows of some requests, `rows_each` of every one, from page `page` on. `coming` are the keys that this thread takes
// next, if they are known.
template <class Value>
void attend(Attention<Value>& attention, const Step<Value>& step, int64_t key_head, const int64_t* requests,
            int64_t num_requests, int64_t first_row, int64_t rows_each, int64_t page, Rows<Value> coming) {
  const auto add = [&](int64_t num_keys) {
    const bool is_last = page + 1 == step.num_pages(requests[0]);
    attention.add_page(first_row, first_row + num_requests * rows_each, step.keys_of(requests[0], page, key_head),
                       attention.values_of(step.values_of(requests[0], page, key_head), num_keys), page * kPageTokens,
                       num_keys, is_last ? coming : step.keys_of(requests[0], page + 1, key_head));
  };
  if (num_requests == 1) {
    for (; page < step.num_pages(requests[0]); ++page) {
      add(std::min(kPageTokens, step.kv_tokens[requests[0]] - page * kPageTokens));
    }
    return;
  }
  const auto is_shared = [&] {
    return std::all_of(requests, requests + num_requests, [&](int64_t request) {
      return page < step.whole_pages(request) && step.page_of(request, page) == step.page_of(requests[0], page);
    });
  };
  for (; is_shared(); ++page) add(kPageTokens);
  // on with those that still go together; a page that is not whole belongs to its request alone
  for (int64_t begin = 0, end = 0; begin < num_requests; begin = end) {
    end = begin + 1;
    while (end < num_requests && page < step.whole_pages(requests[begin]) && page < step.whole_pages(requests[end]) &&
           step.page_of(requests[end], page) == step.page_of(requests[begin], page)) {
      ++end;
    }
    const bool is_behind = end < num_requests && page < step.num_pages(requests[end]);
    attend(attention, step, key_head, requests + begin, end - begin, first_row + begin * rows_each, rows_each, page,
           is_behind ? step.keys_of(requests[end], page, key_head) : coming);
  }
}

}  // namespace

template <class Value>
void load_group(Attention<Value>& attention, const GroupedHeads& heads, const Value* q, const int64_t* positions,
                int64_t key_head, int64_t token, int64_t first, int64_t count, int64_t place) {
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  static thread_local Scratch<Value> beside;
  const Value* rows = q + (token * heads.num_heads + key_head * group + first) * heads.width;
  if (group < heads.num_heads && first + count > group) {  // rows of several tokens are not side by side
    beside.grow(kAttentionRows * heads.width);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(q + heads.row_of(token, key_head, first + i) * heads.width, heads.width,
                  beside.data() + (place + i) * heads.width);
    }
    rows = beside.data() + place * heads.width;
  }
  attention.load_queries(place, count, {rows, heads.width});
  for (int64_t i = 0; i < count; ++i) {
    attention.set_position(place + i, positions[token + (first + i) / group]);
    if (heads.sinks) attention.set_sink(place + i, heads.sinks[key_head * group + (first + i) % group], heads.scale);
    if (heads.window > 0) attention.set_window(place + i, heads.window);
  }
}

template <class Value>
void paged_decode(const DecodeShape& shape, const Value* q, const Value* pages, const int64_t* page_table,
                  const int64_t* kv_tokens, const int64_t* positions, Value* out) {
  const Step<Value> step{shape, pages, page_table, kv_tokens};
  const GroupedHeads& heads = shape;
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  // by heads alone, so that a row has the same bits however many queries and requests there are
  const Lanes lanes = group < kFewHeads ? Lanes::kKeys : Lanes::kRows;
  const int64_t request_rows = shape.num_queries * group;  // of a key head
  const std::vector<int64_t> order = by_pages(step);
  // as many rows side by side as fit, less where threads would have nothing to do
  int64_t most = kAttentionRows;
  const int64_t num_rows = shape.num_requests * request_rows * heads.num_kv_heads;
  while (most > 16 && (num_rows + most - 1) / most < 4 * num_threads()) most /= 2;
  const int64_t rows_each = std::min(most, request_rows);
  // windows of requests begin anywhere
  const int64_t together = heads.window > 0 ? 1 : std::max<int64_t>(1, most / rows_each);
  const int64_t parts = (request_rows + rows_each - 1) / rows_each;
  const int64_t groups = (shape.num_requests + together - 1) / together;
  run_tasks(groups * heads.num_kv_heads * parts, [&](int64_t task) {
    const int64_t key_head = task / parts % heads.num_kv_heads, number = task / parts / heads.num_kv_heads;
    const int64_t first_row = task % parts * rows_each, num_rows = std::min(rows_each, request_rows - first_row);
    const int64_t* requests = order.data() + number * together;
    const int64_t num_requests = std::min(together, shape.num_requests - number * together);
    Attention<Value>& attention = Attention<Value>::begin(heads.width, heads.value_dim, heads.scale, lanes);
    int64_t least = INT64_MAX;  // of the positions
    for (int64_t i = 0; i < num_requests; ++i) {
      const int64_t token = requests[i] * shape.num_queries;
      load_group(attention, heads, q, positions, key_head, token, first_row, num_rows, i * num_rows);
      least = std::min(least, *std::min_element(positions + token, positions + token + shape.num_queries));
    }
    const int64_t first_page = heads.window > 0 ? std::max<int64_t>(0, least - heads.window + 1) / kPageTokens : 0;
    attend(attention, step, key_head, requests, num_requests, 0, num_rows, first_page, {});
    for (int64_t i = 0; i < num_requests * num_rows; ++i) {
      const int64_t token = requests[i / num_rows] * shape.num_queries;
      Value* const at = out + heads.row_of(token, key_head, first_row + i % num_rows) * heads.value_dim;
      if (step.num_pages(requests[i / num_rows]) == 0) {
        std::fill_n(at, heads.value_dim, Value{0});
      } else {
        attention.finish(i, at);
      }
    }
  });
}

#define BATCHINFER_FOR_VALUE(Value)                                                                                \
  template void load_group(Attention<Value>&, const GroupedHeads&, const Value*, const int64_t*, int64_t, int64_t, \
                           int64_t, int64_t, int64_t);                                                             \
  template void paged_decode(const DecodeShape&, const Value*, const Value*, const int64_t*, const int64_t*,       \
                             const int64_t*, Value*);
BATCHINFER_FOR_VALUE(bf16)
BATCHINFER_FOR_VALUE(float)
#undef BATCHINFER_FOR_VALUE

}  // namespace batchinfer
