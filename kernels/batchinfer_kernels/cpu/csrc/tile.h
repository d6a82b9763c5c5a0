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
//
// The loops over a panel are in strips.cpp and byte_strips.cpp, compiled once for all products.

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
constexpr int64_t kStripRows = 96;       // rows that pass a panel together
constexpr int64_t kTilePartBytes = 384;  // of a row, that rows in tiles pass at a time
constexpr int64_t kGroupBytes = kGroup * kPanelColumns / 2 + kPanelColumns * int64_t{sizeof(bf16)};  // of a panel in 4 bits

constexpr bool kTurnsWithin = kTurnSteps < kGroup / 4;  // of the loops over a block or a group

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

// What comes next, asked for at each of num_steps steps with N groups of columns, where turns within a loop would take registers
// from its sums: a thread waits where it asks for much at once.
template <int N>
class FetchEach {
 public:
  FetchEach(Ahead& ahead, int64_t num_steps, const void* there) {
    if constexpr (!kTurnsWithin) steps_ = ahead.steps(num_steps, kTurnSteps, there);
  }

  void operator()() {
    if constexpr (!kTurnsWithin) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) fetch(steps_.at + 64 * n);
      steps_.at += steps_.bytes;
    }
  }

 private:
  Ahead::Steps steps_ = {};
};

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
// The same where the distance is a constant, which takes no register.
template <class Row, int64_t kStride>
struct RowsBeside {
  const Row* row;

  const Row* next() {
    const Row* const own = row;
    row += kStride;
    return own;
  }
};

// sums[r][n] += values of row r times the n-th 16 columns at `columns`, over all steps; a row goes on by `row_stride`
// values a step, the columns by `stride`. Each step begins with a call of `begin`.
template <class Step, int R, int N, class RowsOf, class Begin>
inline __attribute__((always_inline)) void add_products(Floats (&sums)[R][N], RowsOf rows, int64_t row_stride,
                                                        const typename Step::Column* columns_at, int64_t stride,
                                                        int64_t num_steps, Begin begin) {
  for (int64_t step = 0; step < num_steps; ++step, columns_at += stride) {
    begin();
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

template <class Step, int R, int N, class RowsOf>
inline __attribute__((always_inline)) void add_products(Floats (&sums)[R][N], RowsOf rows, int64_t row_stride,
                                                        const typename Step::Column* columns_at, int64_t stride,
                                                        int64_t num_steps) {
  add_products<Step, R, N>(sums, rows, row_stride, columns_at, stride, num_steps, [] {});
}

// How often it is the turn of what comes next while rows are multiplied, roughly: they pass all columns, or some after others.
inline int64_t num_turns(int64_t num_rows, int64_t num_steps) {
  const int64_t most = std::min(num_rows, kTileRows), passes = kChunks / chunks_beside(static_cast<int>(most));
  return (num_rows + kTileRows - 1) / kTileRows * passes * ((num_steps + kTurnSteps - 1) / kTurnSteps);
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

// sums [num_rows, 64] = (or, unless it is the first part of a sum, +=) products of up to kTileRows rows over num_steps steps
// with the first `chunks` groups of a panel's columns; in strips.cpp.
template <class Step>
void multiply_tile(const typename Step::Row* const* rows, int64_t num_rows, const typename Step::Column* panel,
                   int64_t num_steps, int64_t chunks, float* sums, bool is_first, Ahead& ahead);

// Calls call(start, num_values) for parts of `depth`, all but the last of `most` values; once if it is 0.
template <class Call>
inline void for_parts(int64_t depth, int64_t most, Call call) {
  for (int64_t start = 0; start < depth || start == 0; start += most) call(start, std::min(most, depth - start));
}

// `count` values in float32.
inline void widen(const bf16* values, int64_t count, float* out) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + 16 <= count; i += 16) store(out + i, load_wide(lanes(16), values + i));
  if (i < count) store(out + i, lanes(count - i), load_wide(lanes(count - i), values + i));
}

// sums [num_rows, 64] of rows first … first + num_rows - 1 (at most kStripRows) with the first `chunks` groups of a panel's
// columns, for a weight of any kind that these rows meet; in strips.cpp and byte_strips.cpp. Rows that meet in tiles have no
// index (tiled_rows.h).
void multiply_strip(const Rows<float>& x, int64_t first, int64_t num_rows, const Weight& weight, const uint8_t* panel,
                    int64_t chunks, float* sums, Pass pass = {});
void multiply_strip(const Rows<bf16>& x, int64_t first, int64_t num_rows, const Weight& weight, const uint8_t* panel,
                    int64_t chunks, float* sums, Pass pass = {});
void multiply_strip(const ByteRows& x, int64_t first, int64_t num_rows, const Weight& weight, const uint8_t* panel,
                    int64_t chunks, float* sums, Pass pass = {});

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
