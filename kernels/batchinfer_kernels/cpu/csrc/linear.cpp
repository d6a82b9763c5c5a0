// x · weightᵀ in bfloat16 or 8 bits with float32 sums. Weights pass from memory once for every block of rows.

#include <vector>

#include "tile.h"

namespace batchinfer {
namespace {

void write_row(const float* sums, int64_t count, const bf16* stream, bf16* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const First first = lanes(count - i);
    Floats values = load(sums + i);
    if (stream) values = load_wide(first, stream + i) + rounded(values);
    store_rounded(out + i, first, values);
  }
}

void write_row(const float* sums, int64_t count, const bf16*, float* out) {
  for (int64_t i = 0; i < count; i += 16) store(out + i, lanes(count - i), load(sums + i));
}

// Rows [row_begin, row_end) of the product with one panel.
template <class Source, class Value>
void panel_product(const Source& x, const Weight& weight, int64_t number, int64_t row_begin, int64_t row_end,
                   const bf16* stream, Value* out, int64_t out_stride) {
  alignas(64) float sums[kStripRows * kPanelColumns];
  const int64_t column = number * kPanelColumns, columns = std::min(kPanelColumns, weight.num_columns - column);
  for (int64_t row = row_begin; row < row_end; row += kStripRows) {
    const int64_t rows = std::min(kStripRows, row_end - row);
    multiply_strip(x, row, rows, weight, weight.panel(number), num_chunks(weight, number), sums);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (row + r) * out_stride + column;
      write_row(sums + r * kPanelColumns, columns, stream ? stream + at : nullptr, out + at);
    }
  }
}

// Of a product on one thread, roughly: its arithmetic, and reading its weight from a near cache.
double nanoseconds_of(const Weight& weight, int64_t num_rows) {
  return 2.0 * num_rows * weight.num_columns * weight.depth / 200 + weight.bytes() / 20.0;
}

int64_t row_bytes(const Weight& weight) { return weight.depth * (weight.kind == WeightKind::kInt8 ? 1 : 2); }

template <class Source, class Value>
void product(const Source& x, const Weight& weight, const bf16* stream, Value* out, int64_t num_rows) {
  if (num_rows == 0) return;
  const Cut cut = Cut::of(num_rows, weight.num_panels(), weight.panel_bytes(), row_bytes(weight));
  const int64_t panel_blocks = (weight.num_panels() + cut.block_panels - 1) / cut.block_panels;
  const int64_t row_blocks = (num_rows + cut.block_rows - 1) / cut.block_rows;
  run_tasks(row_blocks * panel_blocks, nanoseconds_of(weight, num_rows), [&](int64_t task) {
    const int64_t row = task / panel_blocks * cut.block_rows, first = task % panel_blocks * cut.block_panels;
    for (int64_t panel = first; panel < std::min(first + cut.block_panels, weight.num_panels()); ++panel) {
      panel_product(x, weight, panel, row, std::min(row + cut.block_rows, num_rows), stream, out,
                    weight.num_columns);
    }
  });
}

// As bf16_tile with float32 weights [depth][64 columns].
template <int R, int N>
void router_tile(const bf16* const* x, const float* panel, int64_t depth, float* out) {
  Floats sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = floats(0.0f);
  }
  for (int64_t k = 0; k < depth; ++k, panel += kPanelColumns) {
    Floats columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) columns[n] = load(panel + 16 * n);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats value = low_values(ints(x[r][k]));
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = multiply_add(value, columns[n], sums[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(out + r * kPanelColumns + 16 * n, sums[r][n]);
  }
}

}  // namespace

void linear(Rows x, const Weight& weight, const bf16* stream, bf16* out, int64_t num_rows) {
  product(x, weight, stream, out, num_rows);
}
void linear(ByteRows x, const Weight& weight, const bf16* stream, bf16* out, int64_t num_rows) {
  product(x, weight, stream, out, num_rows);
}
void linear(Rows x, const Weight& weight, float* out, int64_t num_rows) { product(x, weight, nullptr, out, num_rows); }

void batched_linear(Rows x, int64_t x_batch, const Weight& weights, bf16* out, int64_t out_stride, int64_t out_batch,
                    int64_t num_batches, int64_t num_rows) {
  if (num_rows == 0) return;
  const int64_t num_panels = weights.num_panels();
  const Cut cut = Cut::of(num_rows, num_panels * num_batches, weights.panel_bytes(), row_bytes(weights));
  const int64_t row_blocks = (num_rows + cut.block_rows - 1) / cut.block_rows;
  run_tasks(num_batches * row_blocks, num_batches * nanoseconds_of(weights, num_rows), [&](int64_t task) {
    const int64_t batch = task / row_blocks, row = task % row_blocks * cut.block_rows;
    Weight weight = weights;
    weight.data += batch * weights.bytes();
    const Rows rows{x.data + batch * x_batch, x.stride};
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      panel_product(rows, weight, panel, row, std::min(row + cut.block_rows, num_rows), nullptr,
                    out + batch * out_batch, out_stride);
    }
  });
}

void router(Rows x, const float* packed, float* out, int64_t num_rows, int64_t num_columns, int64_t depth) {
  const int64_t num_panels = (num_columns + kPanelColumns - 1) / kPanelColumns, tiles = 4;
  const int64_t row_blocks = (num_rows + tiles * kTileRows - 1) / (tiles * kTileRows);
  const double nanoseconds = 1.0 * num_rows * num_columns * depth / 25;
  run_tasks(row_blocks * num_panels, nanoseconds, [&](int64_t task) {
    const int64_t panel = task % num_panels, column = panel * kPanelColumns;
    const int64_t first = task / num_panels * tiles * kTileRows, end = std::min(first + tiles * kTileRows, num_rows);
    alignas(64) float sums[kTileRows * kPanelColumns];
    for (int64_t row = first; row < end; row += kTileRows) {
      const int64_t rows = std::min(kTileRows, end - row);
      const bf16* at[kTileRows];
      for (int64_t r = 0; r < rows; ++r) at[r] = x.at(row + r);
      const int64_t chunks = std::min<int64_t>(kChunks, (num_columns - column + 15) / 16);
      with_rows(rows, [&](auto count) {
        for_chunks<count>(chunks, [&](int64_t chunk, auto groups) {
          router_tile<count, groups>(at, packed + column * depth + 16 * chunk, depth, sums + 16 * chunk);
        });
      });
      for (int64_t r = 0; r < rows; ++r) {
        write_row(sums + r * kPanelColumns, std::min(kPanelColumns, num_columns - column), nullptr,
              out + (row + r) * num_columns + column);
      }
    }
  });
}

}  // namespace batchinfer
