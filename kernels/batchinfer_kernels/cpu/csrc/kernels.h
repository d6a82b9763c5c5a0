// The bfloat16 kernels behind the bindings: plain pointers in, plain pointers out, no tensor library.
//
// Every kernel is invariant: a row of the result has the same bits whatever rows are computed beside it, wherever it
// stands and however many threads run. Work is split over rows, columns, heads and requests, never over a sum, and
// every sum has one order.

#pragma once

#include <cstdint>
#include <functional>

namespace batchinfer {

using bf16 = uint16_t;  // the bits of a bfloat16

// Rows of values that are contiguous within a row.
struct Rows {
  const bf16* data;
  int64_t stride;  // values from one row to the next
};

// Rows of one expert: its input, its result and where its activations go.
struct ExpertRows {
  const bf16* x;     // [num_rows, hidden]
  bf16* hidden;      // [num_rows, intermediate], scratch
  bf16* out;         // [num_rows, hidden]
  const bf16* gate_up;  // [2 * intermediate, hidden]
  const bf16* down;     // [hidden, intermediate]
  int64_t num_rows;
};

struct DecodeShape {
  int64_t num_requests, num_queries, num_heads, width, latent_dim, table_pages;
  float scale;
};

struct PrefillShape {
  int64_t num_queries, num_heads, num_keys, context_tokens, nope_dim, rotary_dim, value_dim;
  float scale;
};

// tasks.cpp: calls task(0) … task(num_tasks - 1), each once, on the threads that torch was given.
void run_tasks(int64_t num_tasks, const std::function<void(int64_t)>& task);
int64_t num_threads();

// linear.cpp: out[t, n] = sum over k of x[t, k] * weight[n, k].
void linear(Rows x, Rows weight, bf16* out, int64_t num_rows, int64_t num_columns, int64_t depth);

// batched_matmul.cpp: out[b, t, n] = sum over k of x[b, t, k] * y[b, k, n]; each *_batch is the step to the next batch.
void batched_matmul(Rows x, int64_t x_batch, Rows y, int64_t y_batch, bf16* out, int64_t out_stride, int64_t out_batch,
                    int64_t num_batches, int64_t num_rows, int64_t depth, int64_t num_columns);
// The same with weight[b, n, k] in place of y[b, k, n]; adds in the order of linear.
void batched_linear(Rows x, int64_t x_batch, Rows weight, int64_t weight_batch, bf16* out, int64_t out_stride,
                    int64_t out_batch, int64_t num_batches, int64_t num_rows, int64_t depth, int64_t num_columns);

// expert_mlp.cpp: out = down(silu(gate(x)) * up(x)) of each expert over its rows.
void expert_mlp(const ExpertRows* experts, int64_t num_experts, int64_t hidden, int64_t intermediate);

// mla_decode.cpp: see reference_mla.mla_decode; pages [num_pages, 64, width], width even, latent_dim a multiple of 16.
void mla_decode(const DecodeShape& shape, const bf16* q, const bf16* pages, const int64_t* page_table,
                const int64_t* kv_tokens, const int64_t* positions, bf16* out);

// mla_prefill.cpp: see reference_mla.mla_prefill. kv [num_keys, num_heads, nope_dim + value_dim] is what the latents of
// whole pages become, `rotary` their rotary part, `keys` room for [num_heads, num_keys, nope_dim + rotary_dim].
void mla_prefill(const PrefillShape& shape, const bf16* q, const bf16* kv, Rows rotary, const int64_t* positions,
                 bf16* keys, bf16* out);

// rows.cpp: see reference.rms_norm and reference.silu_mul.
void rms_norm(Rows x, const bf16* weight, float eps, bf16* out, int64_t num_rows, int64_t width);
void silu_mul(Rows gate, Rows up, bf16* out, int64_t num_rows, int64_t width);

}  // namespace batchinfer
