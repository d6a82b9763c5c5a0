#include "attention.h"

#include <algorithm>
#include <limits>

#include "tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

// What a new peak makes of earlier sums: exactly 1 where the peak has not changed.
inline Floats shrink_of(Floats before, Floats peak, Floats factor, Floats offset) {
  return choose(is_equal(before, peak), floats(1.0f), exp2_values(multiply_subtract(before, factor, offset)));
}

// Asks for 32 values that come soon, into the second level: the first has fewer reads from memory under way at a time.
inline void fetch(const bf16* values) { _mm_prefetch(reinterpret_cast<const char*>(values), _MM_HINT_T1); }

inline void fetch(const bf16* values, int64_t count) {
  for (int64_t i = 0; i < count; i += 32) fetch(values + i);
}

// Weights of rows, two keys side by side.
struct Pairs {
  const int32_t* data;
  int64_t row_stride, pair_stride;
};

// sums = sums * shrink + weights · values for R rows and N chunks of 16 values.
template <int R, int N>
__attribute__((noinline)) void sum_tile(float* sums_at, const float* shrink, Pairs weights, const bf16* values,
                                        int64_t num_pairs, int64_t value_dim) {
  Floats sums[R][N];
  const int32_t* pairs[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    pairs[r] = weights.data + r * weights.row_stride;
    const Floats factor = floats(shrink[r]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = load(sums_at + r * value_dim + 16 * n) * factor;
  }
  add_pairs<R, N>(sums, pairs, weights.pair_stride, values, 2 * value_dim, num_pairs);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(sums_at + r * value_dim + 16 * n, sums[r][n]);
  }
}

}  // namespace

void interleave_values(Rows values, int64_t value_dim, int64_t num_keys, bf16* out) {
  for (int64_t key = 0; key < num_keys; key += 2) {
    const bf16* even = values.at(key);
    const bf16* odd = key + 1 < num_keys ? values.at(key + 1) : nullptr;
    bf16* at = out + key * value_dim;
    int64_t c = 0;
    for (; odd && c + 32 <= value_dim; c += 32) interleave_32(even + c, odd + c, at + 2 * c);
    for (; c < value_dim; c += 16) store_ints(at + 2 * c, beside(load_bits(even + c), odd ? load_bits(odd + c) : ints(0)));
  }
}

Attention& Attention::begin(int64_t width, int64_t value_dim, float scale, Lanes lanes) {
  static thread_local Attention attention;
  Attention& own = attention;
  own.lanes_ = lanes;
  own.width_ = width;
  own.value_dim_ = value_dim;
  own.factor_ = scale * kLog2E;
  own.queries_.resize(width / 2 * kAttentionRows + 64);
  own.sums_.resize(kAttentionRows * value_dim);
  own.values_.resize(kPageTokens * value_dim);
  // a lane without a query sees one key, so that it computes no NaN out of nothing
  std::fill(own.positions_, own.positions_ + kAttentionRows + 16, 0);
  std::fill(own.peak_, own.peak_ + kAttentionRows + 16, kMinusInfinity);
  std::fill(own.total_, own.total_ + kAttentionRows + 16, 0.0f);
  return own;
}

void Attention::load_query(int64_t row, const bf16* q, int64_t position) {
  query_rows_[row] = q;
  if (lanes_ == Lanes::kRows) {
    const int32_t* pairs = reinterpret_cast<const int32_t*>(q);
    for (int64_t pair = 0; pair < width_ / 2; ++pair) queries_[pair * kAttentionRows + row] = pairs[pair];
  }
  positions_[row] = static_cast<int32_t>(position);
  std::fill_n(sums_.data() + row * value_dim_, value_dim_, 0.0f);
}

// scores[key][row] = key · q row. Keys behind the last one are computed too, from whatever stands there, and not used.
template <int K, int C>
void Attention::score(int64_t lane, Rows keys, int64_t num_keys, const bf16* next) {
  // a line of the next page after every so many pairs: all at once they would wait for memory
  constexpr int64_t kPairsPerLine = 16 / K;
  const int64_t num_lines = width_ / 2 / kPairsPerLine;
  for (int64_t key = 0; key < num_keys; key += K) {
    Floats sums[K][C];
    const int32_t* pairs[K];
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      pairs[k] = reinterpret_cast<const int32_t*>(keys.at(key + k));
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[k][c] = floats(0.0f);
    }
    const bf16* queries = reinterpret_cast<const bf16*>(queries_.data() + lane);
    const bf16* coming = next ? next + key * keys.stride : keys.at(key);
    for (int64_t line = 0; line < num_lines; ++line, coming += 32) {
      fetch(coming);
      add_pairs<K, C>(sums, pairs, 1, queries, 2 * kAttentionRows, kPairsPerLine);
      queries += kPairsPerLine * 2 * kAttentionRows;
#pragma GCC unroll 16
      for (int k = 0; k < K; ++k) pairs[k] += kPairsPerLine;
    }
    add_pairs<K, C>(sums, pairs, 1, queries, 2 * kAttentionRows, width_ / 2 - num_lines * kPairsPerLine);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        // rows of one page need not start at a whole vector; what is written behind them is not used
        if (lane + 16 * (c + 1) <= kAttentionRows) {
          store(scores_[key + k] + lane + 16 * c, sums[k][c]);
        } else {
          store(scores_[key + k] + lane + 16 * c, lanes(kAttentionRows - lane - 16 * c), sums[k][c]);
        }
      }
    }
  }
}

// Turns the scores of up to 16 rows into weights; a row sees the keys up to its position.
void Attention::weigh(int64_t lane, int64_t row_end, int64_t start, int64_t num_keys) {
  const First first = lanes(row_end - lane);
  const Ints positions = load_ints(positions_ + lane);
  const Floats before = load(peak_ + lane);
  const int64_t num_even = (num_keys + 1) & ~int64_t{1};
  const Ints last = ints(static_cast<int>(start + num_even - 1));
  const bool sees_all = num_even == num_keys && !any(both(first, is_less(positions, last)));
  Floats peak = before;
  if (sees_all) {
    for (int64_t key = 0; key < num_even; ++key) peak = larger(peak, load(first, scores_[key] + lane));
  } else {
    for (int64_t key = 0; key < num_even; ++key) {
      // a key that is not there is one that nobody sees
      const Ints position = ints(key < num_keys ? static_cast<int>(start + key) : INT32_MAX);
      const Floats score =
          choose(is_less(positions, position), floats(kMinusInfinity), load(first, scores_[key] + lane));
      store(scores_[key] + lane, first, score);
      peak = larger(peak, score);
    }
  }
  const Floats factor = floats(factor_), offset = peak * factor;
  const Floats shrink = shrink_of(before, peak, factor, offset);
  // the sum of what is multiplied, so that rounding the weights leaves them adding up to one
  Floats total = load(total_ + lane) * shrink;
  for (int64_t key = 0; key < num_even; key += 2) {
    const Floats even_score = load(first, scores_[key] + lane), odd_score = load(first, scores_[key + 1] + lane);
    const Ints even = rounded_bits(exp2_values(multiply_subtract(even_score, factor, offset)));
    const Ints odd = rounded_bits(exp2_values(multiply_subtract(odd_score, factor, offset)));
    total = total + low_values(even) + low_values(odd);
    store_ints(weights_[key / 2] + lane, first, beside(even, odd));
  }
  store(shrink_ + lane, first, shrink);
  store(total_ + lane, first, total);
  store(peak_ + lane, first, peak);
}

// The keys of a page as the panel of a product: [pairs][64 keys].
void Attention::turn_keys(Rows keys, int64_t num_keys, const bf16* next) {
  const int32_t* rows = reinterpret_cast<const int32_t*>(keys.data);
  for (int64_t key = 0; key < num_keys; key += 16) {
    if (next) fetch(next + key * keys.stride, 16 * keys.stride);
    for (int64_t pair = 0; pair < width_ / 2; pair += 16) {
      turn_16(rows + key * keys.stride / 2 + pair, keys.stride / 2, std::min<int64_t>(16, width_ / 2 - pair),
              queries_.data() + pair * kPageTokens + key, kPageTokens);
    }
  }
}

// Turns the scores of one row into weights. Lanes behind the last key are computed from whatever stands there.
void Attention::weigh_row(int64_t row, int64_t start, int64_t num_keys) {
  const Ints num_seen = ints(static_cast<int>(std::min<int64_t>(num_keys, positions_[row] - start + 1)));
  Floats scores[kPageTokens / 16];
  Floats most = floats(kMinusInfinity);
#pragma GCC unroll 4
  for (int n = 0; n < kPageTokens / 16; ++n) {
    const Mask is_seen = is_less(plus(steps(), ints(16 * n)), num_seen);
    scores[n] = choose(is_seen, load(scores_[row] + 16 * n), floats(kMinusInfinity));
    most = larger(most, scores[n]);
  }
  const Floats before = floats(peak_[row]), peak = larger(before, floats(largest_of(most)));
  const Floats factor = floats(factor_), offset = peak * factor;
  Floats total = floats(0.0f);
  bf16* const weights = reinterpret_cast<bf16*>(&weights_[0][0]) + row * kPageTokens;
#pragma GCC unroll 4
  for (int n = 0; n < kPageTokens / 16; ++n) {
    const Floats weight = exp2_values(multiply_subtract(scores[n], factor, offset));
    store_rounded(weights + 16 * n, lanes(16), weight);
    total = total + rounded(weight);
  }
  shrink_[row] = first_of(shrink_of(before, peak, factor, offset));
  total_[row] = total_[row] * shrink_[row] + sum_of(total);
  peak_[row] = first_of(peak);
}

void Attention::sum(int64_t row_begin, int64_t row_end, const bf16* values, int64_t num_keys) {
  const int64_t num_pairs = (num_keys + 1) / 2;
  const Pairs weights = lanes_ == Lanes::kRows ? Pairs{weights_[0], 1, kAttentionRows}
                                               : Pairs{weights_[0], kPageTokens / 2, 1};
  for (int64_t column = 0; column < value_dim_; column += 64) {
    const int64_t chunks = std::min<int64_t>(4, (value_dim_ - column) / 16);
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      with_rows(std::min(kTileRows, row_end - row), [&](auto count) {
        for_chunks<count>(chunks, [&](int64_t chunk, auto groups) {
          const int64_t from = column + 16 * chunk;
          sum_tile<count, groups>(sums_.data() + row * value_dim_ + from, shrink_ + row,
                                  {weights.data + row * weights.row_stride, weights.row_stride, weights.pair_stride},
                                  values + 2 * from, num_pairs, value_dim_);
        });
      });
    }
  }
}

const bf16* Attention::interleaved(Rows values, int64_t num_keys) {
  interleave_values(values, value_dim_, num_keys, values_.data());
  return values_.data();
}

void Attention::add_page(int64_t row_begin, int64_t row_end, Rows keys, const bf16* values, int64_t start,
                         int64_t num_keys, const bf16* next) {
  if (lanes_ == Lanes::kKeys) {
    turn_keys(keys, num_keys, next);
    const bf16* panel = reinterpret_cast<const bf16*>(queries_.data());
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      const int64_t rows = std::min(kTileRows, row_end - row);
      with_rows(rows, [&](auto count) {
        for_chunks<count>(kChunks, [&](int64_t chunk, auto groups) {
          bf16_tile<count, groups>(query_rows_ + row, panel + 32 * chunk, width_, scores_[row] + 16 * chunk, true);
        });
      });
    }
    for (int64_t row = row_begin; row < row_end; ++row) weigh_row(row, start, num_keys);
    sum(row_begin, row_end, values, num_keys);
    return;
  }
  if constexpr (kMostSums < 16) {
    for (int64_t lane = row_begin; lane < row_end; lane += 16) score<4, 1>(lane, keys, num_keys, next);
  } else {
    int64_t lane = row_begin;
    for (; row_end - lane > 48; lane += 64) score<4, 4>(lane, keys, num_keys, next);
    if (row_end - lane > 32) {
      score<4, 3>(lane, keys, num_keys, next);
    } else if (row_end - lane > 16) {
      score<8, 2>(lane, keys, num_keys, next);
    } else if (row_end - lane > 0) {
      score<8, 1>(lane, keys, num_keys, next);
    }
  }
  for (int64_t lane = row_begin; lane < row_end; lane += 16) weigh(lane, row_end, start, num_keys);
  sum(row_begin, row_end, values, num_keys);
}

void Attention::finish(int64_t row, bf16* out, int64_t count) const {
  const float* sums = sums_.data() + row * value_dim_;
  const Floats total = floats(peak_[row] == kMinusInfinity ? 1.0f : total_[row]);
  for (int64_t c = 0; c < count; c += 16) store_rounded(out + c, lanes(count - c), load(sums + c) / total);
}

}  // namespace batchinfer
