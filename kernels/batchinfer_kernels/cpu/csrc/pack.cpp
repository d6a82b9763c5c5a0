// Puts weights into the order in which the tiles read them.
//
//   bfloat16   [panels][depth / 2][64 columns][2 values]
//   float32    [panels][depth][64 columns]
//   8 bits     [panels] of  values [blocks * 32][64 columns][4 values]   rounded, -127 … 127
//                           starts [blocks][64 columns] int32            -128 times the sum of a column's block
//                           scales [blocks][64 columns] bfloat16
//   4 bits     [panels][groups] of  values [4][64 columns][4 bytes]   the first four of each eight in the lower halves
//                                   scales [64 columns] bfloat16
//   E2M1       the same; of eight values the first, third, … in the lower half of four bytes, the others in the upper half
//
// Values in 4 bits are from -8 to 7 and stored plus 8; the largest magnitude of a group of 32 becomes -8 of its scale.
//
// Columns and values that are not there are zero.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "lanes.h"

namespace batchinfer {
namespace {

constexpr float kMostInt8 = 127.0f;

// The column in a panel's lane, -1 if there is none.
int64_t column_at(const Weight& shape, int64_t panel, int64_t lane) {
  if (!shape.is_paired) {
    const int64_t column = panel * kPanelColumns + lane;
    return column < shape.num_columns ? column : -1;
  }
  const int64_t half = shape.num_columns / 2, column = panel * (kPanelColumns / 2) + lane % (kPanelColumns / 2);
  if (column >= half) return -1;
  return lane < kPanelColumns / 2 ? column : half + column;
}

// 32 bits of each column after the other: a pair of bfloat16 or one float32.
template <class Value>
void pack_panel(const Parts<Value>& source, const Weight& shape, int64_t panel, uint8_t* packed) {
  constexpr int64_t kTogether = sizeof(uint32_t) / sizeof(Value);
  uint32_t* out = reinterpret_cast<uint32_t*>(packed);
  const std::vector<Value> nothing(shape.depth);
  // 16 columns at a time, so that these bits of each make one line
  for (int64_t group = 0; group < kPanelColumns; group += 16) {
    const Value* rows[16];
    for (int64_t lane = 0; lane < 16; ++lane) {
      const int64_t column = column_at(shape, panel, group + lane);
      rows[lane] = column < 0 ? nothing.data() : source.column(column);
    }
    for (int64_t k = 0; k < shape.depth / kTogether; ++k) {
      uint32_t* line = out + k * kPanelColumns + group;
      for (int64_t lane = 0; lane < 16; ++lane) std::memcpy(line + lane, rows[lane] + kTogether * k, sizeof(uint32_t));
    }
  }
}

// The scale of a column's block in 8 bits: its largest magnitude by 127, rounded up; no number where one of its values is
// none.
bf16 block_scale(const bf16* values, int64_t count) {
  Floats peak = floats(0.0f);
  bool is_finite = true;
  for (int64_t i = 0; i < count; i += 16) {
    const Floats part = magnitude(load_wide(lanes(count - i), values + i));
    is_finite = is_finite && !any(not_below(part, floats(INFINITY)));
    peak = larger(peak, part);
  }
  const float scale = is_finite ? largest_of(peak) / kMostInt8 : NAN;
  return static_cast<bf16>((std::bit_cast<uint32_t>(scale) + 0xFFFF) >> 16);
}

void pack_int8(const Parts<bf16>& source, const Weight& shape, int64_t panel, uint8_t* packed) {
  const int64_t num_blocks = shape.num_blocks();
  int8_t* values = reinterpret_cast<int8_t*>(packed);
  int32_t* starts = reinterpret_cast<int32_t*>(packed + num_blocks * kBlock * kPanelColumns);
  bf16* scales = reinterpret_cast<bf16*>(starts + num_blocks * kPanelColumns);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t start = block * kBlock;
    for (int64_t lane = 0; lane < kPanelColumns; ++lane) {
      const int64_t column = column_at(shape, panel, lane);
      bf16& stored = scales[block * kPanelColumns + lane];
      stored = column < 0 ? bf16{0} : block_scale(source.column(column) + start, std::min(kBlock, shape.depth - start));
      const float scale = wide_of(stored);
      int32_t sum = 0;
      for (int64_t i = 0; i < kBlock; ++i) {
        const bool is_there = start + i < shape.depth && scale > 0;
        const float value = is_there ? wide_of(source.column(column)[start + i]) / scale : 0.0f;
        const int8_t rounded = static_cast<int8_t>(std::nearbyint(value));
        values[((start + i) / 4 * kPanelColumns + lane) * 4 + i % 4] = rounded;
        sum += rounded;
      }
      starts[block * kPanelColumns + lane] = -128 * sum;
    }
  }
}

// 32 values in 4 bits as panels have them, for one column; `bytes` has two in each.
void put_group(const uint8_t* bytes, bf16 scale, bool is_fp4, int64_t lane, uint8_t* group) {
  const auto spread = [](uint32_t halves) {  // four times 4 bits to four bytes
    halves = (halves | halves << 8) & 0x00FF00FF;
    return (halves | halves << 4) & 0x0F0F0F0F;
  };
  const auto joined = [](uint32_t halves) {  // the lower four bits of four bytes side by side
    halves &= 0x0F0F0F0F;
    halves = (halves | halves >> 4) & 0x00FF00FF;
    return (halves | halves >> 8) & 0xFFFF;
  };
  for (int64_t octet = 0; octet < kGroup / 8; ++octet) {
    uint32_t eight;
    std::memcpy(&eight, bytes + 4 * octet, sizeof(eight));
    const uint32_t word = is_fp4 ? joined(eight) | joined(eight >> 4) << 16
                                 : spread(eight & 0xFFFF) | spread(eight >> 16) << 4;
    std::memcpy(group + 4 * (octet * kPanelColumns + lane), &word, sizeof(word));
  }
  std::memcpy(group + kGroup / 2 * kPanelColumns + lane * sizeof(bf16), &scale, sizeof(scale));
}

// Rounds up to 32 values to 4 bits, two in a byte; zeros follow. Returns the scale, which is no number where a value is none.
bf16 round_group(const bf16* values, int64_t count, uint8_t* bytes) {
  Floats wide[2], least = floats(0.0f), most = floats(0.0f);
  bool is_finite = true;
  for (int half = 0; half < 2; ++half) {
    wide[half] = load_wide(lanes(count - 16 * half), values + 16 * half);
    is_finite = is_finite && !any(not_below(magnitude(wide[half]), floats(INFINITY)));
    least = larger(least, floats(0.0f) - wide[half]);
    most = larger(most, wide[half]);
  }
  const float down = largest_of(least), up = largest_of(most);
  const float scale = first_of(rounded<bf16>(floats(is_finite ? (down >= up ? down : -up) / 8 : NAN)));
  alignas(64) uint8_t each[kGroup];
  for (int half = 0; half < 2; ++half) {
    const Floats whole = nearest_whole(scale == 0 ? floats(0.0f) : wide[half] / floats(scale));
    store_bytes(each + 16 * half, plus(nearest_ints(larger(smaller(whole, floats(7.0f)), floats(-8.0f))), ints(8)));
  }
  for (int64_t i = 0; i < kGroup / 2; ++i) bytes[i] = each[2 * i] | each[2 * i + 1] << 4;
  return scale == 0 ? bf16{0} : static_cast<bf16>(std::bit_cast<uint32_t>(scale) >> 16);
}

// Calls column_group(column, group, bytes) for each group of a panel's columns: fills `bytes`, returns the scale.
template <class ColumnGroup>
void pack_groups_of(const Weight& shape, int64_t panel, uint8_t* packed, ColumnGroup column_group) {
  const int64_t group_bytes = shape.panel_bytes() / shape.num_groups();
  const bool is_fp4 = shape.kind == WeightKind::kFp4;
  uint8_t bytes[kGroup / 2];
  for (int64_t lane = 0; lane < kPanelColumns; ++lane) {
    const int64_t column = column_at(shape, panel, lane);
    for (int64_t group = 0; group < shape.num_groups(); ++group) {
      std::fill_n(bytes, kGroup / 2, is_fp4 ? uint8_t{0} : uint8_t{0x88});
      const bf16 scale = column < 0 ? bf16{0} : column_group(column, group, bytes);
      put_group(bytes, scale, is_fp4, lane, packed + group * group_bytes);
    }
  }
}

}  // namespace

int64_t Weight::panel_bytes() const {
  if (kind == WeightKind::kInt4 || kind == WeightKind::kFp4) {
    return num_groups() * kPanelColumns * (kGroup / 2 + int64_t{sizeof(bf16)});
  }
  if (kind == WeightKind::kBfloat16) return (depth + 1) / 2 * 2 * kPanelColumns * int64_t{sizeof(bf16)};
  if (kind == WeightKind::kFloat32) return depth * kPanelColumns * int64_t{sizeof(float)};
  return num_blocks() * kPanelColumns * (kBlock + int64_t{sizeof(int32_t)} + int64_t{sizeof(bf16)});
}

void pack(const Parts<bf16>& source, const Weight& shape, uint8_t* packed) {
  run_tasks(shape.num_panels(), [&](int64_t panel) {
    uint8_t* const out = packed + panel * shape.panel_bytes();
    if (shape.kind == WeightKind::kInt8) return pack_int8(source, shape, panel, out);
    if (shape.kind != WeightKind::kInt4) return pack_panel(source, shape, panel, out);
    pack_groups_of(shape, panel, out, [&](int64_t column, int64_t group, uint8_t* bytes) {
      return round_group(source.column(column) + group * kGroup, shape.depth - group * kGroup, bytes);
    });
  });
}

void pack(const Parts<uint8_t>& values, const Parts<bf16>& scales, const Weight& shape, uint8_t* packed) {
  run_tasks(shape.num_panels(), [&](int64_t panel) {
    pack_groups_of(shape, panel, packed + panel * shape.panel_bytes(), [&](int64_t column, int64_t group, uint8_t* bytes) {
      std::memcpy(bytes, values.column(column) + group * (kGroup / 2), kGroup / 2);
      return scales.column(column)[group];
    });
  });
}

void pack(const Parts<float>& source, const Weight& shape, uint8_t* packed) {
  run_tasks(shape.num_panels(), [&](int64_t panel) {
    pack_panel(source, shape, panel, packed + panel * shape.panel_bytes());
  });
}

}  // namespace batchinfer
