// Multiplies rows in 8 bits by a panel of a weight in 8 or 4 bits (tile.h). Compiled once, for all other units.

#include <algorithm>

#include "tile.h"
#include "tiled_rows.h"
#include "words.h"

namespace batchinfer {
namespace {

constexpr int64_t kPartBlocks = 4;    // of a panel in 8 or 4 bits that rows pass at a time
constexpr int64_t kTilePartBlocks = 2;  // the same for rows in tiles, which finish two blocks at once
constexpr int64_t kGroupSteps = kGroup / 4;

// Where a panel in 8 bits has its parts (pack.cpp).
struct BytePanel {
  const int8_t* values;
  const int32_t* starts;
  const bf16* scales;

  BytePanel(const uint8_t* panel, int64_t num_blocks)
      : values(reinterpret_cast<const int8_t*>(panel)),
        starts(reinterpret_cast<const int32_t*>(panel + num_blocks * kBlock * kPanelColumns)),
        scales(reinterpret_cast<const bf16*>(starts + num_blocks * kPanelColumns)) {}
};

// sums [R][64] of N groups of 16 columns += (or, unless it is the weight's first block, =) exact sums, times their scales.
template <int R, int N>
inline __attribute__((always_inline)) void add_block(const Ints (&exact)[R][N], const float* const* x_scales, int64_t block,
                                                     const bf16* scales, float* out) {
  Floats column_scales[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) column_scales[n] = low_values(load_bits(scales + block * kPanelColumns + 16 * n));
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Floats x_scale = floats(x_scales[r][block]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* const at = out + r * kPanelColumns + 16 * n;
      store(at, multiply_add(as_floats(exact[r][n]), x_scale * column_scales[n], block ? load(at) : floats(0.0f)));
    }
  }
}

// What moving a block's values up by 128 added is taken off at the start.
template <int R, int N>
inline __attribute__((always_inline)) void start_block(const int32_t* starts, Ints (&exact)[R][N]) {
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const Ints start = load_ints(starts + 16 * n);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) exact[r][n] = start;
  }
}

#ifndef BATCHINFER_PARTS_AS_WORDS
// Blocks [first, end) of N groups of 16 columns from `first_chunk` on; `out` has them from there, too.
template <int R, int N>
__attribute__((noinline)) void int8_tile(const uint8_t* const* x, const float* const* x_scales, const BytePanel& panel,
                                         int64_t first_chunk, int64_t first, int64_t end, float* out, Ahead& ahead) {
  const int8_t* values = panel.values + first * kBlock * kPanelColumns + 64 * first_chunk;
  const int32_t* starts = panel.starts + 16 * first_chunk;
  const bf16* scales = panel.scales + 16 * first_chunk;
  const int32_t* fours[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) fours[r] = reinterpret_cast<const int32_t*>(x[r]);
  for (int64_t block = first; block < end; ++block) {
    Ints sums[R][N];
    start_block<R, N>(starts + block * kPanelColumns, sums);
    FetchEach<N> fetch_next(ahead, kBlock / 4, values);
#pragma GCC unroll 1
    for (int64_t step = 0; step < kBlock / 4; ++step, values += 4 * kPanelColumns) {
      if (kTurnsWithin && step % kTurnSteps == 0) ahead.turn();
      fetch_next();
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
    add_block<R, N>(sums, x_scales, block, scales, out);
  }
}
#else
// One block of rows as words and of N groups of 16 columns.
template <class Columns, int R, int N>
__attribute__((noinline)) void word_tile(const int32_t* words, const float* const* x_scales, Columns columns,
                                         const int32_t* starts, const bf16* scales, int64_t block, float* out, Ahead& ahead) {
  Ints sums[R][N];
  start_block<R, N>(starts, sums);
  add_words<Columns, R, N>(sums, words, columns, kBlock / 4, ahead);
  add_block<R, N>(sums, x_scales, block, scales, out);
}

inline void multiply_strip_in_words(const ByteRows& x, int64_t first, int64_t num_rows, const Weight& weight,
                                    const BytePanel& panel, int64_t chunks, float* sums, Pass pass) {
  constexpr int64_t kBytes = kBlock * kPanelColumns;
  const int64_t turns = num_turns(num_rows, kBlock / 4);
  const float* scales[kStripRows];
  const uint8_t* bytes[kStripRows];
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t from = (x.index ? x.index[first + row] : first + row) * x.num_blocks;
    scales[row] = x.scales + from;
    bytes[row] = x.data + from * kBlock;
  }
  for (int64_t block = 0; block < weight.num_blocks(); ++block) {
    const int8_t* const values = panel.values + block * kBytes;
    Ahead ahead = block + 1 == weight.num_blocks() ? pass.next_panel(kBytes, turns)
                                                   : pass.next_part(values + kBytes, kBytes, turns);
    for_word_tiles(num_rows, [&](int64_t row) { return bytes[row] + block * kBlock; }, values, kBlock / 4, chunks,
                   [&](int64_t row, auto rows, const int32_t* words, auto columns, int64_t chunk, auto groups) {
                     word_tile<decltype(columns), rows, groups>(
                         words, scales + row, columns, panel.starts + block * kPanelColumns + 16 * chunk,
                         panel.scales + 16 * chunk, block, sums + row * kPanelColumns + 16 * chunk, ahead);
                   });
  }
}
#endif

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
    FetchEach<N> fetch_next(ahead, kGroupSteps, panel);
#pragma GCC unroll 8
    for (int64_t step = 0; step < kGroupSteps; ++step) {
      const uint8_t* const line = panel + step / 2 * kLine + 64 * first_chunk;
      if (kTurnsWithin && step % kTurnSteps == 0) ahead.turn();
      fetch_next();
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

#ifdef BATCHINFER_TILES
// sums [count, 64] = (or, unless the first block is the weight's, +=) exact sums of B blocks in N tiles of columns, times
// their scales.
template <int N, int B>
inline void add_scaled(const int32_t* exact, int64_t count, const float* x_scales, int64_t x_stride, const bf16* scales,
                       bool is_first, float* sums) {
  Floats column_scales[B][N];
#pragma GCC unroll 2
  for (int b = 0; b < B; ++b) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) column_scales[b][n] = low_values(load_bits(scales + b * kPanelColumns + 16 * n));
  }
  for (int64_t r = 0; r < count; ++r, exact += kScratchColumns, x_scales += x_stride, sums += kPanelColumns) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      Floats sum = is_first ? floats(0.0f) : load(sums + 16 * n);
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) {
        const Floats own = as_floats(load_ints(exact + b * kScratchValues + 16 * n));
        sum = multiply_add(own, floats(x_scales[b]) * column_scales[b][n], sum);
      }
      store(sums + 16 * n, sum);
    }
  }
}

// Sums of rows in 8 bits that have scales [num_rows, num_blocks].
inline void multiply_strip_in_tiles(TileRows rows, const float* x_scales, const BytePanel& panel, int64_t chunks,
                                    int64_t num_blocks, float* sums, Ahead next_panel) {
  const int64_t part_blocks = rows.count > 2 * kTileSide ? kTilePartBlocks : std::max<int64_t>(1, num_blocks);
  multiply_byte_tiles(rows, {panel.values, 4 * kPanelColumns}, chunks, kBlock / 4, num_blocks, part_blocks, next_panel,
                      [&](int64_t row, int64_t count, int64_t tile, int64_t number, int64_t block, int64_t both,
                          const int32_t* exact) {
                        const bf16* const scales = panel.scales + block * kPanelColumns + 16 * tile;
                        const float* const own = x_scales + row * num_blocks + block;
                        float* const at = sums + row * kPanelColumns + 16 * tile;
                        up_to_four(number, [&](auto tiles) {
                          both == 2 ? add_scaled<tiles, 2>(exact, count, own, num_blocks, scales, block == 0, at)
                                    : add_scaled<tiles, 1>(exact, count, own, num_blocks, scales, block == 0, at);
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

}  // namespace

void multiply_strip(const ByteRows& x, int64_t first, int64_t num_rows, const Weight& weight, const uint8_t* panel,
                    int64_t chunks, float* sums, Pass pass) {
  if (weight.kind == WeightKind::kInt4) {
    return multiply_strip_in_groups(x, first, num_rows, weight, panel, chunks, sums, pass);
  }
  const BytePanel parts(panel, weight.num_blocks());
#ifdef BATCHINFER_TILES
  const int64_t num_blocks = x.num_blocks, width = num_blocks * kBlock;
  multiply_strip_in_tiles(TileRows::apart(x.data + first * width, width, num_rows), x.scales + first * num_blocks, parts,
                          chunks, num_blocks, sums, next_byte_panel(weight, num_rows, chunks, pass));
#elif defined(BATCHINFER_PARTS_AS_WORDS)
  multiply_strip_in_words(x, first, num_rows, weight, parts, chunks, sums, pass);
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

#ifdef BATCHINFER_TILES
void multiply_strip(const TiledByteRows& x, int64_t first, int64_t num_rows, const Weight& weight, const uint8_t* panel,
                    int64_t chunks, float* sums, Pass pass) {
  const int64_t num_blocks = x.num_blocks;
  multiply_strip_in_tiles(x.rows.from(first, num_rows), x.scales + first * num_blocks, BytePanel(panel, num_blocks), chunks,
                          num_blocks, sums, next_byte_panel(weight, num_rows, chunks, pass));
}
#endif

}  // namespace batchinfer
