// Multiplies rows in float32 and bfloat16 by a panel of a weight (tile.h). Compiled once, for all other units.

#include <algorithm>

#include "tile.h"
#include "tiled_rows.h"

namespace batchinfer {
namespace {

constexpr bool kGroupsApart = !kTurnsWithin;              // registers hold sums of few groups of columns
constexpr int64_t kWideValues = kGroupsApart ? 64 : 128;  // of a row and of a panel's columns that are widened at a time
constexpr int64_t kWidenPanel = 48;                       // rows for which it is worth it to widen a panel in memory

// Up to kWideValues values of rows and columns, both in float32 already. Of each pair of values the second ones of all columns
// stand before the first ones; with kGroupsApart each group of 16 columns has its own array of that order.
struct WidePanel {
  static constexpr int kParts = 2;
  using Row = float;
  using Column = float;
  static constexpr int64_t kValues = 2, kFirst = kGroupsApart ? 16 : kPanelColumns, kStep = 2 * kFirst;
  static constexpr int64_t kLane = kGroupsApart ? 16 * kWideValues : 16;

  static Floats columns(const float* at, int part) { return load(at + (part == 0 ? 0 : kFirst)); }
  static Floats row(const float* at, int part) { return floats(at[part == 0 ? 1 : 0]); }
};

// Values of a panel from a step to the next one.
template <class Step>
constexpr int64_t kPanelStep = Step::kValues * kPanelColumns;
template <>
constexpr int64_t kPanelStep<WidePanel> = WidePanel::kStep;

// out [R][64] of the first N groups of 16 columns; the others are left as they are.
template <class Step, int R, int N, class RowsOf>
__attribute__((noinline)) void tile(RowsOf x, const typename Step::Column* panel, int64_t num_steps, float* out,
                                    bool is_first, Ahead& ahead) {
  Floats sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = is_first ? floats(0.0f) : load(out + r * kPanelColumns + 16 * n);
  }
  constexpr int64_t kStep = kPanelStep<Step>;
  if constexpr (kTurnsWithin) {
    const typename Step::Row* rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = x.next();
    for (int64_t step = 0; step < num_steps; step += kTurnSteps, panel += kTurnSteps * kStep) {
      ahead.turn();
      add_products<Step, R, N>(sums, RowList{rows}, Step::kValues, panel, kStep, std::min(kTurnSteps, num_steps - step));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) rows[r] += kTurnSteps * Step::kValues;
    }
  } else {
    add_products<Step, R, N>(sums, x, Step::kValues, panel, kStep, num_steps, FetchEach<N>(ahead, num_steps, panel));
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(out + r * kPanelColumns + 16 * n, sums[r][n]);
  }
}

// sums [num_rows, 64] as multiply_tile has them; rows in any of the ways of tile.h.
template <class Step, class RowsOf>
inline void multiply_tile_of(RowsOf rows, int64_t num_rows, const typename Step::Column* panel, int64_t num_steps,
                             int64_t chunks, float* sums, bool is_first, Ahead& ahead) {
  with_rows(num_rows, [&](auto count) {
    for_chunks<count>(chunks, [&](int64_t chunk, auto groups) {
      tile<Step, count, groups>(rows, panel + Step::kLane * chunk, num_steps, sums + 16 * chunk, is_first, ahead);
    });
  });
}

}  // namespace

template <class Step>
void multiply_tile(const typename Step::Row* const* rows, int64_t num_rows, const typename Step::Column* panel,
                   int64_t num_steps, int64_t chunks, float* sums, bool is_first, Ahead& ahead) {
  multiply_tile_of<Step>(RowList{rows}, num_rows, panel, num_steps, chunks, sums, is_first, ahead);
}

namespace {

// sums [num_rows, 64] = (or, unless it is the first part of a sum, +=) products of rows over num_steps steps with the first
// `chunks` groups of a panel's columns; at(row) is where a row begins.
template <class Step, class RowAt>
inline void multiply_rows(RowAt at, int64_t num_rows, const typename Step::Column* panel, int64_t num_steps,
                          int64_t chunks, float* sums, bool is_first, Ahead ahead) {
  for_tiles(0, num_rows, [&](int64_t row, int64_t rows) {
    const typename Step::Row* rows_at[kTileRows];
    for (int64_t r = 0; r < rows; ++r) rows_at[r] = at(row + r);
    multiply_tile<Step>(rows_at, rows, panel, num_steps, chunks, sums + row * kPanelColumns, is_first, ahead);
  });
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
    const auto at = [&](int64_t row) { return x.at(first + row) + start; };
    const typename Step::Column* const part = panel + start * kPanelColumns;
    multiply_rows<Step>(at, num_rows, part, num_steps, chunks, sums, start == 0,
                        next_part<Step>(part, num_rows, num_steps, start + num_values == depth, pass));
  });
}

// Pairs of values of a panel's columns, as WidePanel takes them.
inline void widen_panel(const bf16* panel, int64_t num_steps, int64_t chunks, float* out) {
  for (int64_t step = 0; step < num_steps; ++step, panel += 2 * kPanelColumns, out += WidePanel::kStep) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const Ints pairs = load_ints(panel + 32 * chunk);
      store(out + WidePanel::kLane * chunk, high_values(pairs));
      store(out + WidePanel::kLane * chunk + WidePanel::kFirst, low_values(pairs));
    }
  }
}

// The same as multiply_rows for up to kMost values from `start` on of rows in bfloat16, which are widened a tile at a time. The
// next tile's values are asked for before.
template <class Step, int64_t kMost>
inline void multiply_rows_widened(const Rows<bf16>& x, int64_t first, int64_t start, int64_t num_rows,
                                  const typename Step::Column* panel, int64_t num_steps, int64_t chunks, float* sums,
                                  bool is_first, Ahead ahead) {
  alignas(64) float wide[kTileRows * kMost];
  for_tiles(0, num_rows, [&](int64_t row, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) widen(x.at(first + row + r) + start, 2 * num_steps, wide + r * kMost);
    for (int64_t r = row + rows; r < std::min(row + rows + kTileRows, num_rows); ++r) {
      const bf16* const next = x.at(first + r) + start;
      for (int64_t value = 0; value < 2 * num_steps; value += 32) fetch_near(next + value);
    }
    multiply_tile_of<Step>(RowsBeside<float, kMost>{wide}, rows, panel, num_steps, chunks, sums + row * kPanelColumns,
                           is_first, ahead);
  });
}

// The same bits as by the instruction for pairs, in float32: the rows of a tile are widened before they are multiplied, and
// so is the panel where many rows pass it.
inline void multiply_strip_widened(const Rows<bf16>& x, int64_t first, int64_t num_rows, int64_t depth,
                                   const bf16* panel, int64_t chunks, float* sums, Pass pass) {
  alignas(64) float columns[kWideValues * kPanelColumns];
  for_parts(depth, kWideValues, [&](int64_t start, int64_t num_values) {
    const int64_t num_steps = (num_values + 1) / 2;
    const bf16* const part = panel + start * kPanelColumns;
    const Ahead ahead = next_part<WidePair<1>>(part, num_rows, num_steps, start + num_values == depth, pass);
    if (num_rows >= kWidenPanel) {
      widen_panel(part, num_steps, chunks, columns);
      multiply_rows_widened<WidePanel, kWideValues>(x, first, start, num_rows, columns, num_steps, chunks, sums, start == 0,
                                                    ahead);
    } else {
      multiply_rows_widened<WidePair<1>, kWideValues>(x, first, start, num_rows, part, num_steps, chunks, sums, start == 0,
                                                      ahead);
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
                    const auto at = [&](int64_t row) { return x.at(first + row) + start; };
                    return multiply_rows<Pair>(at, num_rows, part, num_steps, chunks, sums, start == 0, ahead);
                  }
#endif
                  multiply_rows_widened<WidePair<1>, kFp4Values>(x, first, start, num_rows, part, num_steps, chunks, sums,
                                                                 start == 0, ahead);
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

}  // namespace

void multiply_strip(const Rows<float>& x, int64_t first, int64_t num_rows, const Weight& weight, const uint8_t* panel,
                    int64_t chunks, float* sums, Pass pass) {
  multiply_strip_by<Single<float>>(x, first, num_rows, weight.depth, reinterpret_cast<const float*>(panel), chunks, sums, pass);
}

void multiply_strip(const Rows<bf16>& x, int64_t first, int64_t num_rows, const Weight& weight, const uint8_t* panel,
                    int64_t chunks, float* sums, Pass pass) {
  const int64_t depth = weight.depth;
  if (weight.kind == WeightKind::kBfloat16) {
    const bf16* values = reinterpret_cast<const bf16*>(panel);
#ifdef BATCHINFER_TILES
    return multiply_strip_in_tiles(tile_rows(x, first, num_rows), depth, values, chunks, sums, pass);
#else
#ifdef BATCHINFER_PAIR_PRODUCTS
    if (pairs_are_quick()) return multiply_strip_by<Pair>(x, first, num_rows, depth, values, chunks, sums, pass);
#endif
    return multiply_strip_widened(x, first, num_rows, depth, values, chunks, sums, pass);
#endif
  }
  if (weight.kind == WeightKind::kFp4) {
#ifdef BATCHINFER_TILES
    return multiply_strip_fp4(tile_rows(x, first, num_rows), weight, panel, chunks, sums, pass);
#else
    return multiply_strip_fp4(x, first, num_rows, weight, panel, chunks, sums, pass);
#endif
  }
  multiply_strip_by<Single<bf16>>(x, first, num_rows, depth, reinterpret_cast<const float*>(panel), chunks, sums, pass);
}

#ifdef BATCHINFER_TILES
void multiply_strip(const TiledRows& x, int64_t first, int64_t num_rows, const Weight& weight, const uint8_t* panel,
                    int64_t chunks, float* sums, Pass pass) {
  const TileRows rows = x.rows.from(first, num_rows);
  if (weight.kind == WeightKind::kFp4) return multiply_strip_fp4(rows, weight, panel, chunks, sums, pass);
  multiply_strip_in_tiles(rows, weight.depth, reinterpret_cast<const bf16*>(panel), chunks, sums, pass);
}
#endif

// Called from attention.cpp, too.
#ifdef BATCHINFER_PAIR_PRODUCTS
template void multiply_tile<Pair>(const bf16* const*, int64_t, const bf16*, int64_t, int64_t, float*, bool, Ahead&);
#endif
template void multiply_tile<WidePair<1>>(const float* const*, int64_t, const bf16*, int64_t, int64_t, float*, bool, Ahead&);
template void multiply_tile<Single<float>>(const float* const*, int64_t, const float*, int64_t, int64_t, float*, bool,
                                           Ahead&);

}  // namespace batchinfer
