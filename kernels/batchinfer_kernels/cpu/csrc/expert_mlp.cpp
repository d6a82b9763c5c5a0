// SwiGLU of many experts, each over its own rows: gate and up products with the activation, then the down product.
//
// Both steps are one list of tasks over all experts, so that threads stay busy when experts have few rows each. A tile
// takes three columns of the gate projection and the same three of the up projection.

#include <vector>

#include "dot_tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kPairs = kTileColumns / 2;

// One task: some rows and columns of one expert's product.
struct Part {
  const ExpertRows* expert;
  int64_t row_begin, row_end, column_begin, column_end;
};

std::vector<Part> parts_of(const ExpertRows* experts, int64_t num_experts, int64_t num_columns, int64_t depth,
                           int64_t column_step) {
  std::vector<Part> parts;
  for (const ExpertRows* expert = experts; expert != experts + num_experts; ++expert) {
    if (expert->num_rows == 0) continue;
    // an expert's share is cut as if it were alone: the parts of the last ones keep all threads busy
    const Cut cut = Cut::of(expert->num_rows, num_columns, depth, column_step);
    for (int64_t row = 0; row < expert->num_rows; row += cut.block_rows) {
      for (int64_t column = 0; column < num_columns; column += cut.block_columns) {
        parts.push_back({expert, row, std::min(row + cut.block_rows, expert->num_rows), column,
                         std::min(column + cut.block_columns, num_columns)});
      }
    }
  }
  return parts;
}

// hidden = silu(gate) * up for one part; both stay in float32 until the product is rounded.
void activate(const Part& part, int64_t hidden, int64_t intermediate) {
  const ExpertRows& expert = *part.expert;
  const int64_t columns = part.column_end - part.column_begin, rows = part.row_end - part.row_begin;
  static thread_local std::vector<float> scratch;
  scratch.resize(2 * rows * columns);
  float* const gates = scratch.data();
  float* const ups = gates + rows * columns;
  const int64_t num_passes = (rows + kTileRows - 1) / kTileRows;
  alignas(64) float values[kTileValues];
  for (int64_t column = 0; column < columns; column += kPairs) {
    const int64_t pairs = std::min(kPairs, columns - column);
    const bf16* gate = expert.gate_up + (part.column_begin + column) * hidden;
    const bf16* up = gate + intermediate * hidden;
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t tile_rows = std::min<int64_t>(kTileRows, rows - row);
      const Ahead ahead =
          Ahead::of_pass(gate + kPairs * hidden, up + kPairs * hidden, hidden, row / kTileRows, num_passes);
      dot_tile_of(tile_rows, 2 * pairs)(expert.x + (part.row_begin + row) * hidden, hidden, gate, up, hidden, hidden,
                                        ahead, values);
      for (int64_t r = 0; r < tile_rows; ++r) {
        const int64_t at = (row + r) * columns + column;
        for (int64_t c = 0; c < pairs; ++c) {
          gates[at + c] = values[2 * r * pairs + c];
          ups[at + c] = values[(2 * r + 1) * pairs + c];
        }
      }
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    bf16* out = expert.hidden + (part.row_begin + row) * intermediate + part.column_begin;
    for (int64_t column = 0; column < columns; column += 16) {
      const __mmask16 mask = lanes(columns - column);
      const __m512 gate = _mm512_maskz_loadu_ps(mask, gates + row * columns + column);
      const __m512 up = _mm512_maskz_loadu_ps(mask, ups + row * columns + column);
      store_rounded(out + column, mask, _mm512_mul_ps(silu_values(gate), up));
    }
  }
}

}  // namespace

void expert_mlp(const ExpertRows* experts, int64_t num_experts, int64_t hidden, int64_t intermediate) {
  const std::vector<Part> up_parts = parts_of(experts, num_experts, intermediate, hidden, kPairs);
  run_tasks(up_parts.size(), [&](int64_t task) { activate(up_parts[task], hidden, intermediate); });
  const std::vector<Part> down_parts = parts_of(experts, num_experts, hidden, intermediate, kTileColumns);
  run_tasks(down_parts.size(), [&](int64_t task) {
    const Part& part = down_parts[task];
    dot_block({part.expert->hidden, intermediate}, {part.expert->down, intermediate}, intermediate, part.row_begin,
              part.row_end, part.column_begin, part.column_end, part.expert->out, hidden);
  });
}

}  // namespace batchinfer
