// Absorbed latent attention over pages (DeepSeek-V2 report section 2.1.2), page by page with a running softmax.
//
// A task is one request and some of its rows (queries x heads), which share every key they read:
//
//   scores   rows x 64 keys         the dot tile of linear: latents are contiguous along the sum
//   weights  exp(score - peak)      rounded to bfloat16; when a page raises the peak, sums so far shrink by exp(old - new)
//   sums     rows x latent          weights x latents, two keys per step: latents of a pair are interleaved first
//
// A row meets its keys in ascending order, up to its own position, whatever other requests are there.

#include <limits>
#include <vector>

#include "dot_tile.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kPageTokens = 64;
constexpr int64_t kMostRows = 32;
constexpr int64_t kChunk = 16;  // latent values in a float32 vector
constexpr int kTileChunks = 4;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Scratch {
  alignas(64) float scores[kMostRows][kPageTokens];
  alignas(64) bf16 weights[kMostRows][kPageTokens];
  float peak[kMostRows], total[kMostRows], shrink[kMostRows];
  std::vector<float> sums;    // [rows, latent]
  std::vector<bf16> latents;  // [key pairs, latent, 2]
};

// scores[r][key] = q row r · key.
void score_page(Scratch& scratch, const bf16* q, int64_t num_rows, const bf16* page, int64_t num_keys, int64_t width) {
  const int64_t num_passes = (num_rows + kTileRows - 1) / kTileRows;
  alignas(64) float values[kTileValues];
  for (int64_t key = 0; key < num_keys; key += kTileColumns) {
    const int64_t keys = std::min<int64_t>(kTileColumns, num_keys - key);
    const bf16* first = page + key * width;
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, num_rows - row);
      const Ahead ahead = Ahead::of_pass(first + kTileColumns * width, first + (kTileColumns + kTileColumns / 2) * width,
                                         width, row / kTileRows, num_passes);
      dot_tile_of(rows, keys)(q + row * width, width, first, first + (keys + 1) / 2 * width, width, width, ahead,
                              values);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < keys; ++c) scratch.scores[row + r][key + c] = values[r * keys + c];
      }
    }
  }
}

// Turns a row's scores into weights; `num_seen` of the page's keys count.
void weigh_page(Scratch& scratch, int64_t row, int64_t num_seen, float scale) {
  __m512 scores[4];
  __m512 peaks = _mm512_set1_ps(scratch.peak[row]);
  for (int i = 0; i < 4; ++i) {
    const __mmask16 mask = num_seen > 16 * i ? lanes(num_seen - 16 * i) : 0;
    const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(scratch.scores[row] + 16 * i), _mm512_set1_ps(scale));
    scores[i] = _mm512_mask_blend_ps(mask, _mm512_set1_ps(kMinusInfinity), scaled);
    peaks = _mm512_max_ps(peaks, scores[i]);
  }
  const __m512 peak = _mm512_set1_ps(_mm512_reduce_max_ps(peaks));
  __m512 total = _mm512_setzero_ps();
  for (int i = 0; i < 4; ++i) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(exp_values(_mm512_sub_ps(scores[i], peak)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(scratch.weights[row] + 16 * i), rounded);
    // the sum of what is multiplied, so that rounding the weights leaves them adding up to one
    total = _mm512_add_ps(total, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
  }
  const __m512 quarters = add_lanes(total, total, total, total);
  const __m512 halves = add_groups(quarters, quarters);
  const __m512 shrink = exp_values(_mm512_sub_ps(_mm512_set1_ps(scratch.peak[row]), peak));
  scratch.shrink[row] = _mm512_cvtss_f32(shrink);
  scratch.peak[row] = _mm512_cvtss_f32(peak);
  scratch.total[row] = scratch.total[row] * scratch.shrink[row] + _mm512_cvtss_f32(add_groups(halves, halves));
}

// latents[pair][c] = the value at c of both keys of a pair side by side; a missing second key counts as zero.
void interleave_page(Scratch& scratch, const bf16* page, int64_t num_keys, int64_t width, int64_t latent_dim) {
  for (int64_t key = 0; key < num_keys; key += 2) {
    const bf16* even = page + key * width;
    const __mmask16 has_odd = key + 1 < num_keys ? 0xFFFF : 0;
    bf16* out = scratch.latents.data() + key * latent_dim;
    for (int64_t c = 0; c < latent_dim; c += kChunk) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + c)));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_odd, even + width + c));
      _mm512_storeu_si512(out + 2 * c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
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
    for (int n = 0; n < N; ++n) {
      sums[r][n] = _mm512_mul_ps(_mm512_loadu_ps(at + r * latent_dim + n * kChunk), shrink);
    }
  }
  const bf16* latents = scratch.latents.data() + 2 * column;
  for (int64_t pair = 0; pair < num_pairs; ++pair, latents += 2 * latent_dim) {
    __m512bh values[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) values[n] = (__m512bh)_mm512_loadu_si512(latents + 2 * n * kChunk);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int both = reinterpret_cast<const int*>(scratch.weights[row + r])[pair];
      const __m512bh weights = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], weights, values[n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(at + r * latent_dim + n * kChunk, sums[r][n]);
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
  for (int64_t column = 0; column < latent_dim; column += kTileChunks * kChunk) {
    const int64_t chunks = std::min<int64_t>(kTileChunks, (latent_dim - column) / kChunk);
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, num_rows - row);
      kSumTiles[rows - 1][chunks - 1](scratch, row, column, num_pairs, latent_dim);
    }
  }
}

// Rows per task: all that share keys, up to kMostRows; fewer when there are not enough tasks for the threads.
int64_t rows_per_task(const DecodeShape& shape) {
  const int64_t num_rows = shape.num_queries * shape.num_heads;
  int64_t rows = kMostRows;
  while (rows > kTileRows && shape.num_requests * ((num_rows + rows - 1) / rows) < 2 * num_threads()) rows /= 2;
  return rows;
}

}  // namespace

void mla_decode(const DecodeShape& shape, const bf16* q, const bf16* pages, const int64_t* page_table,
                const int64_t* kv_tokens, const int64_t* positions, bf16* out) {
  const int64_t request_rows = shape.num_queries * shape.num_heads;
  const int64_t step = rows_per_task(shape);
  const int64_t tasks_per_request = (request_rows + step - 1) / step;
  run_tasks(shape.num_requests * tasks_per_request, [&](int64_t task) {
    static thread_local Scratch scratch;
    const int64_t request = task / tasks_per_request, first_row = task % tasks_per_request * step;
    const int64_t num_rows = std::min(step, request_rows - first_row);
    const int64_t row_in_step = request * request_rows + first_row;
    scratch.sums.assign(num_rows * shape.latent_dim, 0.0f);
    scratch.latents.resize(kPageTokens * shape.latent_dim);
    std::fill_n(scratch.peak, num_rows, kMinusInfinity);
    std::fill_n(scratch.total, num_rows, 0.0f);

    for (int64_t start = 0; start < kv_tokens[request]; start += kPageTokens) {
      const int64_t num_keys = std::min(kPageTokens, kv_tokens[request] - start);
      const int64_t page_id = page_table[request * shape.table_pages + start / kPageTokens];
      const bf16* page = pages + page_id * kPageTokens * shape.width;
      score_page(scratch, q + row_in_step * shape.width, num_rows, page, num_keys, shape.width);
      for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t position = positions[(row_in_step + row) / shape.num_heads];
        weigh_page(scratch, row, std::min(num_keys, position + 1 - start), shape.scale);
      }
      interleave_page(scratch, page, num_keys, shape.width, shape.latent_dim);
      sum_page(scratch, num_rows, num_keys, shape.latent_dim);
    }

    for (int64_t row = 0; row < num_rows; ++row) {
      const __m512 total = _mm512_set1_ps(kv_tokens[request] > 0 ? scratch.total[row] : 1.0f);
      const float* sums = scratch.sums.data() + row * shape.latent_dim;
      bf16* at = out + (row_in_step + row) * shape.latent_dim;
      for (int64_t c = 0; c < shape.latent_dim; c += kChunk) {
        store_rounded(at + c, 0xFFFF, _mm512_div_ps(_mm512_loadu_ps(sums + c), total));
      }
    }
  });
}

}  // namespace batchinfer
