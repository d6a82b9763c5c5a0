// The inner loop of every product whose two operands are contiguous along the sum: rows of x times rows of a weight.
//
//            k 0..31  32..63  ...                  one accumulator per (row, column), 16 float32 lanes wide;
//   x  row 0 [zmm]    [zmm]                        lane j adds the products at k = 32 i + 2 j and 32 i + 2 j + 1, i up
//   x  row 1 [zmm]    [zmm]
//   w  row 0 [zmm]    [zmm]                        a tile of 4 rows and 6 columns: 10 loads for 24 multiplications
//
// At the end the 16 lanes are added as a tree, ((0 + 2) + (1 + 3)) within four, then fours 0 + 1 and 2 + 3, then both.
// The order of a sum therefore depends on nothing but its length.

#include "dot_tile.h"

#include <cstring>

namespace batchinfer {
namespace {

inline __m512bh load_values(const bf16* at) { return (__m512bh)_mm512_loadu_si512(at); }

// Adds one vector's worth of products, at k, to all sums of the tile.
template <int R, int C, class Load>
inline __attribute__((always_inline)) void add_products(__m512* sums, const bf16* x, int64_t x_stride,
                                                        const bf16* const* weight_rows, int64_t k, Load load) {
  __m512bh x_values[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) x_values[r] = load(x + r * x_stride + k);
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    const __m512bh w_values = load(weight_rows[c] + k);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r * C + c] = _mm512_dpbf16_ps(sums[r * C + c], x_values[r], w_values);
  }
}

template <int R, int C>
void dot_tile(const bf16* x, int64_t x_stride, const bf16* first, const bf16* second, int64_t weight_stride,
              int64_t depth, Ahead ahead, float* out) {
  constexpr int kFirst = (C + 1) / 2;
  __m512 sums[32];
#pragma GCC unroll 32
  for (int i = 0; i < 32; ++i) sums[i] = _mm512_setzero_ps();

  const bf16* weight_rows[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    weight_rows[c] = c < kFirst ? first + c * weight_stride : second + (c - kFirst) * weight_stride;
  }
  const int64_t whole = depth & ~(kStep - 1);
  int64_t k = 0;
  if (ahead.lines > 0) {
    for (; k < whole; k += kStep) {
      for (int line = 0; line < ahead.lines; ++line, ahead.first += kStep, ahead.second += kStep) {
        // into the second level: the first has fewer reads from memory under way at a time
        _mm_prefetch(reinterpret_cast<const char*>(ahead.first), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(ahead.second), _MM_HINT_T1);
      }
      add_products<R, C>(sums, x, x_stride, weight_rows, k, load_values);
    }
  }
  for (; k < whole; k += kStep) add_products<R, C>(sums, x, x_stride, weight_rows, k, load_values);
  if (k < depth) {
    const __mmask32 mask = (__mmask32)((uint64_t{1} << (depth - k)) - 1);
    add_products<R, C>(sums, x, x_stride, weight_rows, k, [mask](const bf16* at) {
      return (__m512bh)_mm512_maskz_loadu_epi16(mask, at);
    });
  }

#pragma GCC unroll 2
  for (int i = 0; i < R * C; i += 16) {
    const __m512 low = add_groups(add_lanes(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]),
                                  add_lanes(sums[i + 4], sums[i + 5], sums[i + 6], sums[i + 7]));
    const __m512 high = add_groups(add_lanes(sums[i + 8], sums[i + 9], sums[i + 10], sums[i + 11]),
                                   add_lanes(sums[i + 12], sums[i + 13], sums[i + 14], sums[i + 15]));
    _mm512_storeu_ps(out + i, add_groups(low, high));
  }
}

}  // namespace

DotTile dot_tile_of(int64_t rows, int64_t columns) {
  static constexpr DotTile kTiles[kTileRows][kTileColumns] = {
      {dot_tile<1, 1>, dot_tile<1, 2>, dot_tile<1, 3>, dot_tile<1, 4>, dot_tile<1, 5>, dot_tile<1, 6>},
      {dot_tile<2, 1>, dot_tile<2, 2>, dot_tile<2, 3>, dot_tile<2, 4>, dot_tile<2, 5>, dot_tile<2, 6>},
      {dot_tile<3, 1>, dot_tile<3, 2>, dot_tile<3, 3>, dot_tile<3, 4>, dot_tile<3, 5>, dot_tile<3, 6>},
      {dot_tile<4, 1>, dot_tile<4, 2>, dot_tile<4, 3>, dot_tile<4, 4>, dot_tile<4, 5>, dot_tile<4, 6>},
  };
  return kTiles[rows - 1][columns - 1];
}

void dot_block(Rows x, Rows weight, int64_t depth, int64_t row_begin, int64_t row_end, int64_t column_begin,
                      int64_t column_end, bf16* out, int64_t out_stride) {
  const int64_t num_passes = (row_end - row_begin + kTileRows - 1) / kTileRows;
  alignas(64) float values[kTileValues];
  alignas(64) bf16 rounded[kTileValues];
  for (int64_t column = column_begin; column < column_end; column += kTileColumns) {
    const int64_t columns = std::min<int64_t>(kTileColumns, column_end - column);
    const bf16* first = weight.data + column * weight.stride;
    const bf16* second = first + (columns + 1) / 2 * weight.stride;
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, row_end - row);
      const Ahead ahead =
          Ahead::of_pass(first + kTileColumns * weight.stride, second + kTileColumns * weight.stride, depth,
                         (row - row_begin) / kTileRows, num_passes);
      dot_tile_of(rows, columns)(x.data + row * x.stride, x.stride, first, second, weight.stride, depth, ahead, values);
      for (int i = 0; i < kTileValues; i += 16) {
        const __m256bh part = _mm512_cvtneps_pbh(_mm512_load_ps(values + i));
        _mm256_store_si256(reinterpret_cast<__m256i*>(rounded + i), (__m256i)part);
      }
      for (int64_t r = 0; r < rows; ++r) {
        bf16* at = out + (row + r) * out_stride + column;
        if (columns == kTileColumns) {
          std::memcpy(at, rounded + r * kTileColumns, kTileColumns * sizeof(bf16));
        } else {
          std::memcpy(at, rounded + r * columns, columns * sizeof(bf16));
        }
      }
    }
  }
}

}  // namespace batchinfer
