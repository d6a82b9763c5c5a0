// Products of up to 16 x 16 results at a time: the tile instructions of processors with AMX, and the same in plain C++.
//
//   tile     16 rows of 64 bytes: 16 words of 32 bits each
//   sums     a tile of 16 x 16 float32 (or int32), of some rows
//   rows     a tile of up to 16 rows of x, up to 16 words each: two bfloat16 or four 8-bit values side by side
//   columns  a tile of as many rows as `rows` has words, with one word for each of 16 columns: what a panel holds (pack.cpp)
//
// multiply_pairs adds to each sum (e + o), where e is the sum of the products of first values and o that of second ones,
// each begun at zero and added up by fused multiply-adds in the order of words, e + o and the sum rounded one by one:
// what the instruction tdpbf16ps does. A result depends on its own row and column alone. multiply_bytes is exact, of
// signed values.
//
// BATCHINFER_TILES_IN_PLAIN asks for the plain version, so that layouts, edges and results can be tested anywhere.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "lanes.h"

#if (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)) || defined(BATCHINFER_TILES_IN_PLAIN)
#define BATCHINFER_TILES 1
#endif

#ifdef BATCHINFER_TILES
namespace batchinfer {

constexpr bool kHasTiles = true;
constexpr int64_t kTileSide = 16;  // rows, and words of a row

// Tiles by number: sums of two tiles of rows with two tiles of columns, of one with four, or of four with one, where
// kColumns1 has rows.
enum TileNumber { kSums0, kSums1, kSums2, kSums3, kRows0, kRows1, kColumns0, kColumns1, kNumTiles };

// Rows of each tile, and words of a row. Tiles that are not used are whole, so that the three forms are one where all are.
struct TileShapes {
  uint8_t num_rows[kNumTiles], num_words[kNumTiles];

  bool operator==(const TileShapes&) const = default;

  static TileShapes whole() {
    TileShapes shapes;
    std::fill_n(shapes.num_rows, int{kNumTiles}, uint8_t{kTileSide});
    std::fill_n(shapes.num_words, int{kNumTiles}, uint8_t{kTileSide});
    return shapes;
  }
  static TileShapes two_by_two(int64_t rows1, int64_t num_words) {
    TileShapes shapes = whole();
    for (const int tile : {kSums2, kSums3, kRows1}) shapes.num_rows[tile] = rows1;
    shapes.set_words({kRows0, kRows1}, {kColumns0, kColumns1}, num_words);
    return shapes;
  }
  static TileShapes one_by_four(int64_t rows, int64_t num_words) {
    TileShapes shapes = whole();
    for (const int tile : {kSums0, kSums1, kSums2, kSums3, kRows0}) shapes.num_rows[tile] = rows;
    shapes.set_words({kRows0}, {kColumns0, kColumns1}, num_words);
    return shapes;
  }
  // The last of `count` tiles of rows has `last_rows`, the others are whole.
  static TileShapes four_by_one(int64_t count, int64_t last_rows, int64_t num_words) {
    TileShapes shapes = whole();
    shapes.num_rows[kSums0 + count - 1] = shapes.num_rows[kRows1] = last_rows;
    shapes.set_words({kRows0, kRows1, kColumns1}, {kColumns0}, num_words);
    return shapes;
  }

 private:
  void set_words(std::initializer_list<int> tiles_of_rows, std::initializer_list<int> tiles_of_columns, int64_t number) {
    for (const int tile : tiles_of_rows) num_words[tile] = number;
    for (const int tile : tiles_of_columns) num_rows[tile] = number;
  }
};

#ifdef BATCHINFER_TILES_IN_PLAIN

struct PlainTiles {
  uint32_t words[kNumTiles][kTileSide][kTileSide];
  TileShapes shapes;
};
inline PlainTiles& plain_tiles() {
  static thread_local PlainTiles tiles;
  return tiles;
}

// What stood in the tiles is lost.
inline void load_shapes(const TileShapes& shapes) {
  plain_tiles().shapes = shapes;
  std::memset(plain_tiles().words, 0xFF, sizeof(plain_tiles().words));
}
inline void release_shapes() {}

template <int Tile>
void clear_tile() {
  std::memset(plain_tiles().words[Tile], 0, sizeof(plain_tiles().words[Tile]));
}
template <int Tile>
void load_tile(const void* from, int64_t stride_bytes) {
  PlainTiles& tiles = plain_tiles();
  for (int64_t row = 0; row < tiles.shapes.num_rows[Tile]; ++row) {
    const char* const at = static_cast<const char*>(from) + row * stride_bytes;
    std::memcpy(tiles.words[Tile][row], at, 4 * tiles.shapes.num_words[Tile]);
  }
}
template <int Tile>
void store_tile(void* to, int64_t stride_bytes) {
  PlainTiles& tiles = plain_tiles();
  for (int64_t row = 0; row < tiles.shapes.num_rows[Tile]; ++row) {
    char* const at = static_cast<char*>(to) + row * stride_bytes;
    std::memcpy(at, tiles.words[Tile][row], 4 * tiles.shapes.num_words[Tile]);
  }
}

template <int Sums, int Rows, int Columns>
void multiply_pairs() {
  PlainTiles& tiles = plain_tiles();
  for (int64_t row = 0; row < tiles.shapes.num_rows[Sums]; ++row) {
    Floats even = floats(0.0f), odd = floats(0.0f);
    for (int64_t word = 0; word < tiles.shapes.num_words[Rows]; ++word) {
      const Ints x = ints(static_cast<int32_t>(tiles.words[Rows][row][word])), w = load_ints(tiles.words[Columns][word]);
      even = multiply_add(low_values(x), low_values(w), even);
      odd = multiply_add(high_values(x), high_values(w), odd);
    }
    float* const sums = reinterpret_cast<float*>(tiles.words[Sums][row]);
    store(sums, load(sums) + (even + odd));
  }
}
template <int Sums, int Rows, int Columns>
void multiply_bytes() {
  PlainTiles& tiles = plain_tiles();
  for (int64_t row = 0; row < tiles.shapes.num_rows[Sums]; ++row) {
    alignas(64) int32_t sums[kTileSide];
    std::memcpy(sums, tiles.words[Sums][row], sizeof(sums));
    for (int64_t word = 0; word < tiles.shapes.num_words[Rows]; ++word) {
      for (int64_t byte = 0; byte < 4; ++byte) {
        const int32_t x = reinterpret_cast<const int8_t*>(&tiles.words[Rows][row][word])[byte];
        const int8_t* const w = reinterpret_cast<const int8_t*>(tiles.words[Columns][word]) + byte;
        for (int64_t column = 0; column < kTileSide; ++column) sums[column] += x * w[4 * column];
      }
    }
    std::memcpy(tiles.words[Sums][row], sums, sizeof(sums));
  }
}

#else

struct alignas(64) TileConfiguration {  // as the instruction reads it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};

inline void load_shapes(const TileShapes& shapes) {
  TileConfiguration configuration;
  for (int tile = 0; tile < kNumTiles; ++tile) {
    configuration.num_rows[tile] = shapes.num_rows[tile];
    configuration.row_bytes[tile] = static_cast<uint16_t>(4 * shapes.num_words[tile]);
  }
  asm volatile("ldtilecfg %0" ::"m"(configuration));
}
inline void release_shapes() { asm volatile("tilerelease"); }

// Written as instructions: the intrinsics of some compilers take literal numbers of tiles only.
template <int Tile>
inline __attribute__((always_inline)) void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
template <int Tile>
inline __attribute__((always_inline)) void load_tile(const void* from, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(Tile) : "memory");
}
template <int Tile>
inline __attribute__((always_inline)) void store_tile(void* to, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(Tile) : "memory");
}
template <int Sums, int Rows, int Columns>
inline __attribute__((always_inline)) void multiply_pairs() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Columns));
}
template <int Sums, int Rows, int Columns>
inline __attribute__((always_inline)) void multiply_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Columns));
}

#endif

// The shapes of this thread's tiles while they are in use, and the number of users.
struct OwnTiles {
  TileShapes shapes;
  bool are_set;
  int num_users;
};
inline thread_local constinit OwnTiles own_tiles{};

// Skips shapes that are set already, since loading them takes as long as several products. Loading clears the tiles.
inline void configure_tiles(const TileShapes& shapes) {
  OwnTiles& own = own_tiles;
  if (own.are_set && own.shapes == shapes) return;
  load_shapes(shapes);
  own.shapes = shapes;
  own.are_set = own.num_users > 0;
}

// During its lifetime only products here use this thread's tiles.
class UsesTiles {
 public:
  UsesTiles() { ++own_tiles.num_users; }
  ~UsesTiles() {
    if (--own_tiles.num_users > 0 || !own_tiles.are_set) return;
    release_shapes();
    own_tiles.are_set = false;
  }
  UsesTiles(const UsesTiles&) = delete;
  UsesTiles& operator=(const UsesTiles&) = delete;
};

}  // namespace batchinfer
#else
namespace batchinfer {

constexpr bool kHasTiles = false;

struct UsesTiles {
  UsesTiles() {}  // not trivial, so that compilers do not warn of an unused variable
};

}  // namespace batchinfer
#endif
