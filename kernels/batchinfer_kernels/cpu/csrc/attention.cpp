#include "attention.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;
constexpr bool kFewSums = kMostSums < 16;  // 16 rows are multiplied at a time
// Rows of queries in one panel. As many as are multiplied together, where they are few: a part of the rows of a wider panel
// would meet in a few places of the first-level cache.
constexpr int64_t kQueryRows = kFewSums && !kHasTiles ? 16 : kAttentionRows;

// 2^((score - peak) * factor), as exact as the dtype of the weights.
template <class Value>
inline Floats power_of(Floats score, Floats peak, Floats factor) {
  if constexpr (std::is_same_v<Value, float>) {
    return fine_exp2_values((score - peak) * factor);
  } else {
    return exp2_values(multiply_subtract(score, factor, peak * factor));
  }
}

// The factor by which a new peak shrinks earlier sums: exactly 1 if the peak has not changed.
template <class Value>
inline Floats shrink_of(Floats before, Floats peak, Floats factor) {
  return choose(is_equal(before, peak), floats(1.0f), power_of<Value>(before, peak, factor));
}

template <class Value>
inline void fetch_values(const Value* values, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t{sizeof(Value)}) fetch(values + i);
}

// Weights of rows as steps take them; strides in what a row holds.
template <class Step>
struct WeightRows {
  const typename Step::Row* data;
  int64_t row_stride, step_stride;
};

// sums = sums * shrink + weights · values for R rows and N chunks of 16 values.
template <class Step, int R, int N>
__attribute__((noinline)) void sum_tile(float* sums_at, int64_t sums_stride, const float* shrink,
                                        WeightRows<Step> weights, PageValues<typename Step::Column> values,
                                        int64_t num_steps) {
  Floats sums[R][N];
  const typename Step::Row* rows[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    rows[r] = weights.data + r * weights.row_stride;
    const Floats factor = floats(shrink[r]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = load(sums_at + r * sums_stride + 16 * n) * factor;
  }
  add_products<Step, R, N>(sums, RowList{rows}, weights.step_stride, values.data, values.stride, num_steps);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(sums_at + r * sums_stride + 16 * n, sums[r][n]);
  }
}

// scores = (or, unless it is the first part of a sum, +=) products of K keys with a panel of 16 queries. By itself, so that
// sums stay in registers.
template <class Step, int K>
__attribute__((noinline)) void score_tile(RowsApart<typename Step::Row> keys, const typename Step::Column* queries,
                                          int64_t num_steps, bool is_first, float* scores) {
  Floats sums[K][1];
#pragma GCC unroll 8
  for (int k = 0; k < K; ++k) sums[k][0] = is_first ? floats(0.0f) : load(scores + k * kAttentionRows);
  add_products<Step, K, 1>(sums, keys, Step::kValues, queries, Step::kValues * kQueryRows, num_steps);
#pragma GCC unroll 8
  for (int k = 0; k < K; ++k) store(scores + k * kAttentionRows, sums[k][0]);
}

// Whether all values of these keys are finite; a key has values in whole vectors, with zeros behind the last column.
template <class Value>
bool are_finite(PageValues<Value> values, int64_t num_keys, int64_t value_room) {
  using Bits = std::conditional_t<std::is_same_v<Value, float>, uint32_t, uint16_t>;
  constexpr Bits kExponent = std::is_same_v<Value, float> ? 0x7f800000 : 0x7f80;
  const int64_t num_steps = (num_keys + kWordValues<Value> - 1) / kWordValues<Value>;
  for (int64_t step = 0; step < num_steps; ++step) {
    const Value* const row = values.data + step * values.stride;
    Bits most = 0;
    for (int64_t value = 0; value < kWordValues<Value> * value_room; ++value) {
      most = std::max<Bits>(most, std::bit_cast<Bits>(row[value]) & kExponent);
    }
    if (most == kExponent) return false;
  }
  return true;
}

}  // namespace

void interleave_values(Rows<bf16> values, int64_t value_dim, int64_t room, int64_t num_keys, bf16* out) {
  for (int64_t key = 0; key < num_keys; key += 2) {
    const bf16* even = values.at(key);
    const bf16* odd = key + 1 < num_keys ? values.at(key + 1) : nullptr;
    bf16* at = out + key * room;
    int64_t c = 0;
    for (; c + 32 <= value_dim; c += 32) {
      const Ints first = load_ints(even + c), second = odd ? load_ints(odd + c) : ints(0);
      store_ints(at + 2 * c, first_pairs(first, second));
      store_ints(at + 2 * c + 32, second_pairs(first, second));
    }
    for (; c + 16 <= value_dim; c += 16) {
      store_ints(at + 2 * c, beside(load_bits(even + c), odd ? load_bits(odd + c) : ints(0)));
    }
    for (; c < room; ++c) {
      at[2 * c] = c < value_dim ? even[c] : 0;
      at[2 * c + 1] = c < value_dim && odd ? odd[c] : 0;
    }
  }
}

template <class Value>
Attention<Value>& Attention<Value>::begin(int64_t width, int64_t value_dim, float scale, Lanes lanes) {
  static thread_local Attention attention;
  Attention& own = attention;
  own.lanes_ = lanes;
  own.ahead_ = {};
  own.is_wide_ = kWordValues<Value> == 2 && !(kHasTiles && lanes == Lanes::kRows) && !pairs_are_quick();
  own.is_padded_ = width % kWordValues<Value>;
  own.width_ = (width + kWordValues<Value> - 1) / kWordValues<Value> * kWordValues<Value>;
  own.value_dim_ = value_dim;
  own.value_room_ = (value_dim + 15) / 16 * 16;
  own.factor_ = scale * kLog2E;
  own.queries_.grow(own.width_ / kWordValues<Value> * kAttentionRows + 64);
  own.sums_.grow(kAttentionRows * own.value_room_);
  own.values_.grow(kPageTokens * own.value_room_);
  if (own.is_padded_) own.padded_queries_.grow(kAttentionRows * own.width_);
  if (own.is_wide_) own.wide_rows_.grow((lanes == Lanes::kRows ? kMostWideKeys : kAttentionRows) * own.width_);
  // a lane without a query sees one key, so that it computes no NaN out of nothing
  std::fill(own.positions_, own.positions_ + kAttentionRows + 16, 0);
  std::fill(own.firsts_, own.firsts_ + kAttentionRows + 16, 0);
  std::fill(own.peak_, own.peak_ + kAttentionRows + 16, kMinusInfinity);
  std::fill(own.total_, own.total_ + kAttentionRows + 16, 0.0f);
  return own;
}

template <class Value>
void Attention<Value>::load_queries(int64_t row, int64_t count, Rows<Value> q) {
  if (is_padded_) {
    Value* const padded = padded_queries_.data() + row * width_;
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(q.at(i), width_ - 1, padded + i * width_);
      padded[i * width_ + width_ - 1] = 0;
    }
    q = {padded, width_};
  }
  for (int64_t i = 0; i < count; ++i) query_rows_[row + i] = q.at(i);
  if constexpr (kWordValues<Value> == 2) {
    if (is_wide_ && lanes_ == Lanes::kKeys) {
      for (int64_t i = 0; i < count; ++i) widen(q.at(i), width_, wide_rows_.data() + (row + i) * width_);
    }
  }
  if (lanes_ == Lanes::kRows) turn_queries(row, count, q);
  std::fill_n(sums_.data() + row * value_room_, count * value_room_, 0.0f);
}

// Where a row of queries has its first word.
template <class Value>
int32_t* Attention<Value>::query_at(int64_t row) {
  const int64_t num_words = width_ / kWordValues<Value>;
  return queries_.data() + row / kQueryRows * kQueryRows * num_words + row % kQueryRows;
}

// The queries as panels of a product: [words][kQueryRows].
template <class Value>
void Attention<Value>::turn_queries(int64_t row, int64_t count, Rows<Value> q) {
  const int64_t num_words = width_ / kWordValues<Value>;
  const int64_t stride = q.stride / kWordValues<Value>;  // rows are whole words
  for (int64_t i = 0; i < count;) {
    int32_t* const at = query_at(row + i);
    if (i + 16 <= count && (row + i) % kQueryRows + 16 <= kQueryRows) {
      const int32_t* const words = reinterpret_cast<const int32_t*>(q.at(i));
      for (int64_t word = 0; word < num_words; word += 16) {
        turn_16(words + word, stride, std::min<int64_t>(16, num_words - word), at + word * kQueryRows, kQueryRows);
      }
      i += 16;
    } else {
      for (int64_t word = 0; word < num_words; ++word) {
        std::memcpy(at + word * kQueryRows, q.at(i) + word * kWordValues<Value>, sizeof(int32_t));
      }
      ++i;
    }
  }
}

// Keys that begin at a word, with a zero behind each where a step would take the first value of the next key, too. Side by
// side, where they would meet in the same few places of a cache and are read again and again.
template <class Value>
Rows<Value> Attention<Value>::whole_words(Rows<Value> keys, int64_t num_keys) {
  const int64_t width = width_ - is_padded_;
  const bool is_crowded = lanes_ == Lanes::kRows && keys.stride * int64_t{sizeof(Value)} % 1024 == 0;
  if (!is_padded_ && !is_crowded && keys.stride % kWordValues<Value> == 0) return keys;
  padded_keys_.grow(kPageTokens * width_);
  for (int64_t key = 0; key < num_keys; ++key) {
    Value* padded = padded_keys_.data() + key * width_;
    std::copy_n(keys.at(key), width, padded);
    if (is_padded_) padded[width] = 0;
  }
  return {padded_keys_.data(), width_};
}

// scores[key][row] = key · q row. Scores behind the last key are computed from arbitrary memory and not used.
template <class Value>
template <class Step, int K, int C>
void Attention<Value>::score(int64_t lane, Rows<Value> keys, int64_t num_keys, Rows<Value> next) {
  // prefetch some lines of the next keys every kTurnWords words: all at once they would wait for memory
  constexpr int64_t kTurnWords = 4, kTurnLines = kTurnWords * K / 16, kLineValues = 64 / int64_t{sizeof(Value)};
  if (!next.data) next = keys;
  constexpr int64_t kWord = kWordValues<Value>;
  const int64_t num_words = width_ / kWord, num_turns = num_words / kTurnWords;
  for (int64_t key = 0; key < num_keys; key += K) {
    Floats sums[K][C];
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[k][c] = floats(0.0f);
    }
    RowsApart<typename Step::Row> rows;
    if constexpr (std::is_same_v<Value, typename Step::Row>) {
      rows = {keys.at(key), keys.stride};
    } else {
      static_assert(K <= kMostWideKeys);
      for (int k = 0; k < K; ++k) widen(keys.at(key + k), width_, wide_rows_.data() + k * width_);
      rows = {wide_rows_.data(), width_};
    }
    const Value* queries = reinterpret_cast<const Value*>(query_at(lane));
    int64_t coming_key = key, coming = 0;
    for (int64_t turn = 0; turn < num_turns; ++turn) {
      if (turn % 4 == 0) ahead_.turn();
      for (int64_t line = 0; line < kTurnLines; ++line) {
        fetch(next.at(coming_key) + coming);
        if ((coming += kLineValues) >= width_) {
          ++coming_key;
          coming = 0;
        }
      }
      add_products<Step, K, C>(sums, rows, kWord, queries, kWord * kQueryRows, kTurnWords);
      queries += kTurnWords * kWord * kQueryRows;
      rows.row += kTurnWords * kWord;
    }
    add_products<Step, K, C>(sums, rows, kWord, queries, kWord * kQueryRows, num_words - num_turns * kTurnWords);
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

// The same where 16 rows are multiplied at a time, from a whole vector of them on: scores of other rows are not used.
template <class Value>
template <class Step>
void Attention<Value>::score_in_panels(int64_t row_begin, int64_t row_end, Rows<Value> keys, int64_t num_keys,
                                       Rows<Value> next) {
  constexpr int64_t kPartWords = 32, kWord = kWordValues<Value>, kLineValues = 64 / int64_t{sizeof(Value)};
  const int64_t num_words = width_ / kWord, first_lane = row_begin / 16 * 16;
  for_tiles(0, num_keys, [&](int64_t key, int64_t count) {
    RowsApart<typename Step::Row> rows;
    if constexpr (std::is_same_v<Value, typename Step::Row>) {
      rows = {keys.at(key), keys.stride};
    } else {
      static_assert(kTileRows <= kMostWideKeys);
      for (int64_t k = 0; k < count; ++k) widen(keys.at(key + k), width_, wide_rows_.data() + k * width_);
      rows = {wide_rows_.data(), width_};
    }
    for (int64_t lane = first_lane; lane < row_end; lane += 16) {
      const Value* queries = reinterpret_cast<const Value*>(query_at(lane));
      for (int64_t word = 0; word < num_words; word += kPartWords) {
        const int64_t num_steps = std::min(kPartWords, num_words - word);
        if (lane == first_lane) {
          ahead_.turn();
          for (int64_t k = 0; next.data && k < count; ++k) {
            for (int64_t value = word * kWord; value < (word + num_steps) * kWord; value += kLineValues) {
              fetch(next.at(key + k) + value);
            }
          }
        }
        with_rows(count, [&](auto k) {
          score_tile<Step, k>({rows.row + word * kWord, rows.stride}, queries + word * kWord * kQueryRows, num_steps,
                              word == 0, scores_[key] + lane);
        });
      }
    }
  });
}

// Turns the scores of up to 16 rows into weights; a row sees the keys from its first one to its position.
template <class Value>
void Attention<Value>::weigh(int64_t lane, int64_t row_end, int64_t start, int64_t num_keys) {
  const First first = lanes(row_end - lane);
  const Ints positions = load_ints(positions_ + lane), firsts = load_ints(firsts_ + lane);
  const Floats before = load(peak_ + lane);
  const int64_t num_even = (num_keys + kWordValues<Value> - 1) / kWordValues<Value> * kWordValues<Value>;
  const Ints last = ints(static_cast<int>(start + num_even - 1));
  const bool sees_all = num_even == num_keys && !any(both(first, is_less(positions, last))) &&
                        !any(both(first, is_less(ints(static_cast<int>(start)), firsts)));
  Floats peak = before;
  if (sees_all) {
    for (int64_t key = 0; key < num_even; ++key) peak = larger(peak, load(first, scores_[key] + lane));
  } else {
    for (int64_t key = 0; key < num_even; ++key) {
      // a missing key is a key that no row sees
      const Ints position = ints(key < num_keys ? static_cast<int>(start + key) : INT32_MAX);
      const Floats score =
          choose(is_less(position, firsts), floats(kMinusInfinity),
                 choose(is_less(positions, position), floats(kMinusInfinity), load(first, scores_[key] + lane)));
      store(scores_[key] + lane, first, score);
      peak = larger(peak, score);
    }
  }
  const Floats factor = floats(factor_), shrink = shrink_of<Value>(before, peak, factor);
  const auto weight_of = [&](int64_t key) {
    return power_of<Value>(load(first, scores_[key] + lane), peak, factor);
  };
  // the sum of what is multiplied, so that rounding the weights leaves them adding up to one
  Floats total = load(total_ + lane) * shrink;
  for (int64_t key = 0; key < num_even; key += kWordValues<Value>) {
    if constexpr (kWordValues<Value> == 1) {
      const Floats weight = weight_of(key);
      total = total + weight;
      store(wide_weights_[key] + lane, first, weight);
    } else {
      const Ints pair = rounded_pairs(weight_of(key), weight_of(key + 1));
      total = total + low_values(pair) + high_values(pair);
      if (is_wide_) {
        store(wide_weights_[key] + lane, first, low_values(pair));
        store(wide_weights_[key + 1] + lane, first, high_values(pair));
      } else {
        store_ints(weights_[key / 2] + lane, first, pair);
      }
    }
  }
  store(shrink_ + lane, first, shrink);
  store(total_ + lane, first, total);
  store(peak_ + lane, first, peak);
}

// The keys of a page as the panel of a product: [words][64 keys].
template <class Value>
void Attention<Value>::turn_keys(Rows<Value> keys, int64_t num_keys, Rows<Value> next) {
  const int32_t* rows = reinterpret_cast<const int32_t*>(keys.data);
  const int64_t stride = keys.stride / kWordValues<Value>, num_words = width_ / kWordValues<Value>;
  for (int64_t key = 0; key < num_keys; key += 16) {
    for (int64_t i = key; next.data && i < key + 16; ++i) fetch_values(next.at(i), width_);
    for (int64_t word = 0; word < num_words; word += 16) {
      ahead_.turn();
      turn_16(rows + key * stride + word, stride, std::min<int64_t>(16, num_words - word),
              queries_.data() + word * kPageTokens + key, kPageTokens);
    }
  }
}

// Turns the scores of one row into weights. Lanes behind the last key are computed from arbitrary values.
template <class Value>
void Attention<Value>::weigh_row(int64_t row, int64_t start, int64_t num_keys) {
  const Ints num_seen = ints(static_cast<int>(std::min<int64_t>(num_keys, positions_[row] - start + 1)));
  const Ints num_before = ints(static_cast<int>(firsts_[row] - start));
  Floats scores[kPageTokens / 16];
  Floats most = floats(kMinusInfinity);
#pragma GCC unroll 4
  for (int n = 0; n < kPageTokens / 16; ++n) {
    const Mask is_seen = is_less(plus(steps(), ints(16 * n)), num_seen);
    const Mask is_before = is_less(plus(steps(), ints(16 * n)), num_before);
    scores[n] = choose(is_before, floats(kMinusInfinity),
                       choose(is_seen, load(scores_[row] + 16 * n), floats(kMinusInfinity)));
    most = larger(most, scores[n]);
  }
  const Floats before = floats(peak_[row]), peak = larger(before, floats(largest_of(most)));
  const Floats factor = floats(factor_);
  Floats total = floats(0.0f);
  bf16* const weights = reinterpret_cast<bf16*>(&weights_[0][0]) + row * kPageTokens;
#pragma GCC unroll 4
  for (int n = 0; n < kPageTokens / 16; ++n) {
    const Floats weight = rounded<Value>(power_of<Value>(scores[n], peak, factor));
    if (kWordValues<Value> == 1 || is_wide_) {
      store(wide_weights_[row] + 16 * n, weight);
    } else {
      store_rounded(weights + 16 * n, lanes(16), weight);
    }
    total = total + weight;
  }
  shrink_[row] = first_of(shrink_of<Value>(before, peak, factor));
  total_[row] = total_[row] * shrink_[row] + sum_of(total);
  peak_[row] = first_of(peak);
}

#ifdef BATCHINFER_TILES
// As score, of all rows at once.
template <class Value>
void Attention<Value>::score_in_tiles(int64_t row_begin, int64_t row_end, Rows<Value> keys, int64_t num_keys,
                                      Rows<Value> next) {
  // from a whole vector on, so that no tile reaches beyond the last row; other rows' scores are not used
  const int64_t first = row_begin / kTileSide * kTileSide, num_tiles = (row_end - first + kTileSide - 1) / kTileSide;
  const int64_t num_words = width_ / kWordValues<Value>, next_bytes = kPageTokens * next.stride * int64_t{sizeof(Value)};
  const bool is_ahead = next.data && !next.index;  // keys that an index names are not side by side
  multiply_pair_tiles(TileRows::apart(keys.data, keys.stride * int64_t{sizeof(Value)}, num_keys),
                      {query_at(first), 4 * kQueryRows}, num_tiles, num_words, true, scores_[0] + first,
                      kAttentionRows,
                      is_ahead ? Ahead(next.data, next_bytes, num_tile_turns(num_keys, num_tiles, num_words))
                               : Ahead::nothing());
}

// As sum, with weights turned round: a row of words for each row.
template <class Value>
void Attention<Value>::sum_in_tiles(int64_t row_begin, int64_t row_end, PageValues<Value> values, int64_t num_steps) {
  for (int64_t lane = row_begin / 16 * 16; lane < row_end; lane += 16) {
    for (int64_t word = 0; word < num_steps; word += 16) {
      turn_16(weights_[word] + lane, kAttentionRows, 16, weight_rows_[lane] + word, kPageWords);
    }
  }
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (shrink_[row] == 1.0f) continue;
    float* const sums = sums_.data() + row * value_room_;
    for (int64_t c = 0; c < value_room_; c += 16) store(sums + c, load(sums + c) * floats(shrink_[row]));
  }
  multiply_pair_tiles(TileRows::apart(weight_rows_[row_begin], 4 * kPageWords, row_end - row_begin),
                      {values.data, values.stride * int64_t{sizeof(Value)}}, value_room_ / kTileSide, num_steps,
                      false, sums_.data() + row_begin * value_room_, value_room_);
}
#endif

template <class Value>
void Attention<Value>::sum(int64_t row_begin, int64_t row_end, PageValues<Value> values, int64_t num_keys) {
  const int64_t num_steps = (num_keys + kWordValues<Value> - 1) / kWordValues<Value>;
  if constexpr (kHasTiles && kWordValues<Value> == 2) {
    if (lanes_ == Lanes::kRows) return sum_in_tiles(row_begin, row_end, values, num_steps);
  }
  static_assert(kPageTokens == kAttentionRows);  // of rows of weights both ways
  const auto add = [&](auto step, int64_t row_stride, int64_t step_stride) {
    using Step = decltype(step);
    const typename Step::Row* weights;
    if constexpr (std::is_same_v<typename Step::Row, float>) {
      weights = wide_weights_[0];
    } else {
      weights = reinterpret_cast<const bf16*>(weights_[0]);
    }
    for (int64_t column = 0; column < value_room_; column += 64) {
      ahead_.turn();
      const int64_t chunks = std::min<int64_t>(4, (value_room_ - column) / 16);
      for_tiles(row_begin, row_end, [&](int64_t row, int64_t rows) {
        with_rows(rows, [&](auto count) {
          for_chunks<count>(chunks, [&](int64_t chunk, auto groups) {
            const int64_t from = column + 16 * chunk;
            sum_tile<Step, count, groups>(sums_.data() + row * value_room_ + from, value_room_, shrink_ + row,
                                          {weights + row * row_stride, row_stride, step_stride},
                                          {values.data + kWordValues<Value> * from, values.stride}, num_steps);
          });
        });
      });
    }
  };
  if (lanes_ == Lanes::kRows) {
    const int64_t row_stride = is_wide_ ? 1 : kWordValues<Value>;
    with_step<Value, kAttentionRows>(is_wide_, [&](auto step) {
      add(step, row_stride, kWordValues<Value> * kAttentionRows);
    });
  } else {
    with_step<Value>(is_wide_, [&](auto step) { add(step, kPageTokens, kWordValues<Value>); });
  }
}

// sum of a page, of which some rows may not see all keys.
template <class Value>
void Attention<Value>::sum_of_page(int64_t row_begin, int64_t row_end, PageValues<Value> values, int64_t start,
                                   int64_t num_keys) {
  const int32_t first = *std::min_element(positions_ + row_begin, positions_ + row_end);
  const int32_t most_before = *std::max_element(firsts_ + row_begin, firsts_ + row_end);
  if ((first >= start + num_keys - 1 && most_before <= start) || are_finite(values, num_keys, value_room_)) {
    return sum(row_begin, row_end, values, num_keys);
  }
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = std::max<int64_t>(0, firsts_[row] - start);
    const int64_t end = std::min<int64_t>(num_keys, positions_[row] - start + 1);
    if (begin < end) sum(row, row + 1, some_values(values, begin, end), end);
  }
}

// The values of a page's keys from `first` to `end`, with zeros for those before and for the other key of the last pair.
template <class Value>
PageValues<Value> Attention<Value>::some_values(PageValues<Value> values, int64_t first, int64_t end) {
  constexpr int64_t kKeys = kWordValues<Value>;
  if (first == 0 && end % kKeys == 0) return values;
  const int64_t step_values = kKeys * value_room_;
  some_values_.grow(kPageTokens * value_room_);
  for (int64_t step = 0; step < (end + kKeys - 1) / kKeys; ++step) {
    Value* const at = some_values_.data() + step * step_values;
    std::copy_n(values.data + step * values.stride, step_values, at);
    for (int64_t key = 0; key < kKeys; ++key) {
      if (first <= step * kKeys + key && step * kKeys + key < end) continue;
      for (int64_t value = key; value < step_values; value += kKeys) at[value] = 0;
    }
  }
  return {some_values_.data(), step_values};
}

template <class Value>
PageValues<Value> Attention<Value>::values_of(Rows<Value> values, int64_t num_keys) {
  if constexpr (kWordValues<Value> == 2) {
    for (int64_t key = 0; key < num_keys; key += 16) {
      ahead_.turn();
      interleave_values({values.at(key), values.stride}, value_dim_, value_room_, std::min<int64_t>(16, num_keys - key),
                        values_.data() + key * value_room_);
    }
    return {values_.data(), 2 * value_room_};
  } else {
    if (value_dim_ == value_room_) return {values.data, values.stride};
    for (int64_t key = 0; key < num_keys; ++key) {
      Value* at = values_.data() + key * value_room_;
      std::fill_n(std::copy_n(values.at(key), value_dim_, at), value_room_ - value_dim_, 0.0f);
    }
    return {values_.data(), value_room_};
  }
}

template <class Value>
void Attention<Value>::add_page(int64_t row_begin, int64_t row_end, Rows<Value> keys, PageValues<Value> values,
                                int64_t start, int64_t num_keys, Rows<Value> next) {
  keys = whole_words(keys, num_keys);
  if (lanes_ == Lanes::kKeys) {
    turn_keys(keys, num_keys, next);
    const Value* panel = reinterpret_cast<const Value*>(queries_.data());
    with_step<Value>(is_wide_, [&](auto step) {
      using Step = decltype(step);
      Ahead nothing = Ahead::nothing();
      for_tiles(row_begin, row_end, [&](int64_t row, int64_t rows) {
        const typename Step::Row* at[kTileRows];
        for (int64_t r = 0; r < rows; ++r) {
          if constexpr (std::is_same_v<Value, typename Step::Row>) {
            at[r] = query_rows_[row + r];
          } else {
            at[r] = wide_rows_.data() + (row + r) * width_;
          }
        }
        multiply_tile<Step>(at, rows, panel, width_ / Step::kValues, kChunks, scores_[row], true, nothing);
      });
    });
    for (int64_t row = row_begin; row < row_end; ++row) {
      ahead_.turn();
      weigh_row(row, start, num_keys);
    }
    sum_of_page(row_begin, row_end, values, start, num_keys);
    return;
  }
  score_rows(row_begin, row_end, keys, num_keys, next);
  for (int64_t lane = row_begin; lane < row_end; lane += 16) weigh(lane, row_end, start, num_keys);
  sum_of_page(row_begin, row_end, values, start, num_keys);
}

template <class Value>
void Attention<Value>::score_page(int64_t row_end, Rows<Value> keys, int64_t num_keys, const float* weights, bool adds,
                                  Rows<Value> next, float* scores) {
  score_rows(0, row_end, whole_words(keys, num_keys), num_keys, next);
  for (int64_t key = 0; key < num_keys; ++key) {
    Floats total = floats(0.0f);
    for (int64_t row = 0; row < row_end; row += 16) {
      const First first = lanes(row_end - row);
      total = multiply_add(load(first, weights + row), larger(load(first, scores_[key] + row), floats(0.0f)), total);
    }
    scores[key] = sum_of(total) + (adds ? scores[key] : 0.0f);
  }
}

// Scores of rows with keys that are whole words.
template <class Value>
void Attention<Value>::score_rows(int64_t row_begin, int64_t row_end, Rows<Value> keys, int64_t num_keys,
                                  Rows<Value> next) {
  if constexpr (kHasTiles && kWordValues<Value> == 2) {
    score_in_tiles(row_begin, row_end, keys, num_keys, next);
  } else {
    with_step<Value>(is_wide_, [&](auto step) {
      using Step = decltype(step);
      constexpr int kKeys = Step::kSums;
      int64_t lane = row_begin;
      if constexpr (kFewSums) {
        return score_in_panels<Step>(row_begin, row_end, keys, num_keys, next);
      }
      for (; row_end - lane > 48; lane += 64) score<Step, 4, 4>(lane, keys, num_keys, next);
      if (row_end - lane > 32) {
        score<Step, kKeys / 2, 3>(lane, keys, num_keys, next);
      } else if (row_end - lane > 16) {
        score<Step, 8, 2>(lane, keys, num_keys, next);
      } else if (row_end - lane > 0) {
        score<Step, kKeys, 1>(lane, keys, num_keys, next);
      }
    });
  }
}

template <class Value>
void Attention<Value>::finish(int64_t row, Value* out) const {
  const float* sums = sums_.data() + row * value_room_;
  const Floats total = floats(peak_[row] == kMinusInfinity ? 1.0f : total_[row]);
  int64_t c = 0;
  if constexpr (kWordValues<Value> == 2) {
    for (; c + 32 <= value_dim_; c += 32) {
      store_ints(out + c, rounded_pairs(load(sums + c) / total, load(sums + c + 16) / total));
    }
  }
  for (; c < value_dim_; c += 16) store_rounded(out + c, lanes(value_dim_ - c), load(sums + c) / total);
}

template class Attention<bf16>;
template class Attention<float>;

}  // namespace batchinfer
