// Products of rows that are contiguous along the sum, x · weightᵀ, in tiles of at most 4 rows and 6 columns.

#pragma once

#include <immintrin.h>

#include <algorithm>

#include "kernels.h"

namespace batchinfer {

constexpr int kTileRows = 4;
constexpr int kTileColumns = 6;
constexpr int kTileValues = 32;  // room for kTileRows * kTileColumns results in whole vectors
constexpr int64_t kStep = 32;    // bfloat16 values in a vector

// Sums of four accumulators, one in each lane of a group of four: the groups still have to be added up.
inline __m512 add_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d ab_pairs = _mm512_castps_pd(ab), cd_pairs = _mm512_castps_pd(cd);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab_pairs, cd_pairs)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(ab_pairs, cd_pairs)));
}

inline __m512 add_groups(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

// Weights that the next tile will want, asked for while this one computes: `lines` cache lines of each half per vector
// step, so that memory is read evenly over all passes of a tile's weights through the cache.
struct Ahead {
  const bf16 *first, *second;
  int lines;

  // The share of pass `pass` of `num_passes` when each half has kTileColumns / 2 rows of `depth` values.
  static Ahead of_pass(const bf16* first, const bf16* second, int64_t depth, int64_t pass, int64_t num_passes) {
    constexpr int64_t kRows = kTileColumns / 2;
    const int64_t lines = (kRows + num_passes - 1) / num_passes;
    if (pass * lines >= kRows) return {nullptr, nullptr, 0};
    return {first + pass * lines * depth, second + pass * lines * depth, static_cast<int>(lines)};
  }
};

// out[r * columns + c] = x row r · weight row c; the first (columns + 1) / 2 weight rows start at `first`, the others
// at `second`.
using DotTile = void (*)(const bf16* x, int64_t x_stride, const bf16* first, const bf16* second, int64_t weight_stride,
                         int64_t depth, Ahead ahead, float* out);

// The tile of `rows` (1 … 4) and `columns` (1 … 6); it writes up to kTileValues values.
DotTile dot_tile_of(int64_t rows, int64_t columns);

// How a product is cut into tasks; the cut decides who computes a result, never its bits.
struct Cut {
  int64_t block_rows, block_columns;

  // Rows of x that stay in the second-level cache while a task's columns pass, and columns of about 64 KiB of weights.
  static Cut of(int64_t num_rows, int64_t num_columns, int64_t depth, int64_t column_step) {
    const int64_t row_bytes = std::max<int64_t>(1, depth) * int64_t{sizeof(bf16)};
    const int64_t fitting_rows = std::max<int64_t>(16, (int64_t{256} << 10) / row_bytes / kTileRows * kTileRows);
    const int64_t num_blocks = std::max<int64_t>(1, (num_rows + fitting_rows - 1) / fitting_rows);
    const int64_t rows = (num_rows + num_blocks - 1) / num_blocks;
    const int64_t fair = num_columns * num_blocks / (4 * num_threads());
    const int64_t columns = std::min((int64_t{64} << 10) / row_bytes, fair) / column_step * column_step;
    return {std::max<int64_t>(kTileRows, (rows + kTileRows - 1) / kTileRows * kTileRows),
            std::max(column_step, columns)};
  }
};

// Values [row_begin, row_end) x [column_begin, column_end) of x · weightᵀ, rounded to bfloat16.
void dot_block(Rows x, Rows weight, int64_t depth, int64_t row_begin, int64_t row_end, int64_t column_begin,
               int64_t column_end, bf16* out, int64_t out_stride);

}  // namespace batchinfer
