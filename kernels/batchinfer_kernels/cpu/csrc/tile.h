// The inner loop of every product, x · weightᵀ, over up to 6 rows of x and a panel of 64 columns.
//
//   panel     a word for each of 64 columns c                       4 vectors (bfloat16) per step
//               bfloat16   [w(k, c) w(k + 1, c)] side by side       k = 0, 2, 4, …
//               float32    w(k, c)                                  k = 0, 1, 2, …
//   x         the same values of one row, the same in all lanes     1 broadcast per row and step
//   sums      64 columns of a row in float32, in this order of k
//
// Where pairs are multiplied as float32 (pairs.cpp) a step takes the second value of the pair, then the first: the order of
// the instruction for pairs.
//
// Lanes are columns, so nothing is added across lanes, and a value depends on its own row and column only. As many
// groups of 16 columns go together as the registers hold sums for: with AVX-512 all four, so that 24 accumulators take
// 10 loads for 24 multiplications. 8-bit weights go four values at a time and are summed exactly in 32 bits within a
// block of 128; block sums are scaled and added in float32, in ascending order. 4-bit weights are taken apart in registers
// and summed so within a group of 32; they have no tiles of amx_tiles.h.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "ahead.h"
#include "lanes.h"
#include "amx_products.h"

namespace batchinfer {

constexpr int64_t kTileRows = 6;
constexpr int kChunks = kPanelColumns / 16;
constexpr int64_t kStripRows = 96;    // rows that pass a panel together
constexpr int64_t kPartBlocks = 4;    // of a panel in 8 or 4 bits that rows pass at a time
constexpr int64_t kWideValues = 128;  // of a row and of a panel's columns that are widened at a time
constexpr int64_t kWidenPanel = 48;   // rows for which it is worth it to widen a panel in memory
constexpr int64_t kTilePartBytes = 384;  // of a row, that rows in tiles pass at a time

// Values of rows and columns are loaded once more for the second part: the registers are for sums.
inline void load_again() { asm volatile("" ::: "memory"); }

// What a row gives to one step: two bfloat16 by the instruction for pairs, the same two as float32 one after the other, or
// a single value that meets a float32 column. `part` is the first or second of kParts products, all in one order of sums.
// A processor is busy with kSums sums: others begin while one waits for its last product.
#ifdef BATCHINFER_PAIR_PRODUCTS
struct Pair {
  static constexpr int kParts = 1, kSums = 16;
  using Row = bf16;
  using Column = bf16;
  static constexpr int64_t kValues = 2, kLane = 32;

  static Pairs columns(const bf16* at, int) { return column_pairs(at); }
  static Pairs row(const bf16* at, int) {
    int32_t pair;
    std::memcpy(&pair, at, sizeof(pair));
    return row_pair(pair);
  }
};
#endif
// Rows are float32 already, the second value kApart behind the first; columns are widened as they are loaded.
template <int64_t kApart>
struct WidePair {
  static constexpr int kParts = 2, kSums = 8;
  using Row = float;
  using Column = bf16;
  static constexpr int64_t kValues = 2, kLane = 32;

  static Floats columns(const bf16* at, int part) { return pair_part(load_ints(at), part); }
  static Floats row(const float* at, int part) { return floats(at[part == 0 ? kApart : 0]); }
};
// Both are float32 already; the columns' second values stand one panel's row behind the first ones.
struct WidePanel {
  static constexpr int kParts = 2;
  using Row = float;
  using Column = float;
  static constexpr int64_t kValues = 2, kLane = 16;

  static Floats columns(const float* at, int part) { return load(at + (part == 0 ? kPanelColumns : 0)); }
  static Floats row(const float* at, int part) { return floats(at[part == 0 ? 1 : 0]); }
};
template <class Value>
struct Single {
  static constexpr int kParts = 1, kSums = 8;
  using Row = Value;
  using Column = float;
  static constexpr int64_t kValues = 1, kLane = 16;

  static Floats columns(const float* at, int) { return load(at); }
  static Floats row(const float* at, int) { return floats(*at); }
  static Floats row(const bf16* at, int) { return low_values(ints(*at)); }
};

// Calls call(step) with the step for rows of Value: for pairs by their instruction, or of values in float32 (`is_wide`),
// whose second one is kApart behind the first.
template <class Value, int64_t kApart = 1, class Call>
inline void with_step([[maybe_unused]] bool is_wide, Call call) {
  if constexpr (std::is_same_v<Value, float>) {
    call(Single<float>{});
  } else {
#ifdef BATCHINFER_PAIR_PRODUCTS
    if (!is_wide) return call(Pair{});
#endif
    call(WidePair<kApart>{});
  }
}

// Rows one after the other: each where it is, or all the same number of values apart, which takes one register.
template <class Row>
struct RowList {
  const Row* const* rows;

  const Row* next() { return *rows++; }
};
template <class Row>
RowList(const Row* const*) -> RowList<Row>;  // clang before 17 does not find it by itself
template <class Row>
struct RowsApart {
  const Row* row;
  int64_t stride;

  const Row* next() {
    const Row* const own = row;
    row += stride;
    return own;
  }
};

// sums[r][n] += values of row r times the n-th 16 columns at `columns`, over all steps; a row goes on by `row_stride`
// values a step, the columns by `stride`.
template <class Step, int R, int N, class RowsOf>
inline __attribute__((always_inline)) void add_products(Floats (&sums)[R][N], RowsOf rows, int64_t row_stride,
                                                        const typename Step::Column* columns_at, int64_t stride,
                                                        int64_t num_steps) {
  for (int64_t step = 0; step < num_steps; ++step, columns_at += stride) {
#pragma GCC unroll 2
    for (int part = 0; part < Step::kParts; ++part) {
      if (part > 0) load_again();
      decltype(Step::columns(columns_at, part)) columns[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) columns[n] = Step::columns(columns_at + Step::kLane * n, part);
      RowsOf row = rows;
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) {
        const auto value = Step::row(row.next() + step * row_stride, part);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) add_product(sums[r][n], value, columns[n]);
      }
    }
  }
}

constexpr bool kTurnsWithin = kTurnSteps < kGroup / 4;  // of the loops over a block or a group

// How often it is the turn of what comes next while rows are multiplied, roughly.
inline int64_t num_turns(int64_t num_rows, int64_t num_steps) {
  return (num_rows + kTileRows - 1) / kTileRows * ((num_steps + kTurnSteps - 1) / kTurnSteps);
}

// out [R][64] of the first N groups of 16 columns; the others are left as they are.
template <class Step, int R, int N>
__attribute__((noinline)) void tile(const typename Step::Row* const* x, const typename Step::Column* panel,
                                    int64_t num_steps, float* out, bool is_first, Ahead& ahead) {
  Floats sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = is_first ? floats(0.0f) : load(out + r * kPanelColumns + 16 * n);
  }
  const typename Step::Row* rows[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) rows[r] = x[r];
  constexpr int64_t kPanelStep = Step::kValues * kPanelColumns;
  if constexpr (kTurnsWithin) {
    for (int64_t step = 0; step < num_steps; step += kTurnSteps, panel += kTurnSteps * kPanelStep) {
      ahead.turn();
      add_products<Step, R, N>(sums, RowList{rows}, Step::kValues, panel, kPanelStep, std::min(kTurnSteps, num_steps - step));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) rows[r] += kTurnSteps * Step::kValues;
    }
  } else {
    ahead.turn();
    add_products<Step, R, N>(sums, RowList{rows}, Step::kValues, panel, kPanelStep, num_steps);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(out + r * kPanelColumns + 16 * n, sums[r][n]);
  }
}

// Where a panel in 8 bits has its parts (pack.cpp).
struct BytePanel {
  const int8_t* values;
  const int32_t* starts;
  const float* scales;

  BytePanel(const uint8_t* panel, int64_t num_blocks)
      : values(reinterpret_cast<const int8_t*>(panel)),
        starts(reinterpret_cast<const int32_t*>(panel + num_blocks * kBlock * kPanelColumns)),
        scales(reinterpret_cast<const float*>(starts + num_blocks * kPanelColumns)) {}
};

// Blocks [first, end) of N groups of 16 columns from `first_chunk` on; `out` has them from there, too.
template <int R, int N>
__attribute__((noinline)) void int8_tile(const uint8_t* const* x, const float* const* x_scales, const BytePanel& panel,
                                         int64_t first_chunk, int64_t first, int64_t end, float* out, Ahead& ahead) {
  const int8_t* values = panel.values + first * kBlock * kPanelColumns + 64 * first_chunk;
  const int32_t* starts = panel.starts + 16 * first_chunk;
  const float* scales = panel.scales + first_chunk;
  const int32_t* fours[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) fours[r] = reinterpret_cast<const int32_t*>(x[r]);
  for (int64_t block = first; block < end; ++block) {
    Ints sums[R][N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      // what moving the values up by 128 added is taken off at the start
      const Ints start = load_ints(starts + block * kPanelColumns + 16 * n);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][n] = start;
    }
    if constexpr (!kTurnsWithin) ahead.turn();
#pragma GCC unroll 1
    for (int64_t step = 0; step < kBlock / 4; ++step, values += 4 * kPanelColumns) {
      if (kTurnsWithin && step % kTurnSteps == 0) ahead.turn();
#pragma GCC unroll 2
      for (int part = 0; part < kFourParts; ++part) {
        if (part > 0) load_again();
        FourPart columns[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) columns[n] = column_fours(values + 64 * n, part);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const auto four = row_four(fours[r][block * (kBlock / 4) + step], part);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) add_product(sums[r][n], four, columns[n]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats x_scale = floats(x_scales[r][block]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        float* at = out + r * kPanelColumns + 16 * n;
        const Floats scale = x_scale * floats(scales[block * kChunks + n]);
        store(at, multiply_add(as_floats(sums[r][n]), scale, block ? load(at) : floats(0.0f)));
      }
    }
  }
}

constexpr int64_t kGroupSteps = kGroup / 4;
constexpr int64_t kGroupBytes = kGroup * kPanelColumns / 2 + kPanelColumns * int64_t{sizeof(bf16)};

// The same of groups [first, end) of a panel in 4 bits (pack.cpp).
template <int R, int N>
__attribute__((noinline)) void int4_tile(const ByteRows& x, const int64_t* rows, const uint8_t* panel,
                                         int64_t first_chunk, int64_t first, int64_t end, float* out, Ahead& ahead) {
  constexpr int64_t kLine = 4 * kPanelColumns, kScalesAt = kGroup / 8 * kLine;
  constexpr int64_t kGroupsOfBlock = kBlock / kGroup;
  const int32_t *fours[R], *starts[R];
  const float* x_scales[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    fours[r] = reinterpret_cast<const int32_t*>(x.data + rows[r] * x.num_blocks * kBlock);
    starts[r] = x.starts + rows[r] * x.num_blocks * kGroupsOfBlock;
    x_scales[r] = x.scales + rows[r] * x.num_blocks;
  }
  panel += first * kGroupBytes;
  for (int64_t group = first; group < end; ++group, panel += kGroupBytes) {
    Ints sums[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      // what storing the weights plus 8 added is taken off at the start
      const Ints start = ints(starts[r][group]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = start;
    }
    if constexpr (!kTurnsWithin) ahead.turn();
#pragma GCC unroll 8
    for (int64_t step = 0; step < kGroupSteps; ++step) {
      const uint8_t* const line = panel + step / 2 * kLine + 64 * first_chunk;
      if (kTurnsWithin && step % kTurnSteps == 0) ahead.turn();
      if (step % 2) load_again();
      NibblePart columns[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) columns[n] = column_nibbles(line + 64 * n, step % 2);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const SignedFour four = signed_four(fours[r][group * (kGroup / 4) + step]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) add_product(sums[r][n], four, columns[n]);
      }
    }
    const bf16* const scales = reinterpret_cast<const bf16*>(panel + kScalesAt) + 16 * first_chunk;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Floats scale = low_values(load_bits(scales + 16 * n));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Floats both = floats(x_scales[r][group / kGroupsOfBlock]) * scale;
        float* const at = out + r * kPanelColumns + 16 * n;
        store(at, multiply_add(as_floats(sums[r][n]), both, group ? load(at) : floats(0.0f)));
      }
    }
  }
}

// Groups of 16 columns that a panel has.
inline int64_t num_chunks(const Weight& weight, int64_t panel) {
  if (weight.is_paired) return kChunks;
  return std::min<int64_t>(kChunks, (weight.num_columns - panel * kPanelColumns + 15) / 16);
}

// Calls call(first, N) for all groups, N from `first` on that fit into the registers with R rows; N is a constant.
template <int R, class Call>
inline void for_chunks(int64_t chunks, Call call) {
  constexpr int kMost = chunks_beside(R);
  int64_t first = 0;
  for (; chunks - first >= kMost; first += kMost) call(first, std::integral_constant<int, kMost>{});
  if constexpr (kMost > 1) {
    if (chunks - first == 1) call(first, std::integral_constant<int, 1>{});
  }
  if constexpr (kMost > 2) {
    if (chunks - first == 2) call(first, std::integral_constant<int, 2>{});
    if (chunks - first == 3) call(first, std::integral_constant<int, 3>{});
  }
}

// The same with the number of rows, 1 … 6.
template <class Call>
inline void with_rows(int64_t rows, Call call) {
  switch (rows) {
    case 1: return call(std::integral_constant<int, 1>{});
    case 2: return call(std::integral_constant<int, 2>{});
    case 3: return call(std::integral_constant<int, 3>{});
    case 4: return call(std::integral_constant<int, 4>{});
    case 5: return call(std::integral_constant<int, 5>{});
    default: return call(std::integral_constant<int, 6>{});
  }
}

// Calls call(row, rows) for tiles of as even a number of rows as there is: 7 rows as 4 and 3. One of 6 and one of 1 would
// take longer, since a tile of a row or two waits for its columns.
template <class Call>
inline void for_tiles(int64_t begin, int64_t end, Call call) {
  const int64_t num_tiles = (end - begin + kTileRows - 1) / kTileRows;
  if (num_tiles == 1) return call(begin, end - begin);  // division takes as long as a few rows
  for (int64_t tile = 0, row = begin; tile < num_tiles; ++tile) {
    const int64_t rows = (end - begin) / num_tiles + (tile < (end - begin) % num_tiles);
    call(row, rows);
    row += rows;
  }
}

// sums [num_rows, 64] = (or, unless it is the first part of a sum, +=) products of rows over num_steps steps with the first
// `chunks` groups of a panel's columns; at(row, place) is where a row begins, the place-th of those that go together.
template <class Step, class RowAt>
inline void multiply_rows(RowAt at, int64_t num_rows, const typename Step::Column* panel, int64_t num_steps,
                          int64_t chunks, float* sums, bool is_first, Ahead ahead) {
  for_tiles(0, num_rows, [&](int64_t row, int64_t rows) {
    const typename Step::Row* rows_at[kTileRows];
    for (int64_t r = 0; r < rows; ++r) rows_at[r] = at(row + r, r);
    with_rows(rows, [&](auto count) {
      for_chunks<count>(chunks, [&](int64_t chunk, auto groups) {
        tile<Step, count, groups>(rows_at, panel + Step::kLane * chunk, num_steps,
                                  sums + row * kPanelColumns + 16 * chunk, is_first, ahead);
      });
    });
  });
}

// Calls call(start, num_values) for parts of `depth`, all but the last of `most` values; once if it is 0.
template <class Call>
inline void for_parts(int64_t depth, int64_t most, Call call) {
  for (int64_t start = 0; start < depth || start == 0; start += most) call(start, std::min(most, depth - start));
}

// Behind num_steps steps of a panel: as many of its next ones, or of the next panel's. Rows that are one tile with all
// columns ask for nothing: they read a panel once from start to end, and processors look ahead of that with more reads under
// way than a thread can ask for.
template <class Step>
inline Ahead next_part(const typename Step::Column* part, int64_t num_rows, int64_t num_steps, bool is_last_part,
                       Pass pass) {
  if (pass.count == 1 && num_rows <= kTileRows && chunks_beside(num_rows) == kChunks) return Ahead::nothing();
  const int64_t num_values = num_steps * Step::kValues * kPanelColumns;
  const int64_t num_bytes = num_values * int64_t{sizeof(*part)}, turns = num_turns(num_rows, num_steps);
  return is_last_part ? pass.next_panel(num_bytes, turns) : pass.next_part(part + num_values, num_bytes, turns);
}

// sums [num_rows, 64] of rows first … first + num_rows - 1 (at most kStripRows) with the first `chunks` groups of a
// panel's columns.
template <class Step, class Row>
inline void multiply_strip_by(const Rows<Row>& x, int64_t first, int64_t num_rows, int64_t depth,
                              const typename Step::Column* panel, int64_t chunks, float* sums, Pass pass) {
  constexpr int64_t kMost = kStepBytes / (kPanelColumns * int64_t{sizeof(typename Step::Column)});
  for_parts(depth, kMost, [&](int64_t start, int64_t num_values) {
    const int64_t num_steps = (num_values + Step::kValues - 1) / Step::kValues;
    const auto at = [&](int64_t row, int64_t) { return x.at(first + row) + start; };
    const typename Step::Column* const part = panel + start * kPanelColumns;
    multiply_rows<Step>(at, num_rows, part, num_steps, chunks, sums, start == 0,
                        next_part<Step>(part, num_rows, num_steps, start + num_values == depth, pass));
  });
}

// `count` values in float32.
inline void widen(const bf16* values, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += 16) store(out + i, lanes(count - i), load_wide(lanes(count - i), values + i));
}

// Of pairs of values of 64 columns, for each pair first the first ones.
inline void widen_panel(const bf16* panel, int64_t num_steps, int64_t chunks, float* out) {
  for (int64_t step = 0; step < num_steps; ++step, panel += 2 * kPanelColumns, out += 2 * kPanelColumns) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const Ints pairs = load_ints(panel + 32 * chunk);
      store(out + 16 * chunk, low_values(pairs));
      store(out + kPanelColumns + 16 * chunk, high_values(pairs));
    }
  }
}

// The same bits as by the instruction for pairs, in float32: the rows of a tile are widened before they are multiplied, and
// so is the panel where many rows pass it.
inline void multiply_strip_widened(const Rows<bf16>& x, int64_t first, int64_t num_rows, int64_t depth,
                                   const bf16* panel, int64_t chunks, float* sums, Pass pass) {
  alignas(64) float rows[kTileRows * kWideValues], columns[kWideValues * kPanelColumns];
  for_parts(depth, kWideValues, [&](int64_t start, int64_t num_values) {
    const int64_t num_steps = (num_values + 1) / 2;
    const auto at = [&](int64_t row, int64_t place) {
      float* const out = rows + place * kWideValues;
      widen(x.at(first + row) + start, 2 * num_steps, out);
      return out;
    };
    const bf16* const part = panel + start * kPanelColumns;
    const Ahead ahead = next_part<WidePair<1>>(part, num_rows, num_steps, start + num_values == depth, pass);
    if (num_rows >= kWidenPanel) {
      widen_panel(part, num_steps, chunks, columns);
      multiply_rows<WidePanel>(at, num_rows, columns, num_steps, chunks, sums, start == 0, ahead);
    } else {
      multiply_rows<WidePair<1>>(at, num_rows, part, num_steps, chunks, sums, start == 0, ahead);
    }
  });
}

constexpr int64_t kFp4Values = 128;  // of a panel's columns that are unpacked at a time

// Values [start, start + kFp4Values) of a panel in E2M1, or all up to the last group, as a panel in bfloat16 has them: a value
// times its scale is rounded by nothing but the smallest numbers.
inline void unpack_fp4(const uint8_t* panel, int64_t start, int64_t num_values, bf16* out) {
  panel += start / kGroup * kGroupBytes;
  for (int64_t value = 0; value < num_values; value += kGroup, panel += kGroupBytes) {
    const bf16* const scales = reinterpret_cast<const bf16*>(panel + kGroup / 2 * kPanelColumns);
    for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
      const Floats scale = low_values(load_bits(scales + 16 * chunk));
      for (int64_t octet = 0; octet < kGroup / 8; ++octet) {
        const Ints words = load_ints(panel + 4 * (octet * kPanelColumns + 16 * chunk));
        bf16* const at = out + (value / 2 + 4 * octet) * 2 * kPanelColumns + 32 * chunk;
#pragma GCC unroll 4
        for (int step = 0; step < 4; ++step) {
          const Ints pairs = pairs_of_fp4(words, step);
          store_ints(at + step * 2 * kPanelColumns, rounded_pairs(low_values(pairs) * scale, high_values(pairs) * scale));
        }
      }
    }
  }
}

// Calls multiply(start, num_values, panel, ahead) with a panel in E2M1, part by part in bfloat16. The bits are those of a weight
// in bfloat16 with these values.
template <class Multiply>
inline void for_fp4_parts(const Weight& weight, const uint8_t* panel, int64_t turns, Pass pass, Multiply multiply) {
  alignas(64) bf16 values[kFp4Values * kPanelColumns];
  for_parts(weight.depth, kFp4Values, [&](int64_t start, int64_t num_values) {
    unpack_fp4(panel, start, num_values, values);
    const int64_t end = start + num_values, num_bytes = kFp4Values / kGroup * kGroupBytes;
    multiply(start, num_values, values,
             end == weight.depth ? pass.next_panel(num_bytes, turns)
                                 : pass.next_part(panel + end / kGroup * kGroupBytes, num_bytes, turns));
  });
}

// Rows with a panel in E2M1.
inline void multiply_strip_fp4(const Rows<bf16>& x, int64_t first, int64_t num_rows, const Weight& weight,
                               const uint8_t* panel, int64_t chunks, float* sums, Pass pass) {
  for_fp4_parts(weight, panel, num_turns(num_rows, kFp4Values / 2), pass,
                [&](int64_t start, int64_t num_values, const bf16* part, Ahead ahead) {
                  const int64_t num_steps = (num_values + 1) / 2;
#ifdef BATCHINFER_PAIR_PRODUCTS
                  if (pairs_are_quick()) {
                    const auto at = [&](int64_t row, int64_t) { return x.at(first + row) + start; };
                    return multiply_rows<Pair>(at, num_rows, part, num_steps, chunks, sums, start == 0, ahead);
                  }
#endif
                  alignas(64) float rows[kTileRows * kFp4Values];
                  const auto at = [&](int64_t row, int64_t place) {
                    float* const out = rows + place * kFp4Values;
                    widen(x.at(first + row) + start, 2 * num_steps, out);
                    return out;
                  };
                  multiply_rows<WidePair<1>>(at, num_rows, part, num_steps, chunks, sums, start == 0, ahead);
                });
}

#ifdef BATCHINFER_TILES
// The same in tiles.
inline void multiply_strip_fp4(TileRows rows, const Weight& weight, const uint8_t* panel, int64_t chunks, float* sums,
                               Pass pass) {
  for_fp4_parts(weight, panel, num_tile_turns(rows.count, chunks, kFp4Values / 2), pass,
                [&](int64_t start, int64_t num_values, const bf16* part, Ahead ahead) {
                  multiply_pair_tiles(rows.behind(start / 2), {part, 4 * kPanelColumns}, chunks, (num_values + 1) / 2,
                                      start == 0, sums, kPanelColumns, ahead);
                });
}

// The same in tiles. Rows beyond two tiles pass the panel part by part, for the first-level cache.
inline void multiply_strip_in_tiles(TileRows rows, int64_t depth, const bf16* panel, int64_t chunks, float* sums,
                                    Pass pass) {
  const int64_t most = rows.count > 2 * kTileSide ? kTilePartBytes / int64_t{sizeof(bf16)}
                                                  : kStepBytes / (kPanelColumns * int64_t{sizeof(bf16)});
  const auto bytes_of = [](int64_t num_values) { return (num_values + 1) / 2 * 4 * kPanelColumns; };
  for_parts(depth, most, [&](int64_t start, int64_t num_values) {
    const int64_t num_words = (num_values + 1) / 2, turns = num_tile_turns(rows.count, chunks, num_words);
    const int64_t end = start + num_values, next_bytes = bytes_of(std::min(most, end == depth ? depth : depth - end));
    const bf16* const part = panel + start * kPanelColumns;
    const Ahead ahead = end == depth ? pass.next_panel(next_bytes, turns)
                                     : pass.next_part(panel + end * kPanelColumns, next_bytes, turns);
    multiply_pair_tiles(rows.behind(start / 2), {part, 4 * kPanelColumns}, chunks, num_words, start == 0, sums,
                        kPanelColumns, ahead);
  });
}
#endif

// As above, with a weight of any kind that rows of Row meet; rows that meet in tiles have no index (tiled_rows.h).
template <class Row>
inline void multiply_strip(const Rows<Row>& x, int64_t first, int64_t num_rows, const Weight& weight,
                           const uint8_t* panel, int64_t chunks, float* sums, Pass pass = {}) {
  const int64_t depth = weight.depth;
  if constexpr (std::is_same_v<Row, bf16>) {
    if (weight.kind == WeightKind::kBfloat16) {
      const bf16* values = reinterpret_cast<const bf16*>(panel);
#ifdef BATCHINFER_TILES
      const TileRows rows = TileRows::apart(x.at(first), x.stride * int64_t{sizeof(bf16)}, num_rows);
      return multiply_strip_in_tiles(rows, depth, values, chunks, sums, pass);
#else
#ifdef BATCHINFER_PAIR_PRODUCTS
      if (pairs_are_quick()) return multiply_strip_by<Pair>(x, first, num_rows, depth, values, chunks, sums, pass);
#endif
      return multiply_strip_widened(x, first, num_rows, depth, values, chunks, sums, pass);
#endif
    }
    if (weight.kind == WeightKind::kFp4) {
#ifdef BATCHINFER_TILES
      const TileRows rows = TileRows::apart(x.at(first), x.stride * int64_t{sizeof(bf16)}, num_rows);
      return multiply_strip_fp4(rows, weight, panel, chunks, sums, pass);
#else
      return multiply_strip_fp4(x, first, num_rows, weight, panel, chunks, sums, pass);
#endif
    }
  }
  multiply_strip_by<Single<Row>>(x, first, num_rows, depth, reinterpret_cast<const float*>(panel), chunks, sums, pass);
}

#ifdef BATCHINFER_TILES
// sums [count, 64] = (or, unless it is the first block, +=) exact sums of a block in N tiles of columns, times their scales.
template <int N>
inline void add_scaled(const int32_t* exact, int64_t count, const float* x_scales, int64_t x_stride, const float* scales,
                       bool is_first, float* sums) {
  Floats column_scales[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) column_scales[n] = floats(scales[n]);
  for (int64_t r = 0; r < count; ++r, exact += kScratchColumns, x_scales += x_stride, sums += kPanelColumns) {
    const Floats x_scale = floats(*x_scales);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Floats sum = as_floats(load_ints(exact + 16 * n)), before = is_first ? floats(0.0f) : load(sums + 16 * n);
      store(sums + 16 * n, multiply_add(sum, x_scale * column_scales[n], before));
    }
  }
}

// Sums of rows in 8 bits that have scales [num_rows, num_blocks].
inline void multiply_strip_in_tiles(TileRows rows, const float* x_scales, const BytePanel& panel, int64_t chunks,
                                    int64_t num_blocks, float* sums, Ahead next_panel) {
  const int64_t part_blocks = rows.count > 2 * kTileSide ? kTilePartBytes / kBlock : std::max<int64_t>(1, num_blocks);
  multiply_byte_tiles(rows, {panel.values, 4 * kPanelColumns}, chunks, kBlock / 4, num_blocks, part_blocks, next_panel,
                      [&](int64_t row, int64_t count, int64_t tile, int64_t number, int64_t block, const int32_t* exact) {
                        const float* const scales = panel.scales + block * kChunks + tile;
                        float* const at = sums + row * kPanelColumns + 16 * tile;
                        up_to_four(number, [&](auto tiles) {
                          add_scaled<tiles>(exact, count, x_scales + row * num_blocks + block, num_blocks, scales,
                                            block == 0, at);
                        });
                      });
}
inline Ahead next_byte_panel(const Weight& weight, int64_t num_rows, int64_t chunks, Pass pass) {
  return pass.next_panel(weight.panel_bytes(), num_tile_turns(num_rows, chunks, weight.num_blocks() * kBlock / 4));
}
#endif

inline void multiply_strip_in_groups(const ByteRows& x, int64_t first, int64_t num_rows, const Weight& weight,
                                     const uint8_t* panel, int64_t chunks, float* sums, Pass pass) {
  for_parts(weight.num_groups(), kPartBlocks * (kBlock / kGroup), [&](int64_t group, int64_t num_groups) {
    const int64_t end = group + num_groups;
    const int64_t num_bytes = num_groups * kGroupBytes, turns = num_turns(num_rows, num_groups * kGroupSteps);
    Ahead ahead = end == weight.num_groups() ? pass.next_panel(num_bytes, turns)
                                             : pass.next_part(panel + end * kGroupBytes, num_bytes, turns);
    for_tiles(0, num_rows, [&](int64_t row, int64_t rows) {
      int64_t at[kTileRows];
      for (int64_t r = 0; r < rows; ++r) at[r] = x.index ? x.index[first + row + r] : first + row + r;
      with_rows(rows, [&](auto count) {
        for_chunks<count>(chunks, [&](int64_t chunk, auto groups) {
          int4_tile<count, groups>(x, at, panel, chunk, group, end, sums + row * kPanelColumns + 16 * chunk, ahead);
        });
      });
    });
  });
}

inline void multiply_strip(const ByteRows& x, int64_t first, int64_t num_rows, const Weight& weight,
                           const uint8_t* panel, int64_t chunks, float* sums, Pass pass = {}) {
  if (weight.kind == WeightKind::kInt4) {
    return multiply_strip_in_groups(x, first, num_rows, weight, panel, chunks, sums, pass);
  }
  const BytePanel parts(panel, weight.num_blocks());
#ifdef BATCHINFER_TILES
  const int64_t num_blocks = x.num_blocks, width = num_blocks * kBlock;
  multiply_strip_in_tiles(TileRows::apart(x.data + first * width, width, num_rows), x.scales + first * num_blocks, parts,
                          chunks, num_blocks, sums, next_byte_panel(weight, num_rows, chunks, pass));
#else
  for_parts(weight.num_blocks(), kPartBlocks, [&](int64_t block, int64_t num_blocks) {
    const int64_t end = block + num_blocks, num_bytes = num_blocks * kBlock * kPanelColumns;
    const int64_t turns = num_turns(num_rows, num_blocks * (kBlock / 4));
    Ahead ahead = end == weight.num_blocks()
                      ? pass.next_panel(num_bytes, turns)
                      : pass.next_part(parts.values + end * kBlock * kPanelColumns, num_bytes, turns);
    for_tiles(0, num_rows, [&](int64_t row, int64_t rows) {
      const uint8_t* at[kTileRows];
      const float* scales[kTileRows];
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t from = x.index ? x.index[first + row + r] : first + row + r;
        at[r] = x.data + from * x.num_blocks * kBlock;
        scales[r] = x.scales + from * x.num_blocks;
      }
      with_rows(rows, [&](auto count) {
        for_chunks<count>(chunks, [&](int64_t chunk, auto groups) {
          int8_tile<count, groups>(at, scales, parts, chunk, block, end, sums + row * kPanelColumns + 16 * chunk, ahead);
        });
      });
    });
  });
#endif
}

// The strip that begins at `row`, of rows begin … end - 1.
inline Pass pass_of(int64_t begin, int64_t end, int64_t row, const void* next) {
  return {(row - begin) / kStripRows, (end - begin + kStripRows - 1) / kStripRows, next};
}

// Threads take tasks in turn, so the thread of `task` mostly takes this one next; there may be no task of that number.
inline int64_t task_after(int64_t task) { return task + num_threads(); }

// How a product is cut into tasks; the cut decides who computes a result, never its bits.
struct Cut {
  int64_t block_rows, block_panels;
  int64_t fair_panels;  // as many as leave tasks enough for all threads

  // Rows of x that stay in the second-level cache while panels pass (`room` bytes), panels of 64 KiB or more, and tasks
  // enough for all threads.
  static Cut of(int64_t num_rows, int64_t num_panels, int64_t panel_bytes, int64_t row_bytes, int64_t room) {
    const int64_t fitting = std::max<int64_t>(kTileRows, room / std::max<int64_t>(1, row_bytes));
    const int64_t wanted = 4 * num_threads();
    int64_t num_blocks = std::max<int64_t>(1, (num_rows + fitting - 1) / fitting);
    while (num_blocks * num_panels < wanted && num_rows / num_blocks >= 4 * kTileRows) ++num_blocks;
    const int64_t rows = (num_rows + num_blocks - 1) / num_blocks;
    const int64_t fair = std::max<int64_t>(1, num_panels * num_blocks / wanted);
    const int64_t panels = std::max<int64_t>(1, (int64_t{64} << 10) / std::max<int64_t>(1, panel_bytes));
    constexpr int64_t kTogether = kHasTiles ? 32 : kTileRows;  // pass a panel as fast as fewer
    return {(rows + kTogether - 1) / kTogether * kTogether, std::min(panels, fair), fair};
  }
};

}  // namespace batchinfer
