// SwiGLU of many experts, each over its own rows: gate and up products with the activation, then the down product.
//
// Both steps are one list of tasks over all experts, so that threads stay busy when experts have few rows each. A panel
// of the first product has 32 columns of the gate projection and the same 32 of the up projection.

#include <memory>
#include <vector>

#include "tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kPairs = kPanelColumns / 2;

// One task: some rows and panels of one expert's product.
struct Part {
  int64_t expert, row_begin, row_end, panel_begin, panel_end;
};

std::vector<Part> parts_of(const ExpertRows* experts, int64_t num_experts, const Weight& weight, int64_t row_bytes) {
  std::vector<Part> parts;
  int64_t num_busy = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) num_busy += experts[expert].num_rows > 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const ExpertRows& rows = experts[expert];
    if (rows.num_rows == 0) continue;
    const Cut cut = Cut::of(rows.num_rows, weight.num_panels() * num_busy, weight.panel_bytes(), row_bytes);
    const int64_t end = rows.first + rows.num_rows;
    for (int64_t row = rows.first; row < end; row += cut.block_rows) {
      for (int64_t panel = 0; panel < weight.num_panels(); panel += cut.block_panels) {
        parts.push_back({expert, row, std::min(row + cut.block_rows, end), panel,
                         std::min(panel + cut.block_panels, weight.num_panels())});
      }
    }
  }
  return parts;
}

const uint8_t* panel_of(const Weight& weights, int64_t expert, int64_t panel) {
  return weights.data + expert * weights.bytes() + panel * weights.panel_bytes();
}

// hidden [rows, stride] = silu(gate) * up, kept in float32 until the product is rounded; zeros behind them in a row.
template <class Source, class Value>
void activate(const Source& x, const std::vector<Part>& parts, const Weight& gate_up, Value* hidden, int64_t stride) {
  const int64_t intermediate = gate_up.num_columns / 2;
  run_tasks(parts.size(), [&](int64_t task) {
    const Part& part = parts[task];
    alignas(64) float sums[kStripRows * kPanelColumns];
    for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
      const int64_t column = panel * kPairs, columns = std::min(kPairs, intermediate - column);
      for (int64_t row = part.row_begin; row < part.row_end; row += kStripRows) {
        const int64_t rows = std::min(kStripRows, part.row_end - row);
        multiply_strip(x, row, rows, gate_up, panel_of(gate_up, part.expert, panel), kChunks, sums,
                       Pass::of(part.row_begin, part.row_end, row, row + rows));
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < columns; c += 16) {
            const float* gate = sums + r * kPanelColumns + c;
            store_rounded(hidden + (row + r) * stride + column + c, lanes(columns - c),
                          silu_values(load(gate)) * load(gate + kPairs));
          }
          if (column + columns == intermediate) {
            std::fill_n(hidden + (row + r) * stride + intermediate, stride - intermediate, Value{0});
          }
        }
      }
    }
  });
}

template <class Source, class Value>
void project_down(const Source& hidden, const std::vector<Part>& parts, const Weight& down, const Value* stream,
                  Value* out) {
  run_tasks(parts.size(), [&](int64_t task) {
    const Part& part = parts[task];
    alignas(64) float sums[kStripRows * kPanelColumns];
    for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
      const int64_t column = panel * kPanelColumns, columns = std::min(kPanelColumns, down.num_columns - column);
      for (int64_t row = part.row_begin; row < part.row_end; row += kStripRows) {
        const int64_t rows = std::min(kStripRows, part.row_end - row);
        multiply_strip(hidden, row, rows, down, panel_of(down, part.expert, panel), num_chunks(down, panel), sums,
                       Pass::of(part.row_begin, part.row_end, row, row + rows));
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t at = (row + r) * down.num_columns + column;
          for (int64_t c = 0; c < columns; c += 16) {
            const First first = lanes(columns - c);
            Floats values = load(sums + r * kPanelColumns + c);
            if (stream) values = load_wide(first, stream + at + c) + rounded<Value>(values);
            store_rounded(out + at + c, first, values);
          }
        }
      }
    }
  });
}

int64_t total_rows(const ExpertRows* experts, int64_t num_experts) {
  int64_t total = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    total = std::max(total, experts[expert].first + experts[expert].num_rows);
  }
  return total;
}

// Rows that an index names, one after the other: tiles take rows at equal distances.
template <class Value>
struct Gathered {
  std::unique_ptr<Value[]> values;
  Rows<Value> rows;

  Gathered(const Rows<Value>& x, int64_t num_rows, const Weight& weight)
      : values(new Value[num_rows * weight.depth]), rows{values.get(), weight.depth} {
    gather_rows(x.data, x.stride * sizeof(Value), weight.depth * sizeof(Value), x.index, num_rows, values.get());
  }
};
template <>
struct Gathered<uint8_t> {
  std::unique_ptr<uint8_t[]> values;
  std::unique_ptr<float[]> scales;
  ByteRows rows;

  Gathered(const ByteRows& x, int64_t num_rows, const Weight&)
      : values(new uint8_t[num_rows * x.num_blocks * kBlock]),
        scales(new float[num_rows * x.num_blocks]),
        rows{values.get(), scales.get(), nullptr, x.num_blocks} {
    const int64_t width = x.num_blocks * kBlock, scale_bytes = x.num_blocks * sizeof(float);
    gather_rows(x.data, width, width, x.index, num_rows, values.get());
    gather_rows(x.scales, scale_bytes, scale_bytes, x.index, num_rows, scales.get());
  }
};

}  // namespace

template <class Source, class Value>
void expert_mlp(const Source& x, const ExpertRows* experts, int64_t num_experts, const Weight& gate_up,
                const Weight& down, const Value* stream, Value* out) {
  constexpr bool kIsBytes = std::is_same_v<Source, ByteRows>;
  const int64_t bytes_each = kIsBytes ? 1 : sizeof(Value);
  const int64_t intermediate = gate_up.num_columns / 2, stride = (intermediate + 1) / 2 * 2;
  const int64_t num_rows = total_rows(experts, num_experts);
  if constexpr (kHasTiles && std::is_same_v<Value, bf16>) {
    if (x.index && gate_up.kind != WeightKind::kInt4) {
      const Gathered<std::conditional_t<kIsBytes, uint8_t, Value>> gathered(x, num_rows, gate_up);
      return expert_mlp(gathered.rows, experts, num_experts, gate_up, down, stream, out);
    }
  }
  const std::unique_ptr<Value[]> hidden(new Value[num_rows * stride]);
  activate(x, parts_of(experts, num_experts, gate_up, bytes_each * gate_up.depth), gate_up, hidden.get(), stride);
  const std::vector<Part> parts = parts_of(experts, num_experts, down, bytes_each * down.depth);
  if constexpr (kIsBytes) {
    const std::unique_ptr<uint8_t[]> bytes(new uint8_t[num_rows * down.num_blocks() * kBlock]);
    const std::unique_ptr<float[]> scales(new float[num_rows * down.num_blocks()]);
    std::unique_ptr<int32_t[]> starts;
    if (down.kind == WeightKind::kInt4) starts.reset(new int32_t[num_rows * down.num_blocks() * (kBlock / kGroup)]);
    to_bytes(Rows<bf16>{hidden.get(), stride}, bytes.get(), scales.get(), starts.get(), num_rows, intermediate);
    project_down(ByteRows{bytes.get(), scales.get(), starts.get(), down.num_blocks()}, parts, down, stream, out);
  } else {
    project_down(Rows<Value>{hidden.get(), stride}, parts, down, stream, out);
  }
}

template void expert_mlp(const Rows<bf16>&, const ExpertRows*, int64_t, const Weight&, const Weight&, const bf16*,
                         bf16*);
template void expert_mlp(const Rows<float>&, const ExpertRows*, int64_t, const Weight&, const Weight&, const float*,
                         float*);
template void expert_mlp(const ByteRows&, const ExpertRows*, int64_t, const Weight&, const Weight&, const bf16*, bf16*);

}  // namespace batchinfer
