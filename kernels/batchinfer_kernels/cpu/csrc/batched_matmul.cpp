// x · y for every batch, where the columns of y are contiguous (the other case is a dot_block per batch).
//
// A task is one batch and some of its columns: it interleaves them once and then takes all rows.

#include <algorithm>
#include <cstring>
#include <vector>

#include "pair_tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kTileRows = 4;
constexpr int kTileChunks = 4;  // of 16 columns
constexpr int64_t kTaskColumns = kTileChunks * kLanes;
constexpr int64_t kSteps = 256;  // pairs of x at a time

using Tile = void (*)(const Rows& x, int64_t row, int64_t depth, const bf16* y, bf16* out, int64_t out_stride,
                      int64_t num_columns);

template <int R>
void tile(const Rows& x, int64_t row, int64_t depth, const bf16* y, bf16* out, int64_t out_stride,
          int64_t num_columns) {
  __m512 sums[R][kTileChunks];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kTileChunks; ++n) sums[r][n] = _mm512_setzero_ps();
  }
  // rows of bfloat16 need not start at a pair's address, and a last single value must not be read as a pair
  const int64_t num_steps = (depth + 1) / 2;
  alignas(64) int32_t pairs[R][kSteps];
  for (int64_t start = 0; start < num_steps; start += kSteps) {
    const int64_t steps = std::min(kSteps, num_steps - start);
    const int64_t values = std::min(2 * kSteps, depth - 2 * start);
    for (int r = 0; r < R; ++r) {
      pairs[r][steps - 1] = 0;
      std::memcpy(pairs[r], x.data + (row + r) * x.stride + 2 * start, values * sizeof(bf16));
    }
    add_pairs<R, kTileChunks>(sums, {pairs[0], kSteps, 1}, y + start * 2 * kTaskColumns, 2 * kTaskColumns, steps);
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < kTileChunks && n * kLanes < num_columns; ++n) {
      store_rounded(out + (row + r) * out_stride + n * kLanes, lanes(num_columns - n * kLanes), sums[r][n]);
    }
  }
}

constexpr Tile kTiles[kTileRows] = {tile<1>, tile<2>, tile<3>, tile<4>};

}  // namespace

void batched_matmul(Rows x, int64_t x_batch, Rows y, int64_t y_batch, bf16* out, int64_t out_stride, int64_t out_batch,
                    int64_t num_batches, int64_t num_rows, int64_t depth, int64_t num_columns) {
  if (num_rows == 0) return;
  const int64_t column_blocks = (num_columns + kTaskColumns - 1) / kTaskColumns;
  run_tasks(num_batches * column_blocks, [&](int64_t task) {
    static thread_local std::vector<bf16> interleaved;
    const int64_t batch = task / column_blocks, column = task % column_blocks * kTaskColumns;
    const int64_t columns = std::min(kTaskColumns, num_columns - column);
    interleaved.resize((depth + 1) / 2 * 2 * kTaskColumns);
    for (int64_t k = 0; k < depth; k += 2) {
      const bf16* even = y.data + batch * y_batch + k * y.stride + column;
      const bf16* odd = k + 1 < depth ? even + y.stride : nullptr;
      for (int64_t c = 0; c < kTaskColumns; c += kLanes) {
        const __mmask16 mask = c < columns ? lanes(columns - c) : 0;
        interleave(even + c, odd ? odd + c : nullptr, mask, interleaved.data() + k * kTaskColumns + 2 * c);
      }
    }
    const Rows rows{x.data + batch * x_batch, x.stride};
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      kTiles[std::min(kTileRows, num_rows - row) - 1](rows, row, depth, interleaved.data(),
                                                      out + batch * out_batch + column, out_stride, columns);
    }
  });
}

}  // namespace batchinfer
