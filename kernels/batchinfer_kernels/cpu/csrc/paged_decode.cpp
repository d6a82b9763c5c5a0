// Decode attention over pages: all rows (queries x query heads of a key head) of a request meet the same keys and values. In
// absorbed latent attention (DeepSeek-V2 report section 2.1.2) there is one key head, and its first values are the values
// too. Requests that share their first pages meet these together: their rows stand side by side, so that a page is read and
// interleaved once for all of them.

#include <algorithm>
#include <numeric>
#include <vector>

#include "attention.h"
#include "tile.h"

namespace batchinfer {
namespace {

template <class Value>
struct Step {
  const DecodeShape& shape;
  const Value* pages;
  const int64_t *page_table, *kv_tokens;

  int64_t page_of(int64_t request, int64_t page) const { return page_table[request * shape.table_pages + page]; }
  const Value* page_at(int64_t request, int64_t page) const {
    return pages + page_of(request, page) * kPageTokens * shape.row_step;
  }
  Rows<Value> keys_of(const Value* page, int64_t key_head) const {
    return {page + key_head * shape.width, shape.row_step};
  }
  Rows<Value> values_of(const Value* page, int64_t key_head) const {
    return {page + shape.first_value + key_head * shape.value_dim, shape.row_step};
  }
  // Values are beside keys, not a part of them.
  bool has_values() const { return shape.first_value > 0; }
  // The share of a page that comes that is asked for during one of `count` key heads from `first` on. All key heads go along
  // whole rows, as memory likes it.
  RowsAhead share_of(const Value* page, int64_t first, int64_t count, int64_t key_head) const {
    constexpr int64_t kSize = sizeof(Value);
    const int64_t stride = shape.row_step * kSize, width = shape.num_kv_heads * (shape.width + shape.value_dim);
    if (count == shape.num_kv_heads && shape.row_step == width) {
      const int64_t bytes = kPageTokens * stride / count;
      return {{reinterpret_cast<const char*>(page) + (key_head - first) * bytes, bytes, 0, 1}, {}, Attention<Value>::kTurns};
    }
    return {{keys_of(page, key_head).data, shape.width * kSize, stride, kPageTokens},
            {values_of(page, key_head).data, shape.value_dim * kSize, stride, kPageTokens},
            Attention<Value>::kTurns};
  }
  int64_t num_pages(int64_t request) const { return (kv_tokens[request] + kPageTokens - 1) / kPageTokens; }
  int64_t whole_pages(int64_t request) const { return kv_tokens[request] / kPageTokens; }
};

// How many requests have the first page of the one before them in this order.
template <class Value>
int64_t num_sharing(const Step<Value>& step, const std::vector<int64_t>& order) {
  int64_t count = 0;
  for (size_t i = 1; i < order.size(); ++i) {
    count += step.whole_pages(order[i - 1]) > 0 && step.whole_pages(order[i]) > 0 &&
             step.page_of(order[i - 1], 0) == step.page_of(order[i], 0);
  }
  return count;
}

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

// Rows of some key heads, or of one key head and some requests, side by side.
struct Together {
  int64_t first_head, num_heads, rows_each;
};

// The rows of some requests, `rows_each` of every one and key head, from page `page` on. `coming` is the page that this thread
// takes next, if it is known.
template <class Value>
void attend(Attention<Value>& attention, const Step<Value>& step, const Together& together, const int64_t* requests,
            int64_t num_requests, int64_t first_row, int64_t page, const Value* coming) {
  const int64_t rows_each = together.rows_each;
  const auto add = [&](int64_t num_keys) {
    const Value* const own = step.page_at(requests[0], page);
    const Value* const next = page + 1 == step.num_pages(requests[0]) ? coming : step.page_at(requests[0], page + 1);
    for (int64_t i = 0; i < together.num_heads; ++i) {
      const int64_t key_head = together.first_head + i, begin = first_row + i * rows_each;
      const int64_t end = begin + num_requests * rows_each;  // where there are several requests there is one head
      Rows<Value> next_keys;
      if (next && step.has_values()) {
        attention.look_ahead(step.share_of(next, together.first_head, together.num_heads, key_head));
      } else if (next) {
        next_keys = step.keys_of(next, key_head);
      }
      attention.add_page(begin, end, step.keys_of(own, key_head),
                         attention.values_of(step.values_of(own, key_head), num_keys), page * kPageTokens, num_keys,
                         next_keys);
    }
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
    attend(attention, step, together, requests + begin, end - begin, first_row + begin * rows_each, page,
           is_behind ? step.page_at(requests[end], page) : coming);
  }
}

}  // namespace

template <class Value>
Lanes lanes_of_group(const GroupedHeads& heads) {
  constexpr int64_t kFewRows = 16;  // a vector's lanes
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  const bool meets_tiles = kHasTiles && kWordValues<Value> == 2;
  return group < (heads.first_value == 0 || meets_tiles ? kFewHeads : kFewRows) ? Lanes::kKeys : Lanes::kRows;
}

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
  const Lanes lanes = lanes_of_group<Value>(heads);
  const int64_t request_rows = shape.num_queries * group;  // of a key head
  const std::vector<int64_t> order = by_pages(step);
  // as many rows side by side as fit, less where threads would have nothing to do
  int64_t most = kAttentionRows;
  const int64_t num_rows = shape.num_requests * request_rows * heads.num_kv_heads;
  while (most > 16 && (num_rows + most - 1) / most < 4 * num_threads()) most /= 2;
  const int64_t rows_each = std::min(most, request_rows), places = std::max<int64_t>(1, most / rows_each);
  // of some requests where many share pages, else of some key heads, along whose keys and values memory is read as it lies
  const bool by_requests = heads.num_kv_heads == 1 || (heads.window == 0 && 2 * num_sharing(step, order) >= shape.num_requests);
  const int64_t requests_each = by_requests ? places : 1, heads_each = by_requests ? 1 : std::min(places, heads.num_kv_heads);
  const int64_t parts = (request_rows + rows_each - 1) / rows_each;
  const int64_t head_parts = (heads.num_kv_heads + heads_each - 1) / heads_each;
  const int64_t request_parts = (shape.num_requests + requests_each - 1) / requests_each;
  const auto first_page_of = [&](int64_t request) {
    const int64_t* const own = positions + request * shape.num_queries;
    const int64_t least = *std::min_element(own, own + shape.num_queries);
    return heads.window > 0 ? std::max<int64_t>(0, least - heads.window + 1) / kPageTokens : 0;
  };
  run_tasks(request_parts * head_parts * parts, [&](int64_t task) {
    const auto requests_of = [&](int64_t number) { return order.data() + number / parts / head_parts * requests_each; };
    const int64_t first_row = task % parts * rows_each, num_rows = std::min(rows_each, request_rows - first_row);
    const int64_t first_head = task / parts % head_parts * heads_each;
    const Together together{first_head, std::min(heads_each, heads.num_kv_heads - first_head), num_rows};
    const int64_t* const requests = requests_of(task);
    const int64_t num_requests = std::min<int64_t>(requests_each, order.data() + shape.num_requests - requests);
    Attention<Value>& attention = Attention<Value>::begin(heads.width, heads.value_dim, heads.scale, lanes);
    // calls call(place, token, key_head) for the rows of each request and key head
    const auto for_groups = [&](auto call) {
      for (int64_t i = 0; i < num_requests * together.num_heads; ++i) {
        const int64_t request = requests[i / together.num_heads];
        call(i * num_rows, request, first_head + i % together.num_heads);
      }
    };
    int64_t first_page = INT64_MAX;
    for_groups([&](int64_t place, int64_t request, int64_t key_head) {
      load_group(attention, heads, q, positions, key_head, request * shape.num_queries, first_row, num_rows, place);
      first_page = std::min(first_page, first_page_of(request));
    });
    const Value* coming = nullptr;
    if (const int64_t next = task_after(task); step.has_values() && next < request_parts * head_parts * parts) {
      const int64_t request = *requests_of(next), page = first_page_of(request);
      if (page < step.num_pages(request)) coming = step.page_at(request, page);
    }
    attend(attention, step, together, requests, num_requests, 0, first_page, coming);
    for_groups([&](int64_t place, int64_t request, int64_t key_head) {
      for (int64_t i = 0; i < num_rows; ++i) {
        Value* const at = out + heads.row_of(request * shape.num_queries, key_head, first_row + i) * heads.value_dim;
        if (step.num_pages(request) == 0) {
          std::fill_n(at, heads.value_dim, Value{0});
        } else {
          attention.finish(place + i, at);
        }
      }
    });
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
