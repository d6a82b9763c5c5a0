// Products of rows with a panel of columns in tiles of 16 x 16 results (matrix_tiles.h).
//
// Two tiles of rows meet two tiles of columns, so that each tile that is loaded is multiplied twice; up to 16 rows meet
// four tiles of columns. Depth goes in steps of 16 words from the start on; what is left is a step of its own with
// narrower tiles, so nothing behind a row or panel is read. How many rows there are changes no bit.

#pragma once

#include <algorithm>
#include <type_traits>

#include "matrix_tiles.h"

#ifdef BATCHINFER_TILES
namespace batchinfer {

// Rows of words: row r begins at data + r * stride_bytes.
struct TileRows {
  const void* data;
  int64_t stride_bytes, count;

  const char* at(int64_t row, int64_t word) const {
    return static_cast<const char*>(data) + row * stride_bytes + 4 * word;
  }
};

// Words of columns: word w of column c stands at data + w * stride_bytes + 4 * c.
struct TileColumns {
  const void* data;
  int64_t stride_bytes;

  const char* at(int64_t word, int64_t column) const {
    return static_cast<const char*>(data) + word * stride_bytes + 4 * column;
  }
};

// Where sums begin: at zero, or at what stands in the result.
enum class Begin { kZero, kResult };

// Which products, and where the sums of 8-bit ones begin: row r, column c at starts + 4 * c, the same for all rows.
struct PairProduct {
  Begin begin;

  template <int Sums>
  void open(const float* at, int64_t stride_bytes, int64_t) const {
    begin == Begin::kZero ? clear_tile<Sums>() : load_tile<Sums>(at, stride_bytes);
  }
  template <int Sums, int Rows, int Columns>
  static void multiply() {
    multiply_pairs<Sums, Rows, Columns>();
  }
};
struct ByteProduct {
  const int32_t* starts;

  template <int Sums>
  void open(const int32_t*, int64_t, int64_t column) const {
    load_tile<Sums>(starts + column, 0);
  }
  template <int Sums, int Rows, int Columns>
  static void multiply() {
    multiply_bytes<Sums, Rows, Columns>();
  }
};

// Words [word_begin, word_begin + num_steps * step_words) of 17 to 32 rows with two tiles of columns.
template <class Product, class Sum>
inline void multiply_two_by_two(const Product& product, TileRows rows, int64_t row, TileColumns columns, int64_t column,
                                int64_t word, int64_t step_words, int64_t num_steps, Sum* out, int64_t out_stride) {
  const int64_t bytes = out_stride * int64_t{sizeof(Sum)};
  Sum* const low = out + row * out_stride + column;
  Sum* const high = low + kTileSide * out_stride;
  product.template open<kSums0>(low, bytes, column);
  product.template open<kSums1>(low + kTileSide, bytes, column + kTileSide);
  product.template open<kSums2>(high, bytes, column);
  product.template open<kSums3>(high + kTileSide, bytes, column + kTileSide);
  for (int64_t step = 0; step < num_steps; ++step, word += step_words) {
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

// The same for up to 16 rows with up to four tiles of columns.
template <class Product, int N, class Sum>
inline void multiply_one_by(const Product& product, TileRows rows, int64_t row, TileColumns columns, int64_t column,
                            int64_t word, int64_t step_words, int64_t num_steps, Sum* out, int64_t out_stride) {
  const int64_t bytes = out_stride * int64_t{sizeof(Sum)};
  Sum* const at = out + row * out_stride + column;
  product.template open<kSums0>(at, bytes, column);
  if constexpr (N > 1) product.template open<kSums1>(at + kTileSide, bytes, column + kTileSide);
  if constexpr (N > 2) product.template open<kSums2>(at + 2 * kTileSide, bytes, column + 2 * kTileSide);
  if constexpr (N > 3) product.template open<kSums3>(at + 3 * kTileSide, bytes, column + 3 * kTileSide);
  for (int64_t step = 0; step < num_steps; ++step, word += step_words) {
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

// All rows with `num_tiles` tiles of columns, words [word, word + num_steps * step_words).
template <class Product, class Sum>
void multiply_tiles_by(const Product& product, TileRows rows, TileColumns columns, int64_t num_tiles, int64_t word,
                       int64_t step_words, int64_t num_steps, Sum* out, int64_t out_stride) {
  for (int64_t row = 0; row < rows.count; row += 2 * kTileSide) {
    const int64_t left = rows.count - row;
    if (left > kTileSide) {
      configure_tiles(kTileSide, std::min(kTileSide, left - kTileSide), step_words, false);
      int64_t tile = 0;
      for (; tile + 2 <= num_tiles; tile += 2) {
        multiply_two_by_two(product, rows, row, columns, kTileSide * tile, word, step_words, num_steps, out, out_stride);
      }
      if (tile == num_tiles) continue;
      // the last tile of columns has no other beside it
      for (int64_t half = row; half < rows.count && half < row + 2 * kTileSide; half += kTileSide) {
        configure_tiles(std::min(kTileSide, rows.count - half), 0, step_words, true);
        multiply_one_by<Product, 1>(product, rows, half, columns, kTileSide * tile, word, step_words, num_steps, out,
                                    out_stride);
      }
      continue;
    }
    configure_tiles(left, 0, step_words, true);
    for (int64_t tile = 0; tile < num_tiles; tile += 4) {
      const auto run = [&](auto count) {
        multiply_one_by<Product, count>(product, rows, row, columns, kTileSide * tile, word, step_words, num_steps, out,
                                        out_stride);
      };
      switch (num_tiles - tile) {
        case 1: run(std::integral_constant<int, 1>{}); break;
        case 2: run(std::integral_constant<int, 2>{}); break;
        case 3: run(std::integral_constant<int, 3>{}); break;
        default: run(std::integral_constant<int, 4>{});
      }
    }
  }
}

// out [rows, out_stride] of the first 16 * num_tiles columns = (or +=) rows · columns over `num_words` words of two
// bfloat16 each.
inline void multiply_pair_tiles(TileRows rows, TileColumns columns, int64_t num_tiles, int64_t num_words, Begin begin,
                                float* out, int64_t out_stride) {
  const int64_t whole = num_words / kTileSide, left = num_words % kTileSide;
  if (whole > 0 || num_words == 0) {
    multiply_tiles_by(PairProduct{begin}, rows, columns, num_tiles, 0, kTileSide, whole, out, out_stride);
    begin = Begin::kResult;
  }
  if (left > 0) {
    multiply_tiles_by(PairProduct{begin}, rows, columns, num_tiles, whole * kTileSide, left, 1, out, out_stride);
  }
  release_tiles();
}

// The same for `num_words` words (a multiple of 16) of four 8-bit values, exactly; sums begin at starts [16 * num_tiles].
inline void multiply_byte_tiles(TileRows rows, TileColumns columns, int64_t num_tiles, int64_t num_words,
                                const int32_t* starts, int32_t* out, int64_t out_stride) {
  multiply_tiles_by(ByteProduct{starts}, rows, columns, num_tiles, 0, kTileSide, num_words / kTileSide, out, out_stride);
  release_tiles();
}

}  // namespace batchinfer
#endif
