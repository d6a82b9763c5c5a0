#include "attention.h"

#include <algorithm>
#include <limits>

#include "tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

// bfloat16 bits of 16 values in the lower half of each lane.
inline __m512i rounded_bits(__m512 values) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)); }

inline __m512 wide_of(__m512i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)); }

// 16 values of two rows side by side.
inline void interleave(const bf16* even, const bf16* odd, bf16* out) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
  const __m512i high =
      odd ? _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd))) : _mm512_setzero_si512();
  _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// 32 values of two rows side by side.
inline void interleave_32(const bf16* even, const bf16* odd, bf16* out) {
  const __m512i places = _mm512_add_epi32(_mm512_set1_epi32(0x00200000),  // value i of even, then of odd
                                          _mm512_mullo_epi32(_mm512_set1_epi32(0x00010001),
                                                             _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4,
                                                                              3, 2, 1, 0)));
  const __m512i low = _mm512_loadu_si512(even), high = _mm512_loadu_si512(odd);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(low, places, high));
  const __m512i later = _mm512_add_epi16(places, _mm512_set1_epi16(16));
  _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(low, later, high));
}

// What a new peak makes of earlier sums: exactly 1 where the peak has not changed.
inline __m512 shrink_of(__m512 before, __m512 peak, __m512 factor, __m512 offset) {
  const __m512 shrink = exp2_values(_mm512_fmsub_ps(before, factor, offset));
  return _mm512_mask_mov_ps(shrink, _mm512_cmp_ps_mask(before, peak, _CMP_EQ_OQ), _mm512_set1_ps(1.0f));
}

// Asks for values that come soon, into the second level: the first has fewer reads from memory under way at a time.
inline void fetch(const bf16* values, int64_t count) {
  for (int64_t i = 0; i < count; i += 32) _mm_prefetch(reinterpret_cast<const char*>(values + i), _MM_HINT_T1);
}

// Weights of rows, two keys side by side.
struct Pairs {
  const int32_t* data;
  int64_t row_stride, pair_stride;
};

// Turns 16 x 16 values of 32 bits: out[i][j] = rows[j][i] for `count` of the i; rows end after `count` values.
void turn_16(const int32_t* rows, int64_t row_stride, int64_t count, int32_t* out, int64_t out_stride) {
  __m512i a[16], b[16];
  const __mmask16 mask = lanes(count);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(mask, rows + i * row_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i first = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), second = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xDD);
    const __m512i third = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    const __m512i fourth = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xDD);
    b[i] = _mm512_shuffle_i32x4(first, third, 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(second, fourth, 0x88);
    b[i + 8] = _mm512_shuffle_i32x4(first, third, 0xDD);
    b[i + 12] = _mm512_shuffle_i32x4(second, fourth, 0xDD);
  }
  for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(out + i * out_stride, b[i]);
}

// sums = sums * shrink + weights · values for R rows and N chunks of 16 values.
template <int R, int N>
void sum_tile(float* sums_at, const float* shrink, Pairs weights, const bf16* values, int64_t num_pairs,
              int64_t value_dim) {
  __m512 sums[R][N];
  const int32_t* pairs[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    pairs[r] = weights.data + r * weights.row_stride;
    const __m512 factor = _mm512_set1_ps(shrink[r]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      sums[r][n] = _mm512_mul_ps(_mm512_loadu_ps(sums_at + r * value_dim + 16 * n), factor);
    }
  }
  add_pairs<R, N>(sums, pairs, weights.pair_stride, values, 2 * value_dim, num_pairs);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(sums_at + r * value_dim + 16 * n, sums[r][n]);
  }
}

using SumTile = void (*)(float*, const float*, Pairs, const bf16*, int64_t, int64_t);
template <int R>
constexpr SumTile kSumTiles[4] = {sum_tile<R, 1>, sum_tile<R, 2>, sum_tile<R, 3>, sum_tile<R, 4>};

}  // namespace

void interleave_values(Rows values, int64_t value_dim, int64_t num_keys, bf16* out) {
  for (int64_t key = 0; key < num_keys; key += 2) {
    const bf16* even = values.at(key);
    const bf16* odd = key + 1 < num_keys ? values.at(key + 1) : nullptr;
    bf16* at = out + key * value_dim;
    int64_t c = 0;
    for (; odd && c + 32 <= value_dim; c += 32) interleave_32(even + c, odd + c, at + 2 * c);
    for (; c < value_dim; c += 16) interleave(even + c, odd ? odd + c : nullptr, at + 2 * c);
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
    __m512 sums[K][C];
    const int32_t* pairs[K];
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      pairs[k] = reinterpret_cast<const int32_t*>(keys.at(key + k));
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[k][c] = _mm512_setzero_ps();
    }
    const bf16* queries = reinterpret_cast<const bf16*>(queries_.data() + lane);
    const bf16* coming = next ? next + key * keys.stride : keys.at(key);
    for (int64_t line = 0; line < num_lines; ++line, coming += 32) {
      _mm_prefetch(reinterpret_cast<const char*>(coming), _MM_HINT_T1);
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
          _mm512_storeu_ps(scores_[key + k] + lane + 16 * c, sums[k][c]);
        } else {
          _mm512_mask_storeu_ps(scores_[key + k] + lane + 16 * c, lanes(kAttentionRows - lane - 16 * c), sums[k][c]);
        }
      }
    }
  }
}

// Turns the scores of up to 16 rows into weights; a row sees the keys up to its position.
void Attention::weigh(int64_t lane, int64_t row_end, int64_t start, int64_t num_keys) {
  const __mmask16 mask = lanes(row_end - lane);
  const __m512i positions = _mm512_loadu_si512(positions_ + lane);
  const __m512 before = _mm512_loadu_ps(peak_ + lane);
  const int64_t num_even = (num_keys + 1) & ~int64_t{1};
  const __m512i last = _mm512_set1_epi32(static_cast<int>(start + num_even - 1));
  const bool sees_all = num_even == num_keys && !_mm512_mask_cmplt_epi32_mask(mask, positions, last);
  __m512 peak = before;
  if (sees_all) {
    for (int64_t key = 0; key < num_even; ++key) {
      peak = _mm512_max_ps(peak, _mm512_maskz_loadu_ps(mask, scores_[key] + lane));
    }
  } else {
    for (int64_t key = 0; key < num_even; ++key) {
      const __mmask16 is_seen =
          key < num_keys ? _mm512_cmple_epi32_mask(_mm512_set1_epi32(static_cast<int>(start + key)), positions) : 0;
      const __m512 score = _mm512_mask_blend_ps(is_seen, _mm512_set1_ps(kMinusInfinity),
                                                _mm512_maskz_loadu_ps(mask, scores_[key] + lane));
      _mm512_mask_storeu_ps(scores_[key] + lane, mask, score);
      peak = _mm512_max_ps(peak, score);
    }
  }
  const __m512 factor = _mm512_set1_ps(factor_), offset = _mm512_mul_ps(peak, factor);
  const __m512 shrink = shrink_of(before, peak, factor, offset);
  // the sum of what is multiplied, so that rounding the weights leaves them adding up to one
  __m512 total = _mm512_mul_ps(_mm512_loadu_ps(total_ + lane), shrink);
  for (int64_t key = 0; key < num_even; key += 2) {
    const __m512 even_score = _mm512_maskz_loadu_ps(mask, scores_[key] + lane);
    const __m512 odd_score = _mm512_maskz_loadu_ps(mask, scores_[key + 1] + lane);
    const __m512i even = rounded_bits(exp2_values(_mm512_fmsub_ps(even_score, factor, offset)));
    const __m512i odd = rounded_bits(exp2_values(_mm512_fmsub_ps(odd_score, factor, offset)));
    total = _mm512_add_ps(_mm512_add_ps(total, wide_of(even)), wide_of(odd));
    _mm512_mask_storeu_epi32(weights_[key / 2] + lane, mask, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
  }
  _mm512_mask_storeu_ps(shrink_ + lane, mask, shrink);
  _mm512_mask_storeu_ps(total_ + lane, mask, total);
  _mm512_mask_storeu_ps(peak_ + lane, mask, peak);
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
  const __m512i steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const int64_t num_seen = std::min<int64_t>(num_keys, positions_[row] - start + 1);
  __m512 scores[kPageTokens / 16];
  __m512 most = _mm512_set1_ps(kMinusInfinity);
#pragma GCC unroll 4
  for (int n = 0; n < kPageTokens / 16; ++n) {
    const __mmask16 is_seen =
        _mm512_cmplt_epi32_mask(_mm512_add_epi32(steps, _mm512_set1_epi32(16 * n)),
                                _mm512_set1_epi32(static_cast<int>(num_seen)));
    scores[n] = _mm512_mask_blend_ps(is_seen, _mm512_set1_ps(kMinusInfinity), _mm512_load_ps(scores_[row] + 16 * n));
    most = _mm512_max_ps(most, scores[n]);
  }
  const __m512 before = _mm512_set1_ps(peak_[row]);
  const __m512 peak = _mm512_max_ps(before, _mm512_set1_ps(_mm512_reduce_max_ps(most)));
  const __m512 factor = _mm512_set1_ps(factor_), offset = _mm512_mul_ps(peak, factor);
  __m512 total = _mm512_setzero_ps();
  bf16* const weights = reinterpret_cast<bf16*>(&weights_[0][0]) + row * kPageTokens;
#pragma GCC unroll 4
  for (int n = 0; n < kPageTokens / 16; ++n) {
    const __m512 weight = exp2_values(_mm512_fmsub_ps(scores[n], factor, offset));
    store_rounded(weights + 16 * n, 0xFFFF, weight);
    total = _mm512_add_ps(total, rounded(weight));
  }
  shrink_[row] = _mm512_cvtss_f32(shrink_of(before, peak, factor, offset));
  total_[row] = total_[row] * shrink_[row] + _mm512_reduce_add_ps(total);
  peak_[row] = _mm512_cvtss_f32(peak);
}

void Attention::sum(int64_t row_begin, int64_t row_end, const bf16* values, int64_t num_keys) {
  const int64_t num_pairs = (num_keys + 1) / 2;
  const Pairs weights = lanes_ == Lanes::kRows ? Pairs{weights_[0], 1, kAttentionRows}
                                               : Pairs{weights_[0], kPageTokens / 2, 1};
  for (int64_t column = 0; column < value_dim_; column += 64) {
    const int64_t chunks = std::min<int64_t>(4, (value_dim_ - column) / 16);
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      with_rows(std::min(kTileRows, row_end - row), [&](auto count) {
        kSumTiles<count>[chunks - 1](sums_.data() + row * value_dim_ + column, shrink_ + row,
                                     {weights.data + row * weights.row_stride, weights.row_stride, weights.pair_stride},
                                     values + 2 * column, num_pairs, value_dim_);
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
      with_rows(rows, [&](auto count) { bf16_tile<count, kChunks>(query_rows_ + row, panel, width_, scores_[row], true); });
    }
    for (int64_t row = row_begin; row < row_end; ++row) weigh_row(row, start, num_keys);
    sum(row_begin, row_end, values, num_keys);
    return;
  }
  int64_t lane = row_begin;
  for (; row_end - lane > 48; lane += 64) score<4, 4>(lane, keys, num_keys, next);
  if (row_end - lane > 32) {
    score<4, 3>(lane, keys, num_keys, next);
  } else if (row_end - lane > 16) {
    score<8, 2>(lane, keys, num_keys, next);
  } else if (row_end - lane > 0) {
    score<8, 1>(lane, keys, num_keys, next);
  }
  for (lane = row_begin; lane < row_end; lane += 16) weigh(lane, row_end, start, num_keys);
  sum(row_begin, row_end, values, num_keys);
}

void Attention::finish(int64_t row, bf16* out, int64_t count) const {
  const float* sums = sums_.data() + row * value_dim_;
  const __m512 total = _mm512_set1_ps(peak_[row] == kMinusInfinity ? 1.0f : total_[row]);
  for (int64_t c = 0; c < count; c += 16) {
    store_rounded(out + c, lanes(count - c), _mm512_div_ps(_mm512_loadu_ps(sums + c), total));
  }
}

}  // namespace batchinfer
