// Page by page with a running softmax, for up to 32 rows that share every key:
//
//   scores   keys x rows      keys · queriesᵀ; queries are interleaved once, so that lanes are rows
//   weights  keys x rows      exp(score - peak), rounded to bfloat16; a page that raises the peak shrinks earlier sums
//   sums     rows x values    weights · values, two keys per step; the page's values are interleaved first
//
// A row meets its keys in ascending order. Keys it may not see weigh nothing: adding them changes no bit.

#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "pair_tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int kTileKeys = 8;
constexpr int kTileRows = 4;
constexpr int kTileChunks = 4;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Scratch {
  alignas(64) float scores[kPageTokens][kAttentionRows];
  alignas(64) int32_t weights[kPageTokens / 2][kAttentionRows];  // of both keys of a pair
  alignas(64) float peak[kAttentionRows], total[kAttentionRows], shrink[kAttentionRows];
  alignas(64) int32_t positions[kAttentionRows];
  std::vector<int32_t> queries;  // [width / 2, 16 * chunks] pairs
  std::vector<float> sums;       // [rows, value_dim]
  std::vector<bf16> values;      // [key pairs, value_dim, 2]
};

// The keys of the next page on their way into the second-level cache, some lines at a time: asking for a whole page at
// once would wait for memory.
struct Fetch {
  const bf16 *at = nullptr, *end = nullptr;
  int64_t lines = 0;  // per tile of this page

  void some() {
    for (int64_t line = 0; line < lines && at < end; ++line, at += 32) {
      _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
    }
  }
};

Fetch fetch_of(Rows page_keys, const AttentionRows& rows) {
  const int64_t num_tiles = kPageTokens / kTileKeys + (rows.num_rows + kTileRows - 1) / kTileRows *
                                                          ((rows.value_dim / kLanes + kTileChunks - 1) / kTileChunks);
  const int64_t num_lines = kPageTokens * page_keys.stride / 32;
  return {page_keys.data, page_keys.data + kPageTokens * page_keys.stride, (num_lines + num_tiles - 1) / num_tiles};
}

void load_queries(Scratch& scratch, const AttentionRows& rows, int64_t lanes) {
  const int64_t num_pairs = rows.width / 2;
  scratch.queries.assign(num_pairs * lanes, 0);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const int32_t* pairs = reinterpret_cast<const int32_t*>(rows.q.data + row * rows.q.stride);
    for (int64_t pair = 0; pair < num_pairs; ++pair) scratch.queries[pair * lanes + row] = pairs[pair];
  }
}

// scores[key][row] = key · q row. Keys behind the last one are computed too, from whatever stands there, and not used.
template <int C>
void score_page(Scratch& scratch, Rows page_keys, int64_t width, int64_t num_keys, Fetch& fetch) {
  for (int64_t key = 0; key < num_keys; key += kTileKeys) {
    fetch.some();
    __m512 sums[kTileKeys][C];
#pragma GCC unroll 8
    for (int r = 0; r < kTileKeys; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) sums[r][c] = _mm512_setzero_ps();
    }
    const Pairs keys{reinterpret_cast<const int32_t*>(page_keys.data + key * page_keys.stride),
                     page_keys.stride / 2, 1};
    add_pairs<kTileKeys, C>(sums, keys, reinterpret_cast<const bf16*>(scratch.queries.data()), 2 * C * kLanes,
                            width / 2);
#pragma GCC unroll 8
    for (int r = 0; r < kTileKeys; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) _mm512_store_ps(scratch.scores[key + r] + c * kLanes, sums[r][c]);
    }
  }
}

// bfloat16 bits of 16 values in the lower half of each lane.
inline __m512i rounded_bits(__m512 values) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)); }

inline __m512 wide_of(__m512i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)); }

// Turns the scores of 16 rows into weights; a row sees the keys up to its position.
void weigh_page(Scratch& scratch, int64_t lane, int64_t start, int64_t num_keys, float scale) {
  const __m512i positions = _mm512_load_si512(scratch.positions + lane);
  const __m512 before = _mm512_load_ps(scratch.peak + lane);
  const int64_t num_even = (num_keys + 1) & ~int64_t{1};
  __m512 peak = before;
  for (int64_t key = 0; key < num_even; ++key) {
    const __mmask16 is_seen =
        key < num_keys ? _mm512_cmple_epi32_mask(_mm512_set1_epi32(static_cast<int>(start + key)), positions) : 0;
    const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(scratch.scores[key] + lane), _mm512_set1_ps(scale));
    const __m512 score = _mm512_mask_blend_ps(is_seen, _mm512_set1_ps(kMinusInfinity), scaled);
    _mm512_store_ps(scratch.scores[key] + lane, score);
    peak = _mm512_max_ps(peak, score);
  }
  const __m512 shrink = exp_values(_mm512_sub_ps(before, peak));
  // the sum of what is multiplied, so that rounding the weights leaves them adding up to one
  __m512 total = _mm512_mul_ps(_mm512_load_ps(scratch.total + lane), shrink);
  for (int64_t key = 0; key < num_even; key += 2) {
    const __m512i even = rounded_bits(exp_values(_mm512_sub_ps(_mm512_load_ps(scratch.scores[key] + lane), peak)));
    const __m512 odd_score = _mm512_load_ps(scratch.scores[key + 1] + lane);
    const __m512i odd = rounded_bits(exp_values(_mm512_sub_ps(odd_score, peak)));
    total = _mm512_add_ps(_mm512_add_ps(total, wide_of(even)), wide_of(odd));
    _mm512_store_si512(scratch.weights[key / 2] + lane, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
  }
  _mm512_store_ps(scratch.shrink + lane, shrink);
  _mm512_store_ps(scratch.total + lane, total);
  _mm512_store_ps(scratch.peak + lane, peak);
}

// values[pair][c] = the value at c of both keys of a pair side by side.
void interleave_page(Scratch& scratch, Rows page_values, int64_t value_dim, int64_t num_keys) {
  for (int64_t key = 0; key < num_keys; key += 2) {
    const bf16* even = page_values.data + key * page_values.stride;
    const bf16* odd = key + 1 < num_keys ? even + page_values.stride : nullptr;
    bf16* out = scratch.values.data() + key * value_dim;
    for (int64_t c = 0; c < value_dim; c += kLanes) interleave(even + c, odd ? odd + c : nullptr, 0xFFFF, out + 2 * c);
  }
}

// sums = sums * shrink + weights · values for R rows and N chunks of 16 values.
template <int R, int N>
void sum_tile(Scratch& scratch, int64_t row, int64_t column, int64_t num_pairs, int64_t value_dim) {
  __m512 sums[R][N];
  float* const at = scratch.sums.data() + row * value_dim + column;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m512 shrink = _mm512_set1_ps(scratch.shrink[row + r]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      sums[r][n] = _mm512_mul_ps(_mm512_loadu_ps(at + r * value_dim + n * kLanes), shrink);
    }
  }
  add_pairs<R, N>(sums, {scratch.weights[0] + row, 1, kAttentionRows}, scratch.values.data() + 2 * column, 2 * value_dim,
                  num_pairs);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(at + r * value_dim + n * kLanes, sums[r][n]);
  }
}

using SumTile = void (*)(Scratch&, int64_t, int64_t, int64_t, int64_t);
constexpr SumTile kSumTiles[kTileRows][kTileChunks] = {
    {sum_tile<1, 1>, sum_tile<1, 2>, sum_tile<1, 3>, sum_tile<1, 4>},
    {sum_tile<2, 1>, sum_tile<2, 2>, sum_tile<2, 3>, sum_tile<2, 4>},
    {sum_tile<3, 1>, sum_tile<3, 2>, sum_tile<3, 3>, sum_tile<3, 4>},
    {sum_tile<4, 1>, sum_tile<4, 2>, sum_tile<4, 3>, sum_tile<4, 4>},
};

void sum_page(Scratch& scratch, int64_t num_rows, int64_t num_keys, int64_t value_dim, Fetch& fetch) {
  const int64_t num_pairs = (num_keys + 1) / 2;
  for (int64_t column = 0; column < value_dim; column += kTileChunks * kLanes) {
    const int64_t chunks = std::min<int64_t>(kTileChunks, (value_dim - column) / kLanes);
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, num_rows - row);
      fetch.some();
      kSumTiles[rows - 1][chunks - 1](scratch, row, column, num_pairs, value_dim);
    }
  }
}

}  // namespace

void attend(const AttentionRows& rows, const PageOf& page_of) {
  static thread_local Scratch scratch;
  const int64_t used_lanes = rows.num_rows > kLanes ? kAttentionRows : kLanes;
  load_queries(scratch, rows, used_lanes);
  scratch.sums.assign(rows.num_rows * rows.value_dim, 0.0f);
  scratch.values.resize(kPageTokens * rows.value_dim);
  std::fill_n(scratch.peak, used_lanes, kMinusInfinity);
  std::fill_n(scratch.total, used_lanes, 0.0f);
  std::fill_n(scratch.positions, used_lanes, 0);  // an empty lane sees one key, so that it computes no NaN
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const int64_t position = rows.positions[(rows.first_row + row) / rows.rows_per_position];
    scratch.positions[row] = static_cast<int32_t>(position);
  }

  for (int64_t start = 0; start < rows.num_tokens; start += kPageTokens) {
    const int64_t num_keys = std::min(kPageTokens, rows.num_tokens - start);
    Fetch fetch;
    if (start + kPageTokens < rows.num_tokens) fetch = fetch_of(page_of.keys(start + kPageTokens), rows);
    const auto score = used_lanes > kLanes ? score_page<2> : score_page<1>;
    score(scratch, page_of.keys(start), rows.width, num_keys, fetch);
    for (int64_t lane = 0; lane < used_lanes; lane += kLanes) weigh_page(scratch, lane, start, num_keys, rows.scale);
    interleave_page(scratch, page_of.values(start), rows.value_dim, num_keys);
    sum_page(scratch, rows.num_rows, num_keys, rows.value_dim, fetch);
  }

  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const __m512 total = _mm512_set1_ps(rows.num_tokens > 0 ? scratch.total[row] : 1.0f);
    const float* sums = scratch.sums.data() + row * rows.value_dim;
    for (int64_t c = 0; c < rows.value_dim; c += kLanes) {
      store_rounded(rows.out + row * rows.out_stride + c, 0xFFFF, _mm512_div_ps(_mm512_loadu_ps(sums + c), total));
    }
  }
}

}  // namespace batchinfer
