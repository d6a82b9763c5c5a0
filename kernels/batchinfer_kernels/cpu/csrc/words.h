// Products in 8 bits on processors that multiply pairs of 16-bit words: the bytes of rows and columns are widened to words in
// memory once for a tile, not in registers at every step. Of each part of fours (lanes_avx2.h) the words of a row stand one
// after the other, those of 16 columns side by side.

#pragma once

#include <algorithm>

#include "tile.h"

#ifdef BATCHINFER_PARTS_AS_WORDS

namespace batchinfer {

constexpr int64_t kWordSteps = kBlock / 4;  // fours of bytes that are widened at a time
constexpr int64_t kRowWords = kFourParts * kWordSteps;
constexpr int64_t kWordRows = 12;           // for which it is worth it to widen columns in memory, too

// Groups of 16 columns as a panel has them, and as words.
struct ColumnBytes {
  const int8_t* at;

  static constexpr int64_t kStep = 4 * kPanelColumns, kChunk = 64;
  FourPart part(int part) const { return column_fours(at, part); }
};
struct ColumnWords {
  const int32_t* at;

  static constexpr int64_t kStep = 16 * kFourParts, kChunk = 16 * kRowWords;
  FourPart part(int part) const { return part_at(at + 16 * part); }
};

// sums += exact products of R rows, whose words are kRowWords apart, and N groups of columns.
template <class Columns, int R, int N>
inline __attribute__((always_inline)) void add_words(Ints (&sums)[R][N], const int32_t* words, Columns columns,
                                                     int64_t num_steps, Ahead& ahead) {
  FetchEach<N> fetch_next(ahead, num_steps, words);
#pragma GCC unroll 1
  for (int64_t step = 0; step < num_steps; ++step, columns.at += Columns::kStep, ++words) {
    fetch_next();
#pragma GCC unroll 2
    for (int part = 0; part < kFourParts; ++part) {
      if (part > 0) load_again();
      FourPart own[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) own[n] = Columns{columns.at + Columns::kChunk * n}.part(part);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const FourPart row = part_of(words[r * kRowWords + part * kWordSteps]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) add_product(sums[r][n], row, own[n]);
      }
    }
  }
}

// Up to kWordSteps fours of a row; the row's memory goes on up to a whole 16 of them.
inline void row_to_words(const uint8_t* bytes, int64_t num_steps, int32_t* words) {
#pragma GCC unroll 2
  for (int64_t step = 0; step < num_steps; step += 16) {
    for (int part = 0; part < kFourParts; ++part) {
      store_ints(words + part * kWordSteps + step, row_words(bytes + 4 * step, part));
    }
  }
}

inline void columns_to_words(const int8_t* values, int64_t num_steps, int64_t chunks, int32_t* out) {
  for (int64_t step = 0; step < num_steps; ++step, values += ColumnBytes::kStep, out += ColumnWords::kStep) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int part = 0; part < kFourParts; ++part) {
        store_ints(out + ColumnWords::kChunk * chunk + 16 * part, column_words(values + ColumnBytes::kChunk * chunk, part));
      }
    }
  }
}

// Calls multiply(row, rows, words, columns, chunk, groups) for tiles of rows and groups of a panel's columns that begin at
// `values`, over up to kWordSteps steps; `rows` and `groups` are constants, and bytes_of(row) is where a row's bytes are.
template <class BytesOf, class Multiply>
inline void for_word_tiles(int64_t num_rows, BytesOf bytes_of, const int8_t* values, int64_t num_steps, int64_t chunks,
                           Multiply multiply) {
  alignas(64) int32_t words[kTileRows * kRowWords], wide[kRowWords * kPanelColumns];
  const auto tiles = [&](auto columns) {
    using Columns = decltype(columns);
    for_tiles(0, num_rows, [&](int64_t row, int64_t rows) {
      for (int64_t r = 0; r < rows; ++r) row_to_words(bytes_of(row + r), num_steps, words + r * kRowWords);
      for (int64_t r = row + rows; r < std::min(row + rows + kTileRows, num_rows); ++r) {
        fetch_near(bytes_of(r));
        fetch_near(bytes_of(r) + 64);
      }
      with_rows(rows, [&](auto count) {
        for_chunks<count>(chunks, [&](int64_t chunk, auto groups) {
          multiply(row, count, words, Columns{columns.at + Columns::kChunk * chunk}, chunk, groups);
        });
      });
    });
  };
  if (num_rows < kWordRows) return tiles(ColumnBytes{values});
  columns_to_words(values, num_steps, chunks, wide);
  tiles(ColumnWords{wide});
}

}  // namespace batchinfer

#endif
