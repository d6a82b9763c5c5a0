// SwiGLU of many experts, each over its own rows: gate and up products with the activation, then the down product.
//
// Both steps are one list of tasks over all experts, so that threads stay busy when experts have few rows each. A panel
// of the first product has 32 columns of the gate projection and the same 32 of the up projection.

#include <vector>

#include "scratch.h"
#include "tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kPairs = kPanelColumns / 2;
constexpr int64_t kPastCaches = int64_t{16} << 20;  // bytes of results that caches do not keep until they are summed

// One task: some rows and panels of one expert's product.
struct Part {
  int64_t expert, row_begin, row_end, panel_begin, panel_end;
};

// `copies_rows`: every task copies its rows first, so it takes as many panels as leave others enough to do.
std::vector<Part> parts_of(const ExpertRows* experts, int64_t num_experts, const Weight& weight, int64_t row_bytes,
                           bool copies_rows = false) {
  std::vector<Part> parts;
  int64_t num_busy = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) num_busy += experts[expert].num_rows > 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const ExpertRows& rows = experts[expert];
    if (rows.num_rows == 0) continue;
    const Cut cut = Cut::of(rows.num_rows, weight.num_panels() * num_busy, weight.panel_bytes(), row_bytes);
    const int64_t end = rows.first + rows.num_rows, block_panels = copies_rows ? cut.fair_panels : cut.block_panels;
    for (int64_t row = rows.first; row < end; row += cut.block_rows) {
      for (int64_t panel = 0; panel < weight.num_panels(); panel += block_panels) {
        parts.push_back({expert, row, std::min(row + cut.block_rows, end), panel,
                         std::min(panel + block_panels, weight.num_panels())});
      }
    }
  }
  return parts;
}

const uint8_t* panel_of(const Weight& weights, int64_t expert, int64_t panel) {
  return weights.data + expert * weights.bytes() + panel * weights.panel_bytes();
}

// The panel that the task's thread takes after this one, or null.
const uint8_t* next_panel_of(const Weight& weights, const std::vector<Part>& parts, int64_t task, int64_t panel) {
  if (panel + 1 < parts[task].panel_end) return panel_of(weights, parts[task].expert, panel + 1);
  const int64_t next = task_after(task);
  if (next >= int64_t(parts.size())) return nullptr;
  return panel_of(weights, parts[next].expert, parts[next].panel_begin);
}

// Rows that an index names, side by side in this thread's scratch memory: tiles take rows at equal distances.
template <class Value>
Rows<Value> copied(const Rows<Value>& x, int64_t first, int64_t num_rows, const Weight& weight) {
  static thread_local Scratch<Value> values;
  values.grow(num_rows * weight.depth);
  for (int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(x.at(first + row), weight.depth, values.data() + row * weight.depth);
  }
  return {values.data(), weight.depth};
}
ByteRows copied(const ByteRows& x, int64_t first, int64_t num_rows, const Weight&) {
  static thread_local Scratch<uint8_t> values;
  static thread_local Scratch<float> scales;
  const int64_t width = x.num_blocks * kBlock;
  values.grow(num_rows * width);
  scales.grow(num_rows * x.num_blocks);
  for (int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(x.data + x.index[first + row] * width, width, values.data() + row * width);
    std::copy_n(x.scales + x.index[first + row] * x.num_blocks, x.num_blocks, scales.data() + row * x.num_blocks);
  }
  return {values.data(), scales.data(), nullptr, x.num_blocks};
}

// Whether tasks copy their rows.
template <class Source>
bool are_copied(const Source& x, const Weight& weight) {
  return kHasTiles && std::is_same_v<typename Source::Value, bf16> && x.index && weight.kind != WeightKind::kInt4;
}

// hidden [rows, stride] = silu(gate) * up, kept in float32 until the product is rounded; zeros behind them in a row.
template <class Source, class Value>
void activate(const Source& x, const std::vector<Part>& parts, const Weight& gate_up, Value* hidden, int64_t stride) {
  const int64_t intermediate = gate_up.num_columns / 2;
  run_tasks(parts.size(), [&](int64_t task) {
    const Part& part = parts[task];
    const bool is_copied = are_copied(x, gate_up);
    const Source own = is_copied ? copied(x, part.row_begin, part.row_end - part.row_begin, gate_up) : x;
    const int64_t first = is_copied ? part.row_begin : 0;  // of its rows
    alignas(64) float sums[kStripRows * kPanelColumns];
    for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
      const int64_t column = panel * kPairs, columns = std::min(kPairs, intermediate - column);
      const uint8_t* const next = next_panel_of(gate_up, parts, task, panel);
      for (int64_t row = part.row_begin; row < part.row_end; row += kStripRows) {
        const int64_t rows = std::min(kStripRows, part.row_end - row);
        multiply_strip(own, row - first, rows, gate_up, panel_of(gate_up, part.expert, panel), kChunks, sums,
                       pass_of(part.row_begin, part.row_end, row, next));
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

// Whether results are whole lines, and more than caches keep.
template <class Value>
bool goes_past_caches(const std::vector<Part>& parts, const Weight& down, const Value* out) {
  int64_t num_sums = 0;  // of a row with a panel
  for (const Part& part : parts) num_sums += (part.row_end - part.row_begin) * (part.panel_end - part.panel_begin);
  return num_sums * kPanelColumns * int64_t{sizeof(Value)} > kPastCaches && down.num_columns % kPanelColumns == 0 &&
         reinterpret_cast<uintptr_t>(out) % 64 == 0;
}

// The sums of a row with a panel, rounded.
template <class Value>
void write_past(const float* sums, Value* out) {
  for (int64_t c = 0; c < kPanelColumns; c += 32) store_past(out + c, load(sums + c), load(sums + c + 16));
}

template <class Source, class Value>
void project_down(const Source& hidden, const std::vector<Part>& parts, const Weight& down, const Value* stream,
                  Value* out) {
  const bool goes_past = !stream && goes_past_caches(parts, down, out);
  run_tasks(parts.size(), [&](int64_t task) {
    const Part& part = parts[task];
    alignas(64) float sums[kStripRows * kPanelColumns];
    for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
      const int64_t column = panel * kPanelColumns, columns = std::min(kPanelColumns, down.num_columns - column);
      const uint8_t* const next = next_panel_of(down, parts, task, panel);
      for (int64_t row = part.row_begin; row < part.row_end; row += kStripRows) {
        const int64_t rows = std::min(kStripRows, part.row_end - row);
        multiply_strip(hidden, row, rows, down, panel_of(down, part.expert, panel), num_chunks(down, panel), sums,
                       pass_of(part.row_begin, part.row_end, row, next));
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t at = (row + r) * down.num_columns + column;
          if (goes_past) {
            write_past(sums + r * kPanelColumns, out + at);
            continue;
          }
          for (int64_t c = 0; c < columns; c += 16) {
            const First first = lanes(columns - c);
            Floats values = load(sums + r * kPanelColumns + c);
            if (stream) values = load_wide(first, stream + at + c) + rounded<Value>(values);
            store_rounded(out + at + c, first, values);
          }
        }
      }
    }
    if (goes_past) finish_past();
  });
}

int64_t total_rows(const ExpertRows* experts, int64_t num_experts) {
  int64_t total = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    total = std::max(total, experts[expert].first + experts[expert].num_rows);
  }
  return total;
}

}  // namespace

template <class Source, class Value>
void expert_mlp(const Source& x, const ExpertRows* experts, int64_t num_experts, const Weight& gate_up,
                const Weight& down, const Value* stream, Value* out) {
  constexpr bool kIsBytes = std::is_same_v<Source, ByteRows>;
  const int64_t bytes_each = kIsBytes ? 1 : sizeof(Value);
  const int64_t intermediate = gate_up.num_columns / 2, stride = (intermediate + 1) / 2 * 2;
  const int64_t num_rows = total_rows(experts, num_experts);
  const Scratch<Value> hidden(num_rows * stride);
  activate(x, parts_of(experts, num_experts, gate_up, bytes_each * gate_up.depth, are_copied(x, gate_up)), gate_up,
           hidden.data(), stride);
  const std::vector<Part> parts = parts_of(experts, num_experts, down, bytes_each * down.depth);
  if constexpr (kIsBytes) {
    const Scratch<uint8_t> bytes(num_rows * down.num_blocks() * kBlock);
    const Scratch<float> scales(num_rows * down.num_blocks());
    Scratch<int32_t> starts;
    if (down.kind == WeightKind::kInt4) starts.grow(num_rows * down.num_blocks() * (kBlock / kGroup));
    to_bytes(Rows<bf16>{hidden.data(), stride}, bytes.data(), scales.data(), starts.data(), num_rows, intermediate);
    project_down(ByteRows{bytes.data(), scales.data(), starts.data(), down.num_blocks()}, parts, down, stream, out);
  } else {
    project_down(Rows<Value>{hidden.data(), stride}, parts, down, stream, out);
  }
}

template void expert_mlp(const Rows<bf16>&, const ExpertRows*, int64_t, const Weight&, const Weight&, const bf16*,
                         bf16*);
template void expert_mlp(const Rows<float>&, const ExpertRows*, int64_t, const Weight&, const Weight&, const float*,
                         float*);
template void expert_mlp(const ByteRows&, const ExpertRows*, int64_t, const Weight&, const Weight&, const bf16*, bf16*);

}  // namespace batchinfer
