// Absorbed latent attention over pages (DeepSeek-V2 report section 2.1.2): all rows (queries x heads) of a request meet
// the same latents, whose first values are the values too. A task is one request and up to 32 of its rows.

#include <algorithm>

#include "attention.h"

namespace batchinfer {
namespace {

struct LatentPages : PageOf {
  const bf16* pages;
  const int64_t* page_ids;
  int64_t width;

  LatentPages(const bf16* pages, const int64_t* page_ids, int64_t width)
      : pages(pages), page_ids(page_ids), width(width) {}
  Rows keys(int64_t start) const override {
    return {pages + page_ids[start / kPageTokens] * kPageTokens * width, width};
  }
  Rows values(int64_t start) const override { return keys(start); }
};

// Rows per task: half as many as can be when there are not enough tasks for the threads.
int64_t rows_per_task(const DecodeShape& shape) {
  const int64_t num_rows = shape.num_queries * shape.num_heads;
  const int64_t num_tasks = shape.num_requests * ((num_rows + kAttentionRows - 1) / kAttentionRows);
  return num_tasks < 2 * num_threads() ? kAttentionRows / 2 : kAttentionRows;
}

}  // namespace

void mla_decode(const DecodeShape& shape, const bf16* q, const bf16* pages, const int64_t* page_table,
                const int64_t* kv_tokens, const int64_t* positions, bf16* out) {
  const int64_t request_rows = shape.num_queries * shape.num_heads;
  const int64_t step = rows_per_task(shape);
  const int64_t tasks_per_request = (request_rows + step - 1) / step;
  run_tasks(shape.num_requests * tasks_per_request, [&](int64_t task) {
    const int64_t request = task / tasks_per_request, first_row = task % tasks_per_request * step;
    const int64_t row = request * request_rows + first_row;
    attend({{q + row * shape.width, shape.width},
            positions,
            row,
            shape.num_heads,
            std::min(step, request_rows - first_row),
            kv_tokens[request],
            shape.width,
            shape.latent_dim,
            shape.scale,
            out + row * shape.latent_dim,
            shape.latent_dim},
           LatentPages(pages, page_table + request * shape.table_pages, shape.width));
  });
}

}  // namespace batchinfer
