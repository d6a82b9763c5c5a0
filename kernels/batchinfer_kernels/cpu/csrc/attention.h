// Softmax attention of a few rows that share their keys; the inside of mla_decode.cpp and mla_prefill.cpp.

#pragma once

#include "kernels.h"

namespace batchinfer {

constexpr int64_t kPageTokens = 64;
constexpr int64_t kAttentionRows = 32;  // at most, per call

struct AttentionRows {
  Rows q;                    // `width` values each; width and the strides of keys are even
  const int64_t* positions;  // of row i at positions[i / rows_per_position]; a row sees keys up to there
  int64_t first_row, rows_per_position;
  int64_t num_rows, num_tokens, width, value_dim;  // value_dim is a multiple of 16
  float scale;
  bf16* out;
  int64_t out_stride;
};

// Finds the keys and the values of the page that starts at a token, [64, width] and [64, value_dim]. A whole page of
// keys must be readable; what stands behind the last token has no influence.
struct PageOf {
  virtual Rows keys(int64_t start) const = 0;
  virtual Rows values(int64_t start) const = 0;
};

// out = softmax(q · keysᵀ * scale) · values; a row has the same bits whatever rows are beside it.
void attend(const AttentionRows& rows, const PageOf& page_of);

}  // namespace batchinfer
