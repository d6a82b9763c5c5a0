// The kernels behind the bindings: plain pointers in, plain pointers out, no tensor library.
//
// Every kernel is invariant: a row of the result has the same bits whatever rows are computed beside it, wherever it
// stands and however many threads run. Work is split over rows, columns, heads and requests, never over a sum, and
// every sum has one order.

#pragma once

#include <cstdint>
#include <functional>

namespace batchinfer {

using bf16 = uint16_t;  // the bits of a bfloat16

constexpr int64_t kPanelColumns = 64;
constexpr int64_t kBlock = 128;  // values that share a scale, in rows of x and in both directions of a weight

// Rows of values that are contiguous within a row; with an index, row i is row index[i] of the data.
struct Rows {
  const bf16* data;
  int64_t stride;  // values from one row to the next
  const int64_t* index = nullptr;

  const bf16* at(int64_t row) const { return data + (index ? index[row] : row) * stride; }
};

// Rows rounded to 8 bits with one scale per kBlock values; values are moved up by 128 to be unsigned.
struct ByteRows {
  const uint8_t* data;  // [rows, blocks * kBlock]
  const float* scales;  // [rows, blocks]
  int64_t num_blocks;
  const int64_t* index = nullptr;
};

enum class WeightKind { kBfloat16, kInt8 };

// A weight [num_columns, depth] packed for the tiles (pack.cpp), or several of them one after the other. In a paired
// weight the upper half of the columns stands beside the lower half: a panel has 32 of each.
struct Weight {
  const uint8_t* data;
  WeightKind kind;
  int64_t num_columns, depth;
  bool is_paired = false;

  int64_t num_panels() const {
    const int64_t columns = is_paired ? num_columns / 2 : num_columns, each = kPanelColumns / (is_paired ? 2 : 1);
    return (columns + each - 1) / each;
  }
  int64_t num_blocks() const { return (depth + kBlock - 1) / kBlock; }
  int64_t panel_bytes() const;
  int64_t bytes() const { return num_panels() * panel_bytes(); }
  const uint8_t* panel(int64_t number) const { return data + number * panel_bytes(); }
};

// Rows of one expert among the rows that were sorted by expert.
struct ExpertRows {
  int64_t first, num_rows;
};

struct DecodeShape {
  int64_t num_requests, num_queries, num_heads, width, latent_dim, table_pages;
  float scale;
};

// tasks.cpp: calls task(0) … task(num_tasks - 1), each once, on the threads that torch was given; on the calling one
// alone when all of it takes about `nanoseconds` and that is less than waking the others.
void run_tasks(int64_t num_tasks, double nanoseconds, const std::function<void(int64_t)>& task);
void run_tasks(int64_t num_tasks, const std::function<void(int64_t)>& task);
int64_t num_threads();

// pack.cpp: packs `source` [num_columns, depth] for the tiles; 8-bit weights are rounded block by block.
struct Parts {  // rows of depth values, one per column of the result, in equal parts one behind the other
  std::vector<const bf16*> starts;
  int64_t part_columns, depth;
  const bf16* column(int64_t index) const { return starts[index / part_columns] + index % part_columns * depth; }
};
void pack(const Parts& source, const Weight& shape, uint8_t* packed);

// linear.cpp: out[t, n] = sum over k of x[t, k] * weight[n, k]. Depth is even; 8-bit weights take ByteRows. The rounded
// result is added to `stream` [t, n] unless that is null.
void linear(Rows x, const Weight& weight, const bf16* stream, bf16* out, int64_t num_rows);
void linear(ByteRows x, const Weight& weight, const bf16* stream, bf16* out, int64_t num_rows);
void linear(Rows x, const Weight& weight, float* out, int64_t num_rows);
// The same for every batch with a weight of its own; each *_batch is the step to the next batch.
void batched_linear(Rows x, int64_t x_batch, const Weight& weights, bf16* out, int64_t out_stride, int64_t out_batch,
                    int64_t num_batches, int64_t num_rows);
// Router logits in float32: weight [num_columns, depth] float32 packed as [panels, depth, 64].
void router(Rows x, const float* packed, float* out, int64_t num_rows, int64_t num_columns, int64_t depth);

// expert_mlp.cpp: out = down(silu(gate(x)) * up(x)) of each expert over its rows.
// `gate_up` (paired) and `down` are the first expert's, the others' follow. The rounded results are added to `stream`
// unless that is null.
void expert_mlp(Rows x, const ExpertRows* experts, int64_t num_experts, const Weight& gate_up, const Weight& down,
                const bf16* stream, bf16* out);
void expert_mlp(ByteRows x, const ExpertRows* experts, int64_t num_experts, const Weight& gate_up, const Weight& down,
                const bf16* stream, bf16* out);

// rows.cpp
void rms_norm(Rows x, const bf16* weight, float eps, bf16* out, int64_t num_rows, int64_t width);
void silu_mul(Rows gate, Rows up, bf16* out, int64_t num_rows, int64_t width);
// out = (hidden + bfloat16(sum + added)); see reference.add_sums. `added` may be null.
void add_sums(const bf16* hidden, const float* sums, const bf16* added, bf16* out, int64_t num_values);
void to_bytes(Rows x, uint8_t* out, float* scales, int64_t num_rows, int64_t width);
// sums[t] = sum over k of weights[t, k] * rows[place[t, k]], products and sums rounded one by one.
void sum_per_token(const bf16* rows, const int64_t* place, const float* weights, float* sums, int64_t num_tokens,
                   int64_t topk, int64_t width);
// Both at once: hidden + bfloat16(sum over k of weights[t, k] * rows[place[t, k]] + added[t]).
void combine(const bf16* hidden, const bf16* rows, const int64_t* place, const float* weights, const bf16* added,
             bf16* out, int64_t num_tokens, int64_t topk, int64_t width);

// rope.cpp: turns `num_heads` groups of `rotary` values per row in place.
struct Rotary {
  const float *cos, *sin;  // [rows, rotary / 2]
  int64_t rotary;
  bool is_interleaved;
};
void rope(bf16* x, int64_t row_stride, int64_t head_stride, int64_t num_heads, int64_t num_rows, const Rotary& rotary);
// Latent rows [latent | rotary]: norm and turn them, write each to its slot of the pages.
void write_latents(Rows x, const bf16* norm, float eps, const Rotary& rotary, int64_t latent_dim,
                   const int64_t* slots, bf16* pages, int64_t num_rows);

// gate.cpp: see reference.gate, method "noaux_tc".
struct GateShape {
  int64_t num_tokens, num_experts, topk, num_groups, topk_groups;
  bool normalize;
  float scale;
};
void gate(const GateShape& shape, const float* logits, const float* bias, int64_t* ids, float* weights);
// order: the (token, k) entries sorted by expert, tokens in order within one; place: its inverse.
void sort_by_expert(const int64_t* ids, int64_t num_entries, int64_t num_experts, int64_t* order, int64_t* place,
                    int64_t* counts);

// sampling.cpp: the largest value of each row, the first among equals, and whether all values are finite.
void argmax(const float* logits, int64_t num_rows, int64_t num_columns, int64_t* tokens, bool* is_finite);

// mla_decode.cpp: see reference_mla.mla_decode; pages [num_pages, 64, width], width even, latent_dim a multiple of 16.
void mla_decode(const DecodeShape& shape, const bf16* q, const bf16* pages, const int64_t* page_table,
                const int64_t* kv_tokens, const int64_t* positions, bf16* out);

// mla_prefill.cpp: see reference_mla.mla_prefill.
struct PrefillShape {
  int64_t num_heads, nope_dim, rotary_dim, value_dim, latent_dim;
  float scale;
};
struct PrefillChunk {
  int64_t first_row, num_rows, context_tokens;
  const int64_t* page_ids;
};
void mla_prefill(const PrefillShape& shape, const PrefillChunk* chunks, int64_t num_chunks, const bf16* q,
                 const bf16* pages, const int64_t* positions, const Weight& kv_up, bf16* out);

}  // namespace batchinfer
