// Products of rows with a panel of columns in tiles of 16 x 16 results (amx_tiles.h).
//
// Two tiles of rows meet two tiles of columns, so that each tile that is loaded is multiplied twice; up to 16 rows meet
// four tiles of columns, and four tiles of rows meet a tile of columns that is alone. Depth goes in steps of 16 words from
// the start on; the rest is one more step with narrower tiles, so nothing behind a row or panel is read. The number of rows
// changes no bit.

#pragma once

#include <algorithm>
#include <type_traits>

#include "ahead.h"
#include "amx_tiles.h"

#ifdef BATCHINFER_TILES
namespace batchinfer {

// Rows of words. A tile that begins with word w of row r, both multiples of 16, is at data + r * row_bytes + w * word_bytes,
// and its next row stride_bytes behind.
struct TileRows {
  const void* data;
  int64_t row_bytes, word_bytes, stride_bytes, count;

  // Each row's words side by side.
  static TileRows apart(const void* data, int64_t stride_bytes, int64_t count) {
    return {data, stride_bytes, 4, stride_bytes, count};
  }
  // Tile behind tile, those of the same rows first: lines that are read together are side by side, so that they do not meet
  // in the same few places of a cache.
  static TileRows in_tiles(const void* data, int64_t num_words, int64_t count) {
    return {data, (num_words + kTileSide - 1) / kTileSide * kTileSide * 4, 4 * kTileSide, 4 * kTileSide, count};
  }

  const char* at(int64_t row, int64_t word) const {
    return static_cast<const char*>(data) + row * row_bytes + word * word_bytes;
  }
  TileRows from(int64_t row, int64_t number) const { return {at(row, 0), row_bytes, word_bytes, stride_bytes, number}; }
  TileRows behind(int64_t words) const { return {at(0, words), row_bytes, word_bytes, stride_bytes, count}; }
};

// Words of columns: word w of column c is at data + w * stride_bytes + 4 * c.
struct TileColumns {
  const void* data;
  int64_t stride_bytes;

  const char* at(int64_t word, int64_t column) const {
    return static_cast<const char*>(data) + word * stride_bytes + 4 * column;
  }
};

// Sums of pairs begin at zero, or at the result's old values.
struct PairProduct {
  bool begins_at_zero;

  template <int Sums>
  void open(const float* at, int64_t stride_bytes) const {
    begins_at_zero ? clear_tile<Sums>() : load_tile<Sums>(at, stride_bytes);
  }
  template <int Sums, int Rows, int Columns>
  static void multiply() {
    multiply_pairs<Sums, Rows, Columns>();
  }
};

// Sums of signed 8-bit values begin at zero.
struct ByteProduct {
  template <int Sums>
  void open(const int32_t*, int64_t) const {
    clear_tile<Sums>();
  }
  template <int Sums, int Rows, int Columns>
  static void multiply() {
    multiply_bytes<Sums, Rows, Columns>();
  }
};

// Words [word, word + num_steps * step_words) of rows row … row + 31, as many as there are, with two tiles of columns from
// `column` on; `out` is where the sums of that row and column go.
template <class Product, class Sum, class Turns>
inline void multiply_two_by_two(const Product& product, TileRows rows, int64_t row, TileColumns columns, int64_t column,
                                int64_t word, int64_t step_words, int64_t num_steps, Sum* out, int64_t out_stride,
                                Turns& turns) {
  const int64_t bytes = out_stride * int64_t{sizeof(Sum)};
  Sum* const low = out;
  Sum* const high = low + kTileSide * out_stride;
  product.template open<kSums0>(low, bytes);
  product.template open<kSums1>(low + kTileSide, bytes);
  product.template open<kSums2>(high, bytes);
  product.template open<kSums3>(high + kTileSide, bytes);
  for (int64_t step = 0; step < num_steps; ++step, word += step_words) {
    turns.turn();
    load_tile<kColumns0>(columns.at(word, column), columns.stride_bytes);
    load_tile<kRows0>(rows.at(row, word), rows.stride_bytes);
    Product::template multiply<kSums0, kRows0, kColumns0>();
    load_tile<kColumns1>(columns.at(word, column + kTileSide), columns.stride_bytes);
    Product::template multiply<kSums1, kRows0, kColumns1>();
    load_tile<kRows1>(rows.at(row + kTileSide, word), rows.stride_bytes);
    Product::template multiply<kSums2, kRows1, kColumns0>();
    Product::template multiply<kSums3, kRows1, kColumns1>();
  }
  store_tile<kSums0>(low, bytes);
  store_tile<kSums1>(low + kTileSide, bytes);
  store_tile<kSums2>(high, bytes);
  store_tile<kSums3>(high + kTileSide, bytes);
}

// The same for N tiles of rows with one tile of columns.
template <int N, class Product, class Sum, class Turns>
inline void multiply_column_by(const Product& product, TileRows rows, int64_t row, TileColumns columns, int64_t column,
                               int64_t word, int64_t step_words, int64_t num_steps, Sum* out, int64_t out_stride,
                               Turns& turns) {
  const int64_t bytes = out_stride * int64_t{sizeof(Sum)}, tile_values = kTileSide * out_stride;
  Sum* const at = out;
  product.template open<kSums0>(at, bytes);
  if constexpr (N > 1) product.template open<kSums1>(at + tile_values, bytes);
  if constexpr (N > 2) product.template open<kSums2>(at + 2 * tile_values, bytes);
  if constexpr (N > 3) product.template open<kSums3>(at + 3 * tile_values, bytes);
  const auto multiply = [&]<int Sums, int Rows>() {
    load_tile<Rows>(rows.at(row + Sums * kTileSide, word), rows.stride_bytes);
    Product::template multiply<Sums, Rows, kColumns0>();
  };
  // the last tile of rows may have fewer, and is in kRows1
  for (int64_t step = 0; step < num_steps; ++step, word += step_words) {
    turns.turn();
    load_tile<kColumns0>(columns.at(word, column), columns.stride_bytes);
    if constexpr (N > 1) multiply.template operator()<kSums0, kRows0>();
    if constexpr (N > 2) multiply.template operator()<kSums1, kColumns1>();
    if constexpr (N > 3) multiply.template operator()<kSums2, kRows0>();
    multiply.template operator()<kSums0 + N - 1, kRows1>();
  }
  store_tile<kSums0>(at, bytes);
  if constexpr (N > 1) store_tile<kSums1>(at + tile_values, bytes);
  if constexpr (N > 2) store_tile<kSums2>(at + 2 * tile_values, bytes);
  if constexpr (N > 3) store_tile<kSums3>(at + 3 * tile_values, bytes);
}

// The same for up to 16 rows with up to four tiles of columns.
template <int N, class Product, class Sum, class Turns>
inline void multiply_one_by(const Product& product, TileRows rows, int64_t row, TileColumns columns, int64_t column,
                            int64_t word, int64_t step_words, int64_t num_steps, Sum* out, int64_t out_stride,
                            Turns& turns) {
  const int64_t bytes = out_stride * int64_t{sizeof(Sum)};
  Sum* const at = out;
  product.template open<kSums0>(at, bytes);
  if constexpr (N > 1) product.template open<kSums1>(at + kTileSide, bytes);
  if constexpr (N > 2) product.template open<kSums2>(at + 2 * kTileSide, bytes);
  if constexpr (N > 3) product.template open<kSums3>(at + 3 * kTileSide, bytes);
  for (int64_t step = 0; step < num_steps; ++step, word += step_words) {
    turns.turn();
    load_tile<kRows0>(rows.at(row, word), rows.stride_bytes);
    load_tile<kColumns0>(columns.at(word, column), columns.stride_bytes);
    Product::template multiply<kSums0, kRows0, kColumns0>();
    if constexpr (N > 1) {
      load_tile<kColumns1>(columns.at(word, column + kTileSide), columns.stride_bytes);
      Product::template multiply<kSums1, kRows0, kColumns1>();
    }
    if constexpr (N > 2) {
      load_tile<kColumns0>(columns.at(word, column + 2 * kTileSide), columns.stride_bytes);
      Product::template multiply<kSums2, kRows0, kColumns0>();
    }
    if constexpr (N > 3) {
      load_tile<kColumns1>(columns.at(word, column + 3 * kTileSide), columns.stride_bytes);
      Product::template multiply<kSums3, kRows0, kColumns1>();
    }
  }
  store_tile<kSums0>(at, bytes);
  if constexpr (N > 1) store_tile<kSums1>(at + kTileSide, bytes);
  if constexpr (N > 2) store_tile<kSums2>(at + 2 * kTileSide, bytes);
  if constexpr (N > 3) store_tile<kSums3>(at + 3 * kTileSide, bytes);
}

// Calls call(number) with a constant of 1 … 4, the last for all that is more.
template <class Call>
void up_to_four(int64_t number, Call call) {
  switch (number) {
    case 1: return call(std::integral_constant<int, 1>{});
    case 2: return call(std::integral_constant<int, 2>{});
    case 3: return call(std::integral_constant<int, 3>{});
    default: return call(std::integral_constant<int, 4>{});
  }
}

// Calls two(row, tile), one(row, tile, number) or column(row, tile, number) for parts that cover all rows and tiles of
// columns, with the tiles' shapes set: 17 to 32 rows and two tiles of columns; up to 16 rows and `number` of them, up to
// four; or `number` tiles of rows, up to four, and one of columns. The number is a constant.
template <class Two, class One, class Column>
void for_tiles(int64_t num_rows, int64_t num_tiles, int64_t step_words, Two two, One one, Column column) {
  const int64_t paired_tiles = num_tiles / 2 * 2;
  for (int64_t row = 0; row < num_rows; row += 2 * kTileSide) {
    const int64_t rows = std::min(2 * kTileSide, num_rows - row);
    if (rows > kTileSide && paired_tiles > 0) {
      configure_tiles(TileShapes::two_by_two(rows - kTileSide, step_words));
      for (int64_t tile = 0; tile < paired_tiles; tile += 2) two(row, tile);
    } else if (rows <= kTileSide && paired_tiles > 0) {
      configure_tiles(TileShapes::one_by_four(rows, step_words));
      for (int64_t tile = 0; tile < num_tiles; tile += 4) {
        up_to_four(num_tiles - tile, [&](auto number) { one(row, tile, number); });
      }
    }
  }
  if (paired_tiles == num_tiles) return;
  // the last tile of columns has no partner; a last single tile of rows has met it above
  const int64_t tile = num_tiles - 1, left = (num_rows - 1) % (2 * kTileSide) + 1;
  const int64_t end = paired_tiles > 0 && left <= kTileSide ? num_rows - left : num_rows;
  for (int64_t row = 0; row < end; row += 4 * kTileSide) {
    const int64_t rows = std::min(4 * kTileSide, end - row), number = (rows + kTileSide - 1) / kTileSide;
    configure_tiles(TileShapes::four_by_one(number, rows - (number - 1) * kTileSide, step_words));
    up_to_four(number, [&](auto count) { column(row, tile, count); });
  }
}

// How often it is the turn of what comes next (ahead.h), roughly.
inline int64_t num_tile_turns(int64_t num_rows, int64_t num_tiles, int64_t num_words) {
  const int64_t tiles_each = num_rows <= kTileSide ? 4 : 2, rows_each = (num_tiles == 1 ? 4 : 2) * kTileSide;
  return (num_rows + rows_each - 1) / rows_each * ((num_tiles + tiles_each - 1) / tiles_each) *
         ((num_words + kTileSide - 1) / kTileSide);
}

// out [rows, out_stride] of the first 16 * num_tiles columns = (or, unless it begins at zero, +=) rows · columns over
// `num_words` words of two bfloat16 each.
inline void multiply_pair_tiles(TileRows rows, TileColumns columns, int64_t num_tiles, int64_t num_words,
                                bool begins_at_zero, float* out, int64_t out_stride, Ahead ahead = Ahead::nothing()) {
  const auto run = [&](PairProduct product, int64_t word, int64_t step_words, int64_t num_steps) {
    for_tiles(
        rows.count, num_tiles, step_words,
        [&](int64_t row, int64_t tile) {
          multiply_two_by_two(product, rows, row, columns, kTileSide * tile, word, step_words, num_steps,
                              out + row * out_stride + kTileSide * tile, out_stride, ahead);
        },
        [&](int64_t row, int64_t tile, auto number) {
          multiply_one_by<number>(product, rows, row, columns, kTileSide * tile, word, step_words, num_steps,
                                  out + row * out_stride + kTileSide * tile, out_stride, ahead);
        },
        [&](int64_t row, int64_t tile, auto number) {
          multiply_column_by<number>(product, rows, row, columns, kTileSide * tile, word, step_words, num_steps,
                                     out + row * out_stride + kTileSide * tile, out_stride, ahead);
        });
  };
  const int64_t whole = num_words / kTileSide, left = num_words % kTileSide;
  if (whole > 0 || left == 0) run({begins_at_zero}, 0, kTileSide, whole);
  if (left > 0) run({begins_at_zero && whole == 0}, whole * kTileSide, left, 1);
}

constexpr int64_t kScratchRows = 4 * kTileSide, kScratchColumns = 4 * kTileSide;
constexpr int64_t kScratchValues = kScratchRows * kScratchColumns;

// Exact sums of each block of `block_words` words (a multiple of 16) of four 8-bit values. Calls finish(row, count, tile,
// number, block, num_blocks, sums) with those of rows row … row + count - 1, some tiles of columns, and one or two blocks, so
// that what they are added to is read and written half as often; sums [num_blocks][64][64], of rows that are not there
// nothing. Blocks of a part come in ascending order. All rows pass `part_blocks` blocks before the next ones. While blocks are
// multiplied, those before are finished, little by little: the two take different parts of the processor.
template <class Finish>
void multiply_byte_tiles(TileRows rows, TileColumns columns, int64_t num_tiles, int64_t block_words, int64_t num_blocks,
                         int64_t part_blocks, Ahead ahead, Finish finish) {
  alignas(64) int32_t sums[2][2][kScratchValues];
  const int64_t num_steps = block_words / kTileSide;

  struct Turns {  // between the steps of a block
    Ahead& ahead;
    Finish& finish;
    int64_t num_steps;
    struct {
      int64_t row, count, tile, number, block, num_blocks;
      const int32_t* sums;
    } last{};          // that are to be finished
    int64_t done = 0;  // of their rows

    void turn() {
      ahead.turn();
      const int64_t turns = num_steps * last.num_blocks;
      if (done < last.count) finish_until(std::min(last.count, done + (last.count + turns - 1) / turns));
    }
    void finish_until(int64_t end) {
      if (done == end) return;
      finish(last.row + done, end - done, last.tile, last.number, last.block, last.num_blocks,
             last.sums + done * kScratchColumns);
      done = end;
    }
  };
  Turns turns{ahead, finish, num_steps};
  for (int64_t first = 0, own = 0; first < num_blocks; first += part_blocks) {
    const int64_t end = std::min(first + part_blocks, num_blocks);
    // multiply(word, sums) for the part's blocks of some rows and tiles
    const auto run = [&](int64_t row, int64_t count, int64_t tile, int64_t number, auto multiply) {
      for (int64_t block = first; block < end; block += 2, own = 1 - own) {
        const int64_t num_blocks = std::min<int64_t>(2, end - block);
        for (int64_t i = 0; i < num_blocks; ++i) multiply((block + i) * block_words, sums[own][i]);
        turns.finish_until(turns.last.count);
        turns.last = {row, count, tile, number, block, num_blocks, sums[own][0]};
        turns.done = 0;
      }
    };
    for_tiles(
        rows.count, num_tiles, kTileSide,
        [&](int64_t row, int64_t tile) {
          run(row, std::min(2 * kTileSide, rows.count - row), tile, 2,
              [&](int64_t word, int32_t* out) {
                multiply_two_by_two(ByteProduct{}, rows, row, columns, kTileSide * tile, word, kTileSide, num_steps, out,
                                    kScratchColumns, turns);
              });
        },
        [&](int64_t row, int64_t tile, auto number) {
          run(row, std::min(kTileSide, rows.count - row), tile, number,
              [&](int64_t word, int32_t* out) {
                multiply_one_by<number>(ByteProduct{}, rows, row, columns, kTileSide * tile, word, kTileSide, num_steps, out,
                                        kScratchColumns, turns);
              });
        },
        [&](int64_t row, int64_t tile, auto number) {
          run(row, std::min(number * kTileSide, rows.count - row), tile, 1,
              [&](int64_t word, int32_t* out) {
                multiply_column_by<number>(ByteProduct{}, rows, row, columns, kTileSide * tile, word, kTileSide, num_steps,
                                           out, kScratchColumns, turns);
              });
        });
  }
  turns.finish_until(turns.last.count);
}

// Products of pairs over all of `num_words` (a multiple of 16) at once, so that sums leave the tiles only when they are
// whole. Calls finish(row, count, tile, number, sums) with those of rows row … row + count - 1 and all tiles of columns (but
// one that has no other beside it comes alone, after the others), sums [count][64], while what comes next is multiplied.
template <class Finish>
void multiply_whole_pair_tiles(TileRows rows, TileColumns columns, int64_t num_tiles, int64_t num_words, Ahead ahead,
                               Finish finish) {
  alignas(64) float sums[2][kScratchValues];
  const int64_t num_steps = num_words / kTileSide;

  struct Turns {
    Ahead& ahead;
    Finish& finish;
    int64_t rows_a_turn;
    struct {
      int64_t row, count, tile, number;
      const float* sums;
    } last{};          // that is to be finished
    int64_t done = 0;  // of its rows

    void turn() {
      ahead.turn();
      if (done < last.count) finish_until(std::min(last.count, done + rows_a_turn));
    }
    void finish_until(int64_t end) {
      if (done == end) return;
      finish(last.row + done, end - done, last.tile, last.number, last.sums + done * kScratchColumns);
      done = end;
    }
  };
  Turns turns{ahead, finish, std::max<int64_t>(1, (2 * kTileSide + 2 * num_steps - 1) / (2 * num_steps))};
  int64_t own = 0;
  const int64_t beside = num_tiles / 2 * 2;  // tiles of columns that are finished together
  const auto run = [&](int64_t row, int64_t count, int64_t tile, int64_t number, auto multiply) {
    multiply(sums[own] + kTileSide * tile);
    const bool is_alone = tile == beside && number == 1;
    if (!is_alone && tile + number < beside) return;
    turns.finish_until(turns.last.count);
    const int64_t first = is_alone ? tile : 0;
    turns.last = {row, count, first, tile + number - first, sums[own] + kTileSide * first};
    turns.done = 0;
    own = 1 - own;
  };
  const PairProduct product{true};
  for_tiles(
      rows.count, num_tiles, kTileSide,
      [&](int64_t row, int64_t tile) {
        run(row, std::min(2 * kTileSide, rows.count - row), tile, 2, [&](float* out) {
          multiply_two_by_two(product, rows, row, columns, kTileSide * tile, 0, kTileSide, num_steps, out, kScratchColumns,
                              turns);
        });
      },
      [&](int64_t row, int64_t tile, auto number) {
        run(row, std::min(kTileSide, rows.count - row), tile, number, [&](float* out) {
          multiply_one_by<number>(product, rows, row, columns, kTileSide * tile, 0, kTileSide, num_steps, out,
                                  kScratchColumns, turns);
        });
      },
      [&](int64_t row, int64_t tile, auto number) {
        run(row, std::min(number * kTileSide, rows.count - row), tile, 1, [&](float* out) {
          multiply_column_by<number>(product, rows, row, columns, kTileSide * tile, 0, kTileSide, num_steps, out,
                                     kScratchColumns, turns);
        });
      });
  turns.finish_until(turns.last.count);
}

}  // namespace batchinfer
#endif
