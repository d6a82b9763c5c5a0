// The operations of compressed attention and of hyper-connections for PyTorch; shapes as in reference/compressed.py and
// reference/hyper.py.

#include "compressed.h"
#include "operations.h"
#include "streams.h"
#include "tensors.h"

namespace batchinfer::tensors {
namespace {

Tensor rotate_heads(const Tensor& x_in, int64_t num_heads, const std::optional<Tensor>& norm, double eps, const Tensor& cos,
                    const Tensor& sin) {
  check(x_in, 2, "x");
  const Tensor x = with_whole_rows(x_in);
  TORCH_CHECK(num_heads > 0 && x.size(1) % num_heads == 0, "rows of ", x.size(1), " values for ", num_heads, " heads");
  const int64_t num_rows = x.size(0), head_dim = x.size(1) / num_heads;
  const batchinfer::Rotary rotary = rotary_of(cos, sin, num_rows, true);
  TORCH_CHECK(rotary.rotary <= head_dim, "angles of ", rotary.rotary, " values for heads of ", head_dim);
  if (norm) {
    check_like(*norm, 1, x, "norm");
    TORCH_CHECK(norm->numel() == head_dim, "a norm of ", norm->numel(), " values for heads of ", head_dim);
  }
  Tensor out = empty({num_rows, num_heads, head_dim}, x.scalar_type());
  with_values(x, [&]<class Value>(Value) {
    batchinfer::rotate_heads(rows_of<Value>(x), num_heads, head_dim, norm ? read<Value>(*norm) : nullptr,
                             static_cast<float>(eps), rotary, write<Value>(out), num_rows);
  });
  return out;
}

void check_requests(const Tensor& requests, int64_t num_rows, int64_t num_requests) {
  check_indices(requests, "requests");
  TORCH_CHECK(requests.numel() == num_rows, "one request per row");
  check_range(requests, num_requests, "request");
}

void pool_entries(const Tensor& values, const Tensor& gates, const Tensor& bias, const Tensor& norm, double eps,
                  const Tensor& cos, const Tensor& sin, const Tensor& positions, const Tensor& requests,
                  const Tensor& starts, const Tensor& slots, const Tensor& waiting, const Tensor& pages,
                  const Tensor& page_table) {
  for (const Tensor* x : {&values, &gates, &bias}) check_floats(*x, 2, "values, gates and biases");
  check_floats(norm, 1, "norm");
  check_floats(waiting, 4, "waiting");
  check_contiguous(pages, 2, "pages");
  for (const Tensor* indices : {&positions, &starts, &slots, &page_table}) check_indices(*indices, "indices");
  const int64_t num_rows = values.size(0), raw = values.size(1), width = norm.numel(), num_tokens = bias.size(0);
  const int64_t num_requests = slots.numel(), page_values = pages.size(1), ring = waiting.size(1);
  check_requests(requests, num_rows, num_requests);
  TORCH_CHECK(gates.sizes() == values.sizes() && bias.size(1) == raw && num_tokens > 0 && (raw == width || raw == 2 * width),
              "parts of ", raw, " values for entries of ", width);
  TORCH_CHECK(waiting.size(2) == 2 && waiting.size(3) == raw && ring >= num_tokens * (raw / width), "a state for ", ring,
              " tokens");
  TORCH_CHECK(positions.numel() == num_rows && starts.numel() == num_requests + 1 && page_table.size(0) == num_requests,
              "one position per row; one start, slot and row of pages per request");
  check_range(slots, waiting.size(0), "slot");
  check_range(page_table, pages.size(0), "page");
  const int64_t piece = std::min(width, page_values), room = page_table.size(1) * (page_values / piece);
  TORCH_CHECK(piece > 0 && width % piece == 0 && page_values % piece == 0, "pages of ", page_values,
              " values for entries of ", width);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t request = read<int64_t>(requests)[row], position = read<int64_t>(positions)[row];
    const int64_t start = read<int64_t>(starts)[request], end = read<int64_t>(starts)[request + 1];
    TORCH_CHECK(0 <= start && start <= row && row < end && end <= num_rows &&
                    position - read<int64_t>(positions)[start] == row - start && position >= row - start,
                "row ", row, " is not in its request's chunk of consecutive positions");
    TORCH_CHECK((position + 1) / num_tokens * (width / piece) <= room, "position ", position, " is behind the pages");
  }
  const batchinfer::Rotary rotary = rotary_of(cos, sin, num_rows, true);
  TORCH_CHECK(rotary.rotary <= width, "angles of ", rotary.rotary, " values for entries of ", width);
  const batchinfer::PoolShape shape{num_rows, num_requests, num_tokens, width, raw, ring, page_values, page_table.size(1),
                                    static_cast<float>(eps)};
  const batchinfer::PoolLists lists{read<int64_t>(positions), read<int64_t>(requests), read<int64_t>(starts),
                                    read<int64_t>(slots), read<int64_t>(page_table)};
  with_values(pages, [&]<class Value>(Value) {
    batchinfer::pool_entries(shape, read<float>(values), read<float>(gates), read<float>(bias), read<float>(norm), rotary,
                             lists, write<float>(waiting), write<Value>(pages));
  });
}

Tensor choose_entries(const Tensor& q, const Tensor& head_weights, const Tensor& pages, const Tensor& page_table,
                      const Tensor& requests, const Tensor& visible, int64_t topk) {
  check_contiguous(q, 3, "q");
  check_like(pages, 2, q, "pages");
  check_floats(head_weights, 2, "weights of heads");
  for (const Tensor* indices : {&page_table, &visible}) check_indices(*indices, "indices");
  const int64_t num_rows = q.size(0), num_heads = q.size(1), width = q.size(2), per_page = pages.size(1) / width;
  TORCH_CHECK(per_page * width == pages.size(1) && head_weights.size(0) == num_rows && head_weights.size(1) == num_heads &&
                  visible.numel() == num_rows,
              "queries, weights, pages and counts do not fit");
  check_requests(requests, num_rows, page_table.size(0));
  check_range(page_table, pages.size(0), "page");
  const int64_t num_entries = page_table.size(1) * per_page;
  check_range(visible, num_entries + 1, "count of entries");
  topk = std::min(topk, num_entries);
  Tensor rows = empty({num_rows, topk}, page_table.scalar_type());
  const batchinfer::ChoiceShape shape{num_rows, num_heads, width, per_page, page_table.size(1), topk};
  with_values(q, [&]<class Value>(Value) {
    batchinfer::choose_entries(shape, read<Value>(q), read<float>(head_weights), read<Value>(pages),
                               read<int64_t>(page_table), read<int64_t>(requests), read<int64_t>(visible),
                               write<int64_t>(rows));
  });
  return rows;
}

template <class Value>
batchinfer::KeyRows<Value> keys_of(const Tensor& values, const Tensor& ids, const Tensor& q) {
  check_like(values, 2, q, "keys");
  check_indices(ids, "rows of keys");
  const int64_t part = values.size(1), num_rows = values.size(0);
  TORCH_CHECK(ids.dim() == 3 && ids.size(0) == q.size(0) && ids.size(2) * part == q.size(2), "keys of ", ids.size(2),
              " parts of ", part, " values for queries of ", q.size(2));
  const int64_t* const rows = read<int64_t>(ids);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const bool is_none = rows[i] == batchinfer::kNoRow;
    TORCH_CHECK((0 <= rows[i] && rows[i] < num_rows) || is_none, "row ", rows[i], " of ", num_rows);
    TORCH_CHECK(is_none == (rows[i - i % ids.size(2)] == batchinfer::kNoRow), "a part of a key is missing");
  }
  return {read<Value>(values), rows, ids.size(1), ids.size(2), part};
}

Tensor attend_entries(const Tensor& q, const Tensor& window, const Tensor& window_ids, const std::optional<Tensor>& entries,
                      const std::optional<Tensor>& entry_ids, const Tensor& sinks, double scale, const Tensor& cos,
                      const Tensor& sin) {
  check_contiguous(q, 3, "q");
  check_floats(sinks, 1, "sinks");
  const int64_t num_rows = q.size(0), num_heads = q.size(1), width = q.size(2);
  TORCH_CHECK(sinks.numel() == num_heads, "one sink per head");
  TORCH_CHECK(entries.has_value() == entry_ids.has_value(), "entries and their rows");
  const batchinfer::Rotary back = rotary_of(cos, sin, num_rows, true);
  TORCH_CHECK(back.rotary <= width, "angles of ", back.rotary, " values for rows of ", width);
  Tensor out = empty({num_rows, num_heads, width}, q.scalar_type());
  with_values(q, [&]<class Value>(Value) {
    const auto first = keys_of<Value>(window, window_ids, q);
    const auto second = entries ? keys_of<Value>(*entries, *entry_ids, q) : batchinfer::KeyRows<Value>{};
    batchinfer::attend_entries<Value>({num_rows, num_heads, width, static_cast<float>(scale)}, read<Value>(q), first, second,
                                      read<float>(sinks), back, write<Value>(out));
  });
  return out;
}

batchinfer::StreamShape streams_of(const Tensor& streams) {
  check_contiguous(streams, 3, "streams");
  return {streams.size(0), streams.size(1), streams.size(2)};
}

void check_factors(const Tensor& factors, const batchinfer::StreamShape& shape, int64_t count, const char* name) {
  TORCH_CHECK(factors.scalar_type() == at::kFloat && factors.is_contiguous() && factors.numel() == shape.num_rows * count,
              name, " must be contiguous float32, ", count, " per row");
}

void norm_products(const Tensor& streams, const Tensor& products, double eps) {
  const auto shape = streams_of(streams);
  check_floats(products, 2, "products");
  TORCH_CHECK(products.size(0) == shape.num_rows, "one row of products per row");
  with_values(streams, [&]<class Value>(Value) {
    batchinfer::norm_products(read<Value>(streams), write<float>(products), static_cast<float>(eps), shape.num_rows,
                              shape.num_streams * shape.hidden, products.size(1));
  });
}

std::tuple<Tensor, Tensor, Tensor> stream_mix(const Tensor& mixed, const Tensor& scale, const Tensor& base,
                                              int64_t num_streams, int64_t num_rounds, double eps) {
  check_floats(mixed, 2, "mixed");
  check_floats(scale, 1, "scale");
  check_floats(base, 1, "base");
  TORCH_CHECK(num_streams > 0 && mixed.size(1) == num_streams * (2 + num_streams) && base.numel() == mixed.size(1) &&
                  scale.numel() == 3 && num_rounds > 0,
              mixed.size(1), " mixed values of ", num_streams, " streams");
  const int64_t num_rows = mixed.size(0);
  Tensor before = empty({num_rows, num_streams}, mixed.scalar_type()), after = empty({num_rows, num_streams}, mixed.scalar_type());
  Tensor past = empty({num_rows, num_streams, num_streams}, mixed.scalar_type());
  batchinfer::stream_mix({num_rows, num_streams, 0}, read<float>(mixed), read<float>(scale), read<float>(base), num_rounds,
                         static_cast<float>(eps), write<float>(before), write<float>(after), write<float>(past));
  return {before, after, past};
}

Tensor join_streams(const Tensor& streams, const Tensor& factors) {
  const auto shape = streams_of(streams);
  check_factors(factors, shape, shape.num_streams, "factors");
  Tensor out = empty({shape.num_rows, shape.hidden}, streams.scalar_type());
  with_values(streams, [&]<class Value>(Value) {
    batchinfer::join_streams(shape, read<Value>(streams), read<float>(factors), write<Value>(out));
  });
  return out;
}

Tensor leave_streams(const Tensor& streams, const Tensor& after, const Tensor& past, const Tensor& y) {
  const auto shape = streams_of(streams);
  check_factors(after, shape, shape.num_streams, "factors of the result");
  check_factors(past, shape, shape.num_streams * shape.num_streams, "factors between streams");
  check_like(y, 2, streams, "y");
  TORCH_CHECK(y.size(0) == shape.num_rows && y.size(1) == shape.hidden, "y is ", y.sizes());
  Tensor out = empty({shape.num_rows, shape.num_streams, shape.hidden}, streams.scalar_type());
  with_values(streams, [&]<class Value>(Value) {
    batchinfer::leave_streams(shape, read<Value>(streams), read<float>(after), read<float>(past), read<Value>(y),
                              write<Value>(out));
  });
  return out;
}

}  // namespace
}  // namespace batchinfer::tensors

TORCH_LIBRARY_FRAGMENT(batchinfer_cpu, m) {
  using namespace batchinfer::tensors;
  using batchinfer::operations::define;
  define<pool_entries>(m, "pool_entries", {11, 12});
  define<norm_products>(m, "norm_products", {1});
  define<rotate_heads>(m, "rotate_heads");
  define<choose_entries>(m, "choose_entries");
  define<attend_entries>(m, "attend_entries");
  define<stream_mix>(m, "stream_mix");
  define<join_streams>(m, "join_streams");
  define<leave_streams>(m, "leave_streams");
}
