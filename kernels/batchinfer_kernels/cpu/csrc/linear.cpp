// x · weightᵀ in bfloat16 with float32 sums. Weights pass from memory once for every block of rows.

#include "dot_tile.h"

namespace batchinfer {

void linear(Rows x, Rows weight, bf16* out, int64_t num_rows, int64_t num_columns, int64_t depth) {
  if (num_rows == 0 || num_columns == 0) return;
  const Cut cut = Cut::of(num_rows, num_columns, depth, kTileColumns);
  const int64_t column_blocks = (num_columns + cut.block_columns - 1) / cut.block_columns;
  const int64_t row_blocks = (num_rows + cut.block_rows - 1) / cut.block_rows;
  run_tasks(row_blocks * column_blocks, [&](int64_t task) {
    const int64_t row = task / column_blocks * cut.block_rows;
    const int64_t column = task % column_blocks * cut.block_columns;
    dot_block(x, weight, depth, row, std::min(row + cut.block_rows, num_rows), column,
              std::min(column + cut.block_columns, num_columns), out, num_columns);
  });
}

void batched_linear(Rows x, int64_t x_batch, Rows weight, int64_t weight_batch, bf16* out, int64_t out_stride,
                    int64_t out_batch, int64_t num_batches, int64_t num_rows, int64_t depth, int64_t num_columns) {
  if (num_rows == 0 || num_columns == 0) return;
  const Cut cut = Cut::of(num_rows, num_columns, depth, kTileColumns);
  const int64_t row_blocks = (num_rows + cut.block_rows - 1) / cut.block_rows;
  run_tasks(num_batches * row_blocks, [&](int64_t task) {
    const int64_t batch = task / row_blocks, row = task % row_blocks * cut.block_rows;
    dot_block({x.data + batch * x_batch, x.stride}, {weight.data + batch * weight_batch, weight.stride}, depth, row,
              std::min(row + cut.block_rows, num_rows), 0, num_columns, out + batch * out_batch, out_stride);
  });
}

}  // namespace batchinfer
