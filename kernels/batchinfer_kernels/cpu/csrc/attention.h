// Softmax attention of up to 64 rows that share their keys; the inside of mla_decode.cpp and mla_prefill.cpp.
//
//   scores   keys x rows      keys · queriesᵀ; queries are interleaved once, so that lanes are rows
//   weights  keys x rows      exp(score - peak), rounded to bfloat16; a page that raises the peak shrinks earlier sums
//   sums     rows x values    weights · values, two keys per step; values are interleaved first
//
// Where few rows share their keys (fewer than 8 heads), lanes are keys instead: keys are turned round, queries are not.
//
// A row meets its pages in ascending order. Keys it may not see weigh nothing: adding them changes no bit. So a row has
// the same bits whatever rows are beside it, and may share some pages with them and go on alone.

#pragma once

#include <vector>

#include "kernels.h"

namespace batchinfer {

constexpr int64_t kPageTokens = 64;
constexpr int64_t kAttentionRows = 64;  // at most, together

enum class Lanes { kRows, kKeys };

class Attention {
 public:
  // The calling thread's own, made ready for rows of `width` values (even) and `value_dim` results (16 or a multiple).
  static Attention& begin(int64_t width, int64_t value_dim, float scale, Lanes lanes);

  // Row `row` (0 … 63) is the query `q` of a token at `position`; `q` must stay where it is.
  void load_query(int64_t row, const bf16* q, int64_t position);

  // Rows [row_begin, row_end) meet `num_keys` keys of one page, which starts at position `start`. A whole page of keys
  // must be readable. `values` are the keys' values, interleaved by `interleave_values`, zero where there is no key.
  // Keys of the page that comes next, `next` (or null), are brought into the cache meanwhile.
  void add_page(int64_t row_begin, int64_t row_end, Rows keys, const bf16* values, int64_t start, int64_t num_keys,
                const bf16* next = nullptr);

  // Interleaves the values of a page into this thread's scratch memory.
  const bf16* interleaved(Rows values, int64_t num_keys);

  // out = the first `count` of the weighted mean of the values that row `row` has seen; zeros when it has seen none.
  void finish(int64_t row, bf16* out, int64_t count) const;

 private:
  template <int K, int C>
  void score(int64_t lane, Rows keys, int64_t num_keys, const bf16* next);
  void weigh(int64_t lane, int64_t row_end, int64_t start, int64_t num_keys);
  void turn_keys(Rows keys, int64_t num_keys, const bf16* next);
  void weigh_row(int64_t row, int64_t start, int64_t num_keys);
  void sum(int64_t row_begin, int64_t row_end, const bf16* values, int64_t num_keys);

  // with lanes of keys [row][key] and [row][pair]
  alignas(64) float scores_[kPageTokens][kAttentionRows];
  alignas(64) int32_t weights_[kPageTokens / 2][kAttentionRows];  // of both keys of a pair
  // with room for whole vectors behind the last row
  alignas(64) float peak_[kAttentionRows + 16], total_[kAttentionRows + 16], shrink_[kAttentionRows + 16];
  alignas(64) int32_t positions_[kAttentionRows + 16];
  Lanes lanes_;
  int64_t width_, value_dim_;
  float factor_;                  // scale / ln 2
  std::vector<int32_t> queries_;  // [width / 2, kAttentionRows] pairs; with lanes of keys the keys
  const bf16* query_rows_[kAttentionRows];
  std::vector<float> sums_;       // [kAttentionRows, value_dim]
  std::vector<bf16> values_;      // [kPageTokens / 2, value_dim, 2]
};

// values[pair][c] = the values at c of keys 2 * pair and 2 * pair + 1 side by side; a key that is not there has zeros.
void interleave_values(Rows values, int64_t value_dim, int64_t num_keys, bf16* out);

}  // namespace batchinfer
