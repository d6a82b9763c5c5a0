// Rows of a product in the order in which tiles read them (TileRows::in_tiles).
//
// A task whose rows meet many panels copies them first: read where they are, a tile's lines are a whole row apart, and rows
// of a power of two of values meet in the same few places of a cache. Rows that an index names are copied always. Without
// tiles nothing is copied.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "scratch.h"
#include "tile.h"

namespace batchinfer {

// Whether rows of a source and a weight are multiplied in tiles.
template <class Source>
inline bool meet_in_tiles(const Weight& weight) {
  if (!kHasTiles || !std::is_same_v<typename Source::Value, bf16>) return false;
  if (std::is_same_v<Source, ByteRows>) return weight.kind == WeightKind::kInt8;
  return weight.kind == WeightKind::kBfloat16 || weight.kind == WeightKind::kFp4;
}

// Panels of a task; more where it copies its rows first.
template <class Source>
inline int64_t panels_of_task(const Cut& cut, const Weight& weight) {
  constexpr int64_t kMost = 32;  // next to products with 32 panels the copy takes little time
  return meet_in_tiles<Source>(weight) ? std::min(cut.fair_panels, std::max(cut.block_panels, kMost)) : cut.block_panels;
}

#ifdef BATCHINFER_TILES
constexpr int64_t kCopyPanels = 6;  // for which a copy is worth it
constexpr int64_t kTileBytes = 4 * kTileSide * kTileSide;

// Copies `count` rows of `row_bytes` (a multiple of 4) each from at(row) to where in_tiles has them.
template <class At>
void copy_into_tiles(At at, int64_t count, int64_t row_bytes, void* tiles) {
  char* out = static_cast<char*>(tiles);
  const int64_t line = 4 * kTileSide, whole = row_bytes / line, left = row_bytes % line;
  for (int64_t first = 0; first < count; first += kTileSide) {
    const int64_t rows = std::min(kTileSide, count - first);
    const char* from[kTileSide];
    for (int64_t row = 0; row < rows; ++row) from[row] = reinterpret_cast<const char*>(at(first + row));
    for (int64_t i = 0; i < whole; ++i, out += kTileBytes) {
      for (int64_t row = 0; row < rows; ++row) std::memcpy(out + row * line, from[row] + i * line, line);
    }
    if (left == 0) continue;
    for (int64_t row = 0; row < rows; ++row) std::memcpy(out + row * line, from[row] + whole * line, left);
    out += kTileBytes;
  }
}

// In bfloat16, and in 8 bits with their scales.
struct TiledRows {
  TileRows rows;
};
struct TiledByteRows {
  TileRows rows;
  const float* scales;
  int64_t num_blocks;
};
void multiply_strip(const TiledRows& x, int64_t first, int64_t num_rows, const Weight& weight, const uint8_t* panel,
                    int64_t chunks, float* sums, Pass pass);
void multiply_strip(const TiledByteRows& x, int64_t first, int64_t num_rows, const Weight& weight, const uint8_t* panel,
                    int64_t chunks, float* sums, Pass pass);

// Rows that whole products (multiply_whole_pair_tiles) take: of bfloat16 and a depth of whole tiles.
template <class Source>
inline bool is_whole(const Weight& weight) {
  return (std::is_same_v<Source, TiledRows> || std::is_same_v<Source, Rows<bf16>>) && weight.kind == WeightKind::kBfloat16 &&
         weight.depth > 0 && weight.depth % (2 * kTileSide) == 0;
}
inline TileRows tile_rows(const Rows<bf16>& x, int64_t first, int64_t count) {
  return TileRows::apart(x.at(first), x.stride * int64_t{sizeof(bf16)}, count);
}
inline TileRows tile_rows(const TiledRows& x, int64_t first, int64_t count) { return x.rows.from(first, count); }

// All `count` rows from `first` on with a panel; `finish` as there.
template <class Source, class Finish>
inline void multiply_whole(const Source& x, int64_t first, int64_t count, const Weight& weight, const uint8_t* panel,
                           int64_t chunks, const void* next, Finish finish) {
  if constexpr (std::is_same_v<Source, TiledRows> || std::is_same_v<Source, Rows<bf16>>) {
    const int64_t num_words = weight.depth / 2;
    const Ahead ahead = Pass{0, 1, next}.next_panel(weight.panel_bytes(), num_tile_turns(count, chunks, num_words));
    multiply_whole_pair_tiles(tile_rows(x, first, count), {panel, 4 * kPanelColumns}, chunks, num_words, ahead, finish);
  }
}

// Rows begin … end - 1 in this thread's scratch memory.
inline TiledRows copied_into_tiles(const Rows<bf16>& x, int64_t begin, int64_t end, const Weight& weight) {
  static thread_local Scratch<bf16> values;
  const int64_t num_words = (weight.depth + 1) / 2, count = end - begin;
  const TileRows rows = TileRows::in_tiles(nullptr, num_words, count);
  values.grow((count + kTileSide - 1) / kTileSide * kTileSide * rows.row_bytes / int64_t{sizeof(bf16)});
  copy_into_tiles([&](int64_t row) { return x.at(begin + row); }, count, 4 * num_words, values.data());
  return {TileRows::in_tiles(values.data(), num_words, count)};
}
inline TiledByteRows copied_into_tiles(const ByteRows& x, int64_t begin, int64_t end, const Weight&) {
  static thread_local Scratch<uint8_t> values;
  static thread_local Scratch<float> scales;
  const int64_t width = x.num_blocks * kBlock, count = end - begin;
  values.grow((count + kTileSide - 1) / kTileSide * kTileSide * width);
  scales.grow(count * x.num_blocks);
  const auto number = [&](int64_t row) { return x.index ? x.index[begin + row] : begin + row; };
  copy_into_tiles([&](int64_t row) { return x.data + number(row) * width; }, count, width, values.data());
  for (int64_t row = 0; row < count; ++row) {
    std::copy_n(x.scales + number(row) * x.num_blocks, x.num_blocks, scales.data() + row * x.num_blocks);
  }
  return {TileRows::in_tiles(values.data(), width / 4, count), scales.data(), x.num_blocks};
}
#endif

// Bytes of a task's rows of x. Panels must pass faster for tiles, so more rows share one: processors with AMX have 2 MiB of
// second-level cache. Whole products leave more of it to panels and results. Products in 8 bits are quickest with fewer rows
// (256 KiB against 1 MiB: 9 % on a Granite Rapids, 27 November 2026).
template <class Source>
inline int64_t rows_room([[maybe_unused]] const Weight& weight) {
#ifdef BATCHINFER_TILES
  if (std::is_same_v<Source, ByteRows> && weight.kind == WeightKind::kInt8) return int64_t{256} << 10;
  return int64_t{is_whole<Source>(weight) ? 512 : 1024} << 10;
#else
  return int64_t{kTurnsWithin ? 384 : 256} << 10;
#endif
}

// Calls use(own, first) with rows begin … end - 1 of x for products with `num_panels` panels: row `begin` is row `first` of
// own, a copy in tiles where tiles multiply it and that pays or the rows are not side by side.
template <class Source, class Use>
inline void with_rows_for([[maybe_unused]] const Weight& weight, [[maybe_unused]] int64_t num_panels, const Source& x,
                          int64_t begin, [[maybe_unused]] int64_t end, Use use) {
#ifdef BATCHINFER_TILES
  if constexpr (std::is_same_v<typename Source::Value, bf16>) {
    const bool pays = num_panels >= kCopyPanels && end - begin > kTileSide;
    if (meet_in_tiles<Source>(weight) && (x.index || pays)) return use(copied_into_tiles(x, begin, end, weight), 0);
  }
#endif
  use(x, begin);
}

}  // namespace batchinfer
