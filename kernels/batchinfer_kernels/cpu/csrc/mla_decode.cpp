// Absorbed latent attention over pages (DeepSeek-V2 report section 2.1.2), page by page with a running softmax.
//
// A task is one request and up to 32 of its rows (queries x heads), which share every key they read:
//
//   scores   keys x rows      keys · queriesᵀ; queries are interleaved once, so that lanes are rows
//   weights  keys x rows      exp(score - peak), rounded to bfloat16; a page that raises the peak shrinks the sums so far
//   sums     rows x latent    weights · latents, two keys per step; the page's latents are interleaved first
//
// A row meets its keys in ascending order, up to its own position, whatever other requests and rows are there.

#include <algorithm>
#include <limits>
#include <vector>

#include "pair_tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kPageTokens = 64;
constexpr int kMostChunks = 2;  // of 16 rows per task
constexpr int64_t kMostRows = kMostChunks * kLanes;
constexpr int kTileKeys = 8;
constexpr int kTileRows = 4;
constexpr int kTileChunks = 4;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Scratch {
  alignas(64) float scores[kPageTokens][kMostRows];
  alignas(64) int32_t weights[kPageTokens / 2][kMostRows];  // of both keys of a pair
  alignas(64) float peak[kMostRows], total[kMostRows], shrink[kMostRows];
  alignas(64) int32_t positions[kMostRows];
  std::vector<int32_t> queries;  // [width / 2, 16 * chunks] pairs
  std::vector<float> sums;       // [rows, latent]
  std::vector<bf16> latents;     // [key pairs, latent, 2]
};

// One task: rows [0, num_rows) of q, C chunks of 16 lanes, of which the last may be partly empty.
struct Work {
  const DecodeShape& shape;
  const bf16* q;
  int64_t num_rows;
};

void load_queries(Scratch& scratch, const Work& work, int64_t lanes) {
  const int64_t num_pairs = work.shape.width / 2;
  scratch.queries.assign(num_pairs * lanes, 0);
  for (int64_t row = 0; row < work.num_rows; ++row) {
    const int32_t* pairs = reinterpret_cast<const int32_t*>(work.q + row * work.shape.width);
    for (int64_t pair = 0; pair < num_pairs; ++pair) scratch.queries[pair * lanes + row] = pairs[pair];
  }
}

// scores[key][row] = key · q row. Keys behind the last one are computed too, from whatever stands there, and not used.
template <int C>
void score_page(Scratch& scratch, const Work& work, const bf16* page, int64_t num_keys) {
  const int64_t width = work.shape.width;
  for (int64_t key = 0; key < num_keys; key += kTileKeys) {
    __m512 sums[kTileKeys][C];
#pragma GCC unroll 8
    for (int r = 0; r < kTileKeys; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) sums[r][c] = _mm512_setzero_ps();
    }
    const Pairs keys{reinterpret_cast<const int32_t*>(page + key * width), width / 2, 1};
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
    const __m512i odd = rounded_bits(exp_values(_mm512_sub_ps(_mm512_load_ps(scratch.scores[key + 1] + lane), peak)));
    total = _mm512_add_ps(_mm512_add_ps(total, wide_of(even)), wide_of(odd));
    _mm512_store_si512(scratch.weights[key / 2] + lane, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
  }
  _mm512_store_ps(scratch.shrink + lane, shrink);
  _mm512_store_ps(scratch.total + lane, total);
  _mm512_store_ps(scratch.peak + lane, peak);
}

// latents[pair][c] = the value at c of both keys of a pair side by side. Meanwhile the next page comes nearer.
void interleave_page(Scratch& scratch, const DecodeShape& shape, const bf16* page, const bf16* next, int64_t num_keys) {
  for (int64_t key = 0; key < num_keys; key += 2) {
    const bf16* even = page + key * shape.width;
    const bf16* odd = key + 1 < num_keys ? even + shape.width : nullptr;
    bf16* out = scratch.latents.data() + key * shape.latent_dim;
    for (int64_t c = 0; c < shape.latent_dim; c += kLanes) {
      interleave(even + c, odd ? odd + c : nullptr, 0xFFFF, out + 2 * c);
    }
    if (next == nullptr) continue;
    for (int64_t c = 0; c < 2 * shape.width; c += 32) {
      _mm_prefetch(reinterpret_cast<const char*>(next + key * shape.width + c), _MM_HINT_T1);
    }
  }
}

// sums = sums * shrink + weights · latents for R rows and N chunks of 16 latent values.
template <int R, int N>
void sum_tile(Scratch& scratch, int64_t row, int64_t column, int64_t num_pairs, int64_t latent_dim) {
  __m512 sums[R][N];
  float* const at = scratch.sums.data() + row * latent_dim + column;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m512 shrink = _mm512_set1_ps(scratch.shrink[row + r]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = _mm512_mul_ps(_mm512_loadu_ps(at + r * latent_dim + n * kLanes), shrink);
  }
  add_pairs<R, N>(sums, {scratch.weights[0] + row, 1, kMostRows}, scratch.latents.data() + 2 * column, 2 * latent_dim,
                  num_pairs);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(at + r * latent_dim + n * kLanes, sums[r][n]);
  }
}

using SumTile = void (*)(Scratch&, int64_t, int64_t, int64_t, int64_t);
constexpr SumTile kSumTiles[kTileRows][kTileChunks] = {
    {sum_tile<1, 1>, sum_tile<1, 2>, sum_tile<1, 3>, sum_tile<1, 4>},
    {sum_tile<2, 1>, sum_tile<2, 2>, sum_tile<2, 3>, sum_tile<2, 4>},
    {sum_tile<3, 1>, sum_tile<3, 2>, sum_tile<3, 3>, sum_tile<3, 4>},
    {sum_tile<4, 1>, sum_tile<4, 2>, sum_tile<4, 3>, sum_tile<4, 4>},
};

void sum_page(Scratch& scratch, int64_t num_rows, int64_t num_keys, int64_t latent_dim) {
  const int64_t num_pairs = (num_keys + 1) / 2;
  for (int64_t column = 0; column < latent_dim; column += kTileChunks * kLanes) {
    const int64_t chunks = std::min<int64_t>(kTileChunks, (latent_dim - column) / kLanes);
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, num_rows - row);
      kSumTiles[rows - 1][chunks - 1](scratch, row, column, num_pairs, latent_dim);
    }
  }
}

// Rows per task: all that share keys, up to kMostRows; fewer when there are not enough tasks for the threads.
int64_t rows_per_task(const DecodeShape& shape) {
  const int64_t num_rows = shape.num_queries * shape.num_heads;
  const int64_t num_tasks = shape.num_requests * ((num_rows + kMostRows - 1) / kMostRows);
  return num_tasks < 2 * num_threads() ? kLanes : kMostRows;
}

}  // namespace

void mla_decode(const DecodeShape& shape, const bf16* q, const bf16* pages, const int64_t* page_table,
                const int64_t* kv_tokens, const int64_t* positions, bf16* out) {
  const int64_t request_rows = shape.num_queries * shape.num_heads;
  const int64_t step = rows_per_task(shape);
  const int64_t tasks_per_request = (request_rows + step - 1) / step;
  const auto page_at = [&](int64_t request, int64_t start) {
    return pages + page_table[request * shape.table_pages + start / kPageTokens] * kPageTokens * shape.width;
  };
  run_tasks(shape.num_requests * tasks_per_request, [&](int64_t task) {
    static thread_local Scratch scratch;
    const int64_t request = task / tasks_per_request, first_row = task % tasks_per_request * step;
    const int64_t num_rows = std::min(step, request_rows - first_row), num_tokens = kv_tokens[request];
    const int64_t row_in_step = request * request_rows + first_row;
    const Work work{shape, q + row_in_step * shape.width, num_rows};
    const int64_t used_lanes = num_rows > kLanes ? kMostRows : kLanes;
    load_queries(scratch, work, used_lanes);
    scratch.sums.assign(num_rows * shape.latent_dim, 0.0f);
    scratch.latents.resize(kPageTokens * shape.latent_dim);
    std::fill_n(scratch.peak, used_lanes, kMinusInfinity);
    std::fill_n(scratch.total, used_lanes, 0.0f);
    std::fill_n(scratch.positions, used_lanes, 0);  // an empty lane sees one key, so that it computes no NaN
    for (int64_t row = 0; row < num_rows; ++row) {
      scratch.positions[row] = static_cast<int32_t>(positions[(row_in_step + row) / shape.num_heads]);
    }

    for (int64_t start = 0; start < num_tokens; start += kPageTokens) {
      const int64_t num_keys = std::min(kPageTokens, num_tokens - start);
      const bf16* page = page_at(request, start);
      const bf16* next = start + kPageTokens < num_tokens ? page_at(request, start + kPageTokens) : nullptr;
      used_lanes > kLanes ? score_page<2>(scratch, work, page, num_keys) : score_page<1>(scratch, work, page, num_keys);
      for (int64_t lane = 0; lane < used_lanes; lane += kLanes) weigh_page(scratch, lane, start, num_keys, shape.scale);
      interleave_page(scratch, shape, page, next, num_keys);
      sum_page(scratch, num_rows, num_keys, shape.latent_dim);
    }

    for (int64_t row = 0; row < num_rows; ++row) {
      const __m512 total = _mm512_set1_ps(num_tokens > 0 ? scratch.total[row] : 1.0f);
      const float* sums = scratch.sums.data() + row * shape.latent_dim;
      bf16* at = out + (row_in_step + row) * shape.latent_dim;
      for (int64_t c = 0; c < shape.latent_dim; c += kLanes) {
        store_rounded(at + c, 0xFFFF, _mm512_div_ps(_mm512_loadu_ps(sums + c), total));
      }
    }
  });
}

}  // namespace batchinfer
