// Absorbed latent attention over pages (DeepSeek-V2 report section 2.1.2): all rows (queries x heads) of a request meet
// the same latents, whose first values are the values too. Requests that share their first pages meet these together:
// their rows stand side by side, so that a page is read and interleaved once for all of them.

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
  Rows<Value> keys_of(int64_t request, int64_t page) const {
    return {pages + page_of(request, page) * kPageTokens * shape.row_step, shape.row_step};
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
void attend(Attention<Value>& attention, const Step<Value>& step, const int64_t* requests, int64_t num_requests,
            int64_t first_row, int64_t rows_each, int64_t page, Rows<Value> coming) {
  const auto add = [&](int64_t num_keys) {
    const Rows<Value> keys = step.keys_of(requests[0], page);
    const bool is_last = page + 1 == step.num_pages(requests[0]);
    attention.add_page(first_row, first_row + num_requests * rows_each, keys, attention.values_of(keys, num_keys),
                       page * kPageTokens, num_keys, is_last ? coming : step.keys_of(requests[0], page + 1));
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
    attend(attention, step, requests + begin, end - begin, first_row + begin * rows_each, rows_each, page,
           is_behind ? step.keys_of(requests[end], page) : coming);
  }
}

}  // namespace

template <class Value>
void mla_decode(const DecodeShape& shape, const Value* q, const Value* pages, const int64_t* page_table,
                const int64_t* kv_tokens, const int64_t* positions, Value* out) {
  const Step<Value> step{shape, pages, page_table, kv_tokens};
  // by heads alone, so that a row has the same bits however many queries and requests there are
  const Lanes lanes = shape.num_heads < kFewHeads ? Lanes::kKeys : Lanes::kRows;
  const int64_t request_rows = shape.num_queries * shape.num_heads;
  const std::vector<int64_t> order = by_pages(step);
  // as many rows side by side as fit, less where threads would have nothing to do
  int64_t most = kAttentionRows;
  while (most > 16 && (shape.num_requests * request_rows + most - 1) / most < 4 * num_threads()) most /= 2;
  const int64_t rows_each = std::min(most, request_rows), together = std::max<int64_t>(1, most / rows_each);
  const int64_t parts = (request_rows + rows_each - 1) / rows_each;
  const int64_t groups = (shape.num_requests + together - 1) / together;
  run_tasks(groups * parts, [&](int64_t task) {
    const int64_t group = task / parts, first_row = task % parts * rows_each;
    const int64_t num_rows = std::min(rows_each, request_rows - first_row);
    const int64_t* requests = order.data() + group * together;
    const int64_t num_requests = std::min(together, shape.num_requests - group * together);
    Attention<Value>& attention = Attention<Value>::begin(shape.width, shape.latent_dim, shape.scale, lanes);
    for (int64_t i = 0; i < num_requests; ++i) {
      const int64_t row = requests[i] * request_rows + first_row, place = i * num_rows;
      attention.load_queries(place, num_rows, {q + row * shape.width, shape.width});
      for (int64_t r = 0; r < num_rows; ++r) attention.set_position(place + r, positions[(row + r) / shape.num_heads]);
    }
    attend(attention, step, requests, num_requests, 0, num_rows, 0, {});
    for (int64_t i = 0; i < num_requests * num_rows; ++i) {
      const int64_t row = requests[i / num_rows] * request_rows + first_row + i % num_rows;
      attention.finish(i, out + row * shape.latent_dim);
    }
  });
}

template void mla_decode(const DecodeShape&, const bf16*, const bf16*, const int64_t*, const int64_t*, const int64_t*,
                         bf16*);
template void mla_decode(const DecodeShape&, const float*, const float*, const int64_t*, const int64_t*,
                         const int64_t*, float*);

}  // namespace batchinfer
