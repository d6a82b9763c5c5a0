// x · weightᵀ in float32, bfloat16, 8 or 4 bits with float32 sums. Weights pass from memory once for every block of rows.

#include <vector>

#include "screen.h"
#include "tile.h"
#include "tiled_rows.h"

namespace batchinfer {
namespace {

template <class Value>
void write_row(const float* sums, int64_t count, const Value* stream, Value* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const First first = lanes(count - i);
    Floats values = load(sums + i);
    if (stream) values = load_wide(first, stream + i) + rounded<Value>(values);
    store_rounded(out + i, first, values);
  }
}

// Rows [row_begin, row_end) of the product with one panel; row_begin is row `first` of x, `next` as in Pass.
template <class Source, class Value>
void panel_product(const Source& x, int64_t first, const Weight& weight, int64_t number, int64_t row_begin,
                   int64_t row_end, const void* next, const Value* stream, Value* out, int64_t out_stride) {
  alignas(64) float sums[kStripRows * kPanelColumns];
  const int64_t column = number * kPanelColumns, columns = std::min(kPanelColumns, weight.num_columns - column);
#ifdef BATCHINFER_TILES
  if (is_whole<Source>(weight)) {
    return multiply_whole(x, first, row_end - row_begin, weight, weight.panel(number), num_chunks(weight, number), next,
                          [&](int64_t row, int64_t count, int64_t tile, int64_t tiles, const float* sums) {
                            const int64_t left = kTileSide * tile, wide = std::min(kTileSide * tiles, columns - left);
                            for (int64_t r = 0; r < count; ++r, sums += kPanelColumns) {
                              const int64_t at = (row_begin + row + r) * out_stride + column + left;
                              write_row(sums, wide, stream ? stream + at : nullptr, out + at);
                            }
                          });
  }
#endif
  for (int64_t row = row_begin; row < row_end; row += kStripRows) {
    const int64_t rows = std::min(kStripRows, row_end - row);
    multiply_strip(x, first + row - row_begin, rows, weight, weight.panel(number), num_chunks(weight, number), sums,
                   pass_of(row_begin, row_end, row, next));
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

template <class Source>
int64_t row_bytes(const Source&, const Weight& weight) {
  return weight.depth * (takes_bytes(weight.kind) ? 1 : int64_t{sizeof(typename Source::Value)});
}

}  // namespace

template <class Source, class Value>
void linear(const Source& x, const Weight& weight, const Value* stream, Value* out, int64_t num_rows) {
  if (num_rows == 0) return;
  const Cut cut = Cut::of(num_rows, weight.num_panels(), weight.panel_bytes(), row_bytes(x, weight),
                          rows_room<Source>(weight));
  const int64_t each = panels_of_task<Source>(cut, weight);
  const int64_t panel_blocks = (weight.num_panels() + each - 1) / each;
  const int64_t row_blocks = (num_rows + cut.block_rows - 1) / cut.block_rows;
  run_tasks(row_blocks * panel_blocks, nanoseconds_of(weight, num_rows), [&](int64_t task) {
    const auto first_panel = [&](int64_t number) { return number % panel_blocks * each; };
    const int64_t row = task / panel_blocks * cut.block_rows, row_end = std::min(row + cut.block_rows, num_rows);
    const int64_t begin = first_panel(task), end = std::min(begin + each, weight.num_panels());
    with_rows_for(weight, end - begin, x, row, row_end, [&](const auto& own, int64_t first) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t next = panel + 1 < end ? panel + 1 : first_panel(task_after(task));
        panel_product(own, first, weight, panel, row, row_end, weight.panel(next), stream, out, weight.num_columns);
      }
    });
  });
}

template <class Value>
void batched_linear(Rows<Value> x, int64_t x_batch, const Weight& weights, Value* out, int64_t out_stride,
                    int64_t out_batch, int64_t num_batches, int64_t num_rows) {
  if (num_rows == 0) return;
  const int64_t num_panels = weights.num_panels();
  const Cut cut = Cut::of(num_rows, num_panels * num_batches, weights.panel_bytes(), row_bytes(x, weights),
                          rows_room<Rows<Value>>(weights));
  const int64_t row_blocks = (num_rows + cut.block_rows - 1) / cut.block_rows;
  run_tasks(num_batches * row_blocks, num_batches * nanoseconds_of(weights, num_rows), [&](int64_t task) {
    const int64_t batch = task / row_blocks, row = task % row_blocks * cut.block_rows;
    const int64_t next_batch = std::min(task_after(task) / row_blocks, num_batches - 1);
    Weight weight = weights;
    weight.data += batch * weights.bytes();
    const Rows<Value> rows{x.data + batch * x_batch, x.stride};
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      const void* const next = panel + 1 < num_panels ? weight.panel(panel + 1) : weights.data + next_batch * weights.bytes();
      panel_product<Rows<Value>, Value>(rows, row, weight, panel, row, std::min(row + cut.block_rows, num_rows), next,
                                        nullptr, out + batch * out_batch, out_stride);
    }
  });
}

template <class Value>
void linear_chunk(const Rows<Value>& x, const Weight& weight, int64_t chunk, float* out, int64_t num_rows) {
  constexpr int64_t kColumns = kPanelColumns / kChunks;
  const uint8_t* const columns = weight.panel(chunk / kChunks) + chunk % kChunks * kColumns * int64_t{sizeof(float)};
#ifdef BATCHINFER_TILES
  if (is_whole<Rows<Value>>(weight)) {
    return multiply_whole(x, 0, num_rows, weight, columns, 1, nullptr,
                          [&](int64_t row, int64_t count, int64_t, int64_t, const float* sums) {
                            for (int64_t r = 0; r < count; ++r, sums += kPanelColumns) {
                              std::copy_n(sums, kColumns, out + (row + r) * kColumns);
                            }
                          });
  }
#endif
  alignas(64) float sums[kStripRows * kPanelColumns];
  for (int64_t row = 0; row < num_rows; row += kStripRows) {
    const int64_t rows = std::min(kStripRows, num_rows - row);
    multiply_strip(x, row, rows, weight, columns, 1, sums);
    for (int64_t r = 0; r < rows; ++r) std::copy_n(sums + r * kPanelColumns, kColumns, out + (row + r) * kColumns);
  }
}

template void linear(const Rows<bf16>&, const Weight&, const bf16*, bf16*, int64_t);
template void linear(const Rows<bf16>&, const Weight&, const float*, float*, int64_t);
template void linear(const Rows<float>&, const Weight&, const float*, float*, int64_t);
template void linear(const ByteRows&, const Weight&, const bf16*, bf16*, int64_t);
template void batched_linear(Rows<bf16>, int64_t, const Weight&, bf16*, int64_t, int64_t, int64_t, int64_t);
template void batched_linear(Rows<float>, int64_t, const Weight&, float*, int64_t, int64_t, int64_t, int64_t);
template void linear_chunk(const Rows<bf16>&, const Weight&, int64_t, float*, int64_t);
template void linear_chunk(const Rows<float>&, const Weight&, int64_t, float*, int64_t);

}  // namespace batchinfer
