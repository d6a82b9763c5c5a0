// SwiGLU of many experts, each over its own rows: gate and up products with the activation, then the down product.
//
// Both steps are one list of tasks over all experts, so that threads stay busy when experts have few rows each. A panel
// of the first product has 32 columns of the gate projection and the same 32 of the up projection.

#include <vector>

#include "scratch.h"
#include "tile.h"
#include "tiled_rows.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kPairs = kPanelColumns / 2;
constexpr int64_t kPastCaches = int64_t{16} << 20;  // bytes of results that caches do not keep until they are summed

// One task: some rows and panels of one expert's product.
struct Part {
  int64_t expert, row_begin, row_end, panel_begin, panel_end;
};

// Where tasks copy their rows first (with_rows_for) they take as many panels as leave others enough to do.
template <class Source>
std::vector<Part> parts_of(const ExpertRows* experts, int64_t num_experts, const Weight& weight) {
  const int64_t row_bytes = weight.depth * (std::is_same_v<Source, ByteRows> ? 1 : sizeof(typename Source::Value));
  std::vector<Part> parts;
  int64_t num_busy = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) num_busy += experts[expert].num_rows > 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const ExpertRows& rows = experts[expert];
    if (rows.num_rows == 0) continue;
    const Cut cut = Cut::of(rows.num_rows, weight.num_panels() * num_busy, weight.panel_bytes(), row_bytes,
                            rows_room<Source>(weight));
    const int64_t end = rows.first + rows.num_rows, block_panels = panels_of_task<Source>(cut, weight);
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

// hidden [rows, stride] = silu(gate) * up of one panel, kept in float32 until the product is rounded; zeros behind the last
// one in a row. The part's first row is row `first` of x; `next` as in Pass.
template <class Source, class Value>
void activate_panel(const Source& x, int64_t first, const Part& part, const Weight& gate_up, int64_t panel,
                    const void* next, const ExpertForm<Value>& form, Value* hidden, int64_t stride) {
  alignas(64) float sums[kStripRows * kPanelColumns];
  const int64_t intermediate = gate_up.num_columns / 2;
  const int64_t column = panel * kPairs, columns = std::min(kPairs, intermediate - column);
  const auto finish = [&](int64_t row, int64_t rows, const float* sums) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; c += 16) {
        const float* at = sums + r * kPanelColumns + c;
        const First valid = lanes(columns - c);
        Floats gate = load(at), up = load(at + kPairs);
        if (form.gate_up_bias) {
          const Value* const bias = form.gate_up_bias + part.expert * gate_up.num_columns + column + c;
          gate = gate + load_wide(valid, bias);
          up = up + load_wide(valid, bias + intermediate);
        }
        store_rounded(hidden + (row + r) * stride + column + c, valid, active_values(gate, up, form.activation));
      }
      if (column + columns == intermediate) {
        std::fill_n(hidden + (row + r) * stride + intermediate, stride - intermediate, Value{0});
      }
    }
  };
#ifdef BATCHINFER_TILES
  if (is_whole<Source>(gate_up)) {
    return multiply_whole(x, first, part.row_end - part.row_begin, gate_up, panel_of(gate_up, part.expert, panel), kChunks,
                          next, [&](int64_t row, int64_t count, int64_t, int64_t, const float* sums) {
                            finish(part.row_begin + row, count, sums);
                          });
  }
#endif
  for (int64_t row = part.row_begin; row < part.row_end; row += kStripRows) {
    const int64_t rows = std::min(kStripRows, part.row_end - row);
    multiply_strip(x, first + row - part.row_begin, rows, gate_up, panel_of(gate_up, part.expert, panel), kChunks, sums,
                   pass_of(part.row_begin, part.row_end, row, next));
    finish(row, rows, sums);
  }
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

// The same of the down product: rounded to out [rows, columns], added to `stream` unless that is null, or past the caches.
template <class Source, class Value>
void project_panel(const Source& x, int64_t first, const Part& part, const Weight& down, int64_t panel, const void* next,
                   bool goes_past, const Value* bias, const Value* stream, Value* out) {
  alignas(64) float sums[kStripRows * kPanelColumns];
  const int64_t column = panel * kPanelColumns, columns = std::min(kPanelColumns, down.num_columns - column);
  const auto finish = [&](int64_t row, int64_t rows, int64_t left, int64_t right, const float* sums) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (row + r) * down.num_columns + column;
      if (goes_past) {
        write_past(sums + r * kPanelColumns, out + at);
        continue;
      }
      for (int64_t c = left; c < right; c += 16) {
        const First valid = lanes(columns - c);
        Floats values = load(sums + r * kPanelColumns + c - left);
        if (bias) values = values + load_wide(valid, bias + part.expert * down.num_columns + column + c);
        if (stream) values = load_wide(valid, stream + at + c) + rounded<Value>(values);
        store_rounded(out + at + c, valid, values);
      }
    }
  };
#ifdef BATCHINFER_TILES
  if (is_whole<Source>(down)) {
    return multiply_whole(x, first, part.row_end - part.row_begin, down, panel_of(down, part.expert, panel),
                          num_chunks(down, panel), next,
                          [&](int64_t row, int64_t count, int64_t tile, int64_t tiles, const float* sums) {
                            const int64_t left = kTileSide * tile, right = std::min(left + kTileSide * tiles, columns);
                            finish(part.row_begin + row, count, left, right, sums);
                          });
  }
#endif
  for (int64_t row = part.row_begin; row < part.row_end; row += kStripRows) {
    const int64_t rows = std::min(kStripRows, part.row_end - row);
    multiply_strip(x, first + row - part.row_begin, rows, down, panel_of(down, part.expert, panel),
                   num_chunks(down, panel), sums, pass_of(part.row_begin, part.row_end, row, next));
    finish(row, rows, 0, columns, sums);
  }
}

// Calls multiply(own, first, part, panel, next) for all panels of all parts; arguments as above.
template <class Source, class Multiply>
void for_panels(const Source& x, const std::vector<Part>& parts, const Weight& weights, Multiply multiply) {
  run_tasks(parts.size(), [&](int64_t task) {
    const Part& part = parts[task];
    with_rows_for(weights, part.panel_end - part.panel_begin, x, part.row_begin, part.row_end,
                  [&](const auto& own, int64_t first) {
                    for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
                      multiply(own, first, part, panel, next_panel_of(weights, parts, task, panel));
                    }
                  });
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
                const Weight& down, const Value* stream, Value* out, const ExpertForm<Value>& form) {
  constexpr bool kIsBytes = std::is_same_v<Source, ByteRows>;
  const int64_t intermediate = gate_up.num_columns / 2, stride = (intermediate + 1) / 2 * 2;
  const int64_t num_rows = total_rows(experts, num_experts);
  const Scratch<Value> hidden(num_rows * stride);
  for_panels(x, parts_of<Source>(experts, num_experts, gate_up), gate_up,
             [&](const auto& own, int64_t first, const Part& part, int64_t panel, const void* next) {
               activate_panel(own, first, part, gate_up, panel, next, form, hidden.data(), stride);
             });
  const std::vector<Part> parts = parts_of<Source>(experts, num_experts, down);
  const bool goes_past = !stream && !form.down_bias && goes_past_caches(parts, down, out);
  const auto project = [&](const auto& own, int64_t first, const Part& part, int64_t panel, const void* next) {
    project_panel(own, first, part, down, panel, next, goes_past, form.down_bias, stream, out);
    if (goes_past && panel + 1 == part.panel_end) finish_past();
  };
  if constexpr (kIsBytes) {
    const Scratch<uint8_t> bytes(num_rows * down.num_blocks() * kBlock);
    const Scratch<float> scales(num_rows * down.num_blocks());
    Scratch<int32_t> starts;
    if (down.kind == WeightKind::kInt4) starts.grow(num_rows * down.num_blocks() * (kBlock / kGroup));
    to_bytes(Rows<bf16>{hidden.data(), stride}, bytes.data(), scales.data(), starts.data(), num_rows, intermediate);
    for_panels(ByteRows{bytes.data(), scales.data(), starts.data(), down.num_blocks()}, parts, down, project);
  } else {
    for_panels(Rows<Value>{hidden.data(), stride}, parts, down, project);
  }
}

template void expert_mlp(const Rows<bf16>&, const ExpertRows*, int64_t, const Weight&, const Weight&, const bf16*,
                         bf16*, const ExpertForm<bf16>&);
template void expert_mlp(const Rows<float>&, const ExpertRows*, int64_t, const Weight&, const Weight&, const float*,
                         float*, const ExpertForm<float>&);
template void expert_mlp(const ByteRows&, const ExpertRows*, int64_t, const Weight&, const Weight&, const bf16*, bf16*,
                         const ExpertForm<bf16>&);

}  // namespace batchinfer
