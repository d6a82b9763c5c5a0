// The kernels behind the bindings: plain pointers in, plain pointers out, no tensor library.
//
// Every kernel is invariant: a row of the result has the same bits with any other rows, at any position and with any number
// of threads. Work is split over rows, columns, heads and requests, never over a sum, and every sum has one order.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

namespace batchinfer {

using bf16 = uint16_t;  // the bits of a bfloat16
inline float wide_of(bf16 value) { return std::bit_cast<float>(uint32_t{value} << 16); }

// Kernels with a parameter Value exist for bf16 and float: the type of activations, pages and results of a model.

constexpr int64_t kPanelColumns = 64;
constexpr int64_t kBlock = 128;  // values that share a scale, in rows of x and in both directions of a weight in 8 bits
constexpr int64_t kGroup = 32;   // values of a column that share a scale in a weight in 4 bits

// Rows of values that are contiguous within a row; with an index, row i is row index[i] of the data.
template <class V>
struct Rows {
  using Value = V;

  const V* data = nullptr;
  int64_t stride = 0;  // values from one row to the next
  const int64_t* index = nullptr;

  const V* at(int64_t row) const { return data + (index ? index[row] : row) * stride; }
};

// Rows rounded to 8 bits with one scale per kBlock values. For weights in 8 bits values are signed where they are multiplied
// in tiles, else moved up by 128 to be unsigned; for those in 4 bits, which are unsigned themselves, they are signed and come
// with what sums begin at.
struct ByteRows {
  using Value = bf16;  // that they were rounded from

  const uint8_t* data;    // [rows, blocks * kBlock]
  const float* scales;    // [rows, blocks]
  const int32_t* starts;  // [rows, blocks * kBlock / kGroup], -8 times the sum of a group; null for weights in 8 bits
  int64_t num_blocks;
  const int64_t* index = nullptr;
};

enum class WeightKind : int64_t { kBfloat16, kInt8, kFloat32, kInt4, kFp4 };  // as in packed.py

inline bool takes_bytes(WeightKind kind) { return kind == WeightKind::kInt8 || kind == WeightKind::kInt4; }

template <class Value>
constexpr WeightKind kKindOf = sizeof(Value) == sizeof(bf16) ? WeightKind::kBfloat16 : WeightKind::kFloat32;

// A weight [num_columns, depth] packed for the tiles (pack.cpp), or several of them one after the other. In a paired
// weight the upper half of the columns is next to the lower half: a panel has 32 of each.
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
  int64_t num_groups() const { return (depth + kGroup - 1) / kGroup; }
  int64_t panel_bytes() const;
  int64_t bytes() const { return num_panels() * panel_bytes(); }
  const uint8_t* panel(int64_t number) const { return data + number * panel_bytes(); }
};

// Rows of one expert among the rows that were sorted by expert.
struct ExpertRows {
  int64_t first, num_rows;
};

// Query heads in equal groups, each with one key head. In pages the next token's row begins `row_step` values later; in a row
// there are keys of `width`, one per key head, and from value `first_value` on values of `value_dim`.
struct GroupedHeads {
  int64_t num_heads, num_kv_heads, width, row_step, first_value, value_dim;
  float scale;
  int64_t window = 0;            // of the last keys that a token sees; 0: all
  const float* sinks = nullptr;  // a score of each query head without a value, or null

  // Where row `row` of a key head is: its query heads at token `token`, then at the next ones.
  int64_t row_of(int64_t token, int64_t key_head, int64_t row) const {
    const int64_t group = num_heads / num_kv_heads;
    return (token + row / group) * num_heads + key_head * group + row % group;
  }
};
struct DecodeShape : GroupedHeads {
  int64_t num_requests, num_queries, table_pages;
};

// tasks.cpp: calls task(0) … task(num_tasks - 1), each once, on the threads that torch was given; on the calling one
// alone when all of it takes about `nanoseconds` and that is less than waking the others.
void run_tasks(int64_t num_tasks, double nanoseconds, const std::function<void(int64_t)>& task);
void run_tasks(int64_t num_tasks, const std::function<void(int64_t)>& task);
int64_t num_threads();

// pairs.cpp: whether products of two bfloat16 at a time are quicker here than in float32; the bits are the same.
bool pairs_are_quick();
// For tests: pairs by their instruction (1), as float32 (0), or as measured (-1).
void choose_pairs(int64_t choice);

// pack.cpp: packs `source` [num_columns, depth] for the tiles; 8-bit weights are rounded block by block, 4-bit ones group
// by group.
template <class Value>
struct Parts {  // rows of depth values, one per column of the result, in equal parts one behind the other
  std::vector<const Value*> starts;
  int64_t part_columns, depth;

  const Value* column(int64_t index) const { return starts[index / part_columns] + index % part_columns * depth; }
};
void pack(const Parts<bf16>& source, const Weight& shape, uint8_t* packed);
void pack(const Parts<float>& source, const Weight& shape, uint8_t* packed);
// The same of values that are in 4 bits already, two in a byte, the first in its lower half, and their scales: whole numbers
// plus 8, or E2M1.
void pack(const Parts<uint8_t>& values, const Parts<bf16>& scales, const Weight& shape, uint8_t* packed);

// linear.cpp: out[t, n] = sum over k of x[t, k] * weight[n, k]. Weights in 8 or 4 bits take ByteRows, others rows of their
// own values or float32 rows of bfloat16 (a router's); bfloat16 rows have an even number of values, zero behind an odd
// depth. The rounded result is added to `stream` [t, n] unless that is null.
template <class Source, class Value>
void linear(const Source& x, const Weight& weight, const Value* stream, Value* out, int64_t num_rows);
// linear for batches, each with its own weight; each *_batch is the step to the next batch.
template <class Value>
void batched_linear(Rows<Value> x, int64_t x_batch, const Weight& weights, Value* out, int64_t out_stride,
                    int64_t out_batch, int64_t num_batches, int64_t num_rows);

// A form of SwiGLU: g * sigmoid(alpha * (g + cubic * g^3)) * (u + shift), of a gate g of at most `limit` and u from -limit to
// limit.
struct Activation {
  float limit = INFINITY, alpha = 1.0f, shift = 0.0f, cubic = 0.0f;

  bool is_plain() const { return limit == INFINITY && alpha == 1.0f && shift == 0.0f && cubic == 0.0f; }
};

// expert_mlp.cpp: out = down(silu(gate(x)) * up(x)) of each expert over its rows, or with another activation.
// `gate_up` (paired) and `down` are the first expert's, the others' follow, and so do their biases, [2 * intermediate] and
// [columns], unless these are null. The rounded results are added to `stream` unless that is null.
template <class Value>
struct ExpertForm {
  Activation activation;
  const Value *gate_up_bias = nullptr, *down_bias = nullptr;
};
template <class Source, class Value>
void expert_mlp(const Source& x, const ExpertRows* experts, int64_t num_experts, const Weight& gate_up,
                const Weight& down, const Value* stream, Value* out, const ExpertForm<Value>& form = {});

// rows.cpp. Weights of norms are of the type of the rows, or float32.
template <class Value, class Factor>
void rms_norm(Rows<Value> x, const Factor* weight, float eps, Value* out, int64_t num_rows, int64_t width);
template <class Value>
void silu_mul(Rows<Value> gate, Rows<Value> up, Value* out, int64_t num_rows, int64_t width, const Activation& activation);
// out = (hidden + rounded(sum + added)); see reference.add_sums. `added` may be null.
template <class Value>
void add_sums(const Value* hidden, const float* sums, const Value* added, Value* out, int64_t num_values);
// `starts` as in ByteRows, null for weights in 8 bits.
void to_bytes(Rows<bf16> x, uint8_t* out, float* scales, int32_t* starts, int64_t num_rows, int64_t width);
// sums[t] = sum over k of weights[t, k] * rows[place[t, k]], products and sums rounded one by one.
template <class Value>
void sum_per_token(const Value* rows, const int64_t* place, const float* weights, float* sums, int64_t num_tokens,
                   int64_t topk, int64_t width);
// Both at once: hidden + rounded(sum over k of weights[t, k] * rows[place[t, k]] + added[t]).
template <class Value>
void combine(const Value* hidden, const Value* rows, const int64_t* place, const float* weights, const Value* added,
             Value* out, int64_t num_tokens, int64_t topk, int64_t width);

// gather_rows copies the rows that an index names next to each other, put_rows copies such rows back; torch would use its
// own threads and wait for all of them. A row has `row_bytes`; indexed rows begin every `step_bytes`.
void gather_rows(const void* rows, int64_t step_bytes, int64_t row_bytes, const int64_t* index, int64_t num_rows,
                 void* out);
void put_rows(const void* values, const int64_t* index, int64_t num_rows, int64_t step_bytes, int64_t row_bytes,
              void* rows);

// rope.cpp: turns `num_heads` groups of `rotary` values per row in place.
struct Rotary {
  const float *cos, *sin;  // [rows, rotary / 2]
  int64_t rotary;
  bool is_interleaved;
};
template <class Value>
void rope(Value* x, int64_t row_stride, int64_t head_stride, int64_t num_heads, int64_t num_rows,
          const Rotary& rotary);
// Rows [query heads | key heads | value heads], each `head_dim` wide: norm and turn queries and keys; queries go to `q`
// [rows, heads], keys and values side by side to the rows' slots of the pages. A norm of `head_dim` weights is one of each
// head, of more weights one of all heads together; null: none.
template <class Factor>
struct HeadNorms {
  const Factor *q, *k;
  bool is_q_whole, is_k_whole;
  float eps;
};
template <class Value, class Factor>
void write_heads(Rows<Value> x, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, const HeadNorms<Factor>& norms,
                 const Rotary& rotary, const int64_t* slots, Value* q, Value* pages, int64_t row_step, int64_t num_rows);
// Multiplies each row by its factor, in float32 and rounded once.
template <class Value>
void scale_rows(Value* x, const float* factors, int64_t num_rows, int64_t width);
// Latent rows [latent | rotary]: norm and turn them, write each to its slot of the pages.
template <class Value>
void write_latents(Rows<Value> x, const Value* norm, float eps, const Rotary& rotary, int64_t latent_dim,
                   const int64_t* slots, Value* pages, int64_t row_step, int64_t num_rows);

// tile_check.cpp: whether products in tiles have the order of sums of amx_tiles.h, or (never) that of other products;
// true where there are no tiles.
bool tiles_agree(bool is_one_chain);

// gate.cpp: see reference.gate.
enum class GateMethod { kNoauxTc, kGreedy, kGroupLimitedGreedy, kGroupTop2, kTopkSoftmax };
struct GateShape {
  GateMethod method;
  int64_t num_tokens, num_experts, topk, num_groups, topk_groups;
  bool normalize;
  float scale;
};
void gate(const GateShape& shape, const float* logits, const float* bias, int64_t* ids, float* weights);
// tokens: those of the (token, k) entries, sorted by expert, tokens in order within one; place: where each entry is there.
void sort_by_expert(const int64_t* ids, int64_t num_tokens, int64_t topk, int64_t num_experts, int64_t* tokens,
                    int64_t* place, int64_t* counts);

// sampling.cpp: the largest value of each row, the first among equals, and whether all values are finite.
void argmax(const float* logits, int64_t num_rows, int64_t num_columns, int64_t* tokens, bool* is_finite);
// The logarithm of the sum of e to each logit of a row.
void log_sum_exp(const float* logits, int64_t num_rows, int64_t num_columns, double* out);

// Tokens that may come next in some rows: [rows][ceil(V / 32)] words, token t at bit t % 32 of word t / 32.
struct Allowed {
  const uint32_t* words;  // null: all tokens in all rows
  int64_t row_words;

  static int64_t words_for(int64_t num_columns) { return (num_columns + 31) / 32; }
  // Of tokens 16 * chunk to 16 * chunk + 15.
  uint32_t bits(int64_t row, int64_t chunk) const {
    return words == nullptr ? 0xFFFF : words[row * row_words + chunk / 2] >> 16 * (chunk % 2) & 0xFFFF;
  }
};

// sampling.cpp: gives tokens that may not come the logit kForbidden; `rows` are those of `allowed` among the logits' rows.
constexpr float kForbidden = -1e30f;  // finite, as rows are checked for that, and too small to have any weight in a draw
void apply_token_bitmask(float* logits, const int64_t* rows, const Allowed& allowed, int64_t num_rows, int64_t num_columns);

// most_likely.cpp: the tokens of the `count` largest logits of each row, which has as many, and these logits.
void most_likely(const float* logits, int64_t num_rows, int64_t num_columns, int64_t count, int64_t* tokens,
                 float* largest);

// draw.cpp: see reference_rows.draw; each of these has one value per row.
struct DrawSettings {
  const double* temperature;
  const int64_t* top_k;
  const double *top_p, *min_p, *uniform;
};
constexpr int64_t kMostTokens = (1 << 19) - 1;  // of a vocabulary, so that sums of weights fit
void draw(const float* logits, const DrawSettings& settings, int64_t num_rows, int64_t num_columns, int64_t* tokens);

// angles.cpp: cosine and sine of angles [num_values], each times `scale`.
void cos_sin(const float* angles, double scale, int64_t num_values, float* cos, float* sin);

// paged_decode.cpp: see reference/mla.py, mla_decode, and reference/gqa.py, gqa_decode.
template <class Value>
void paged_decode(const DecodeShape& shape, const Value* q, const Value* pages, const int64_t* page_table,
                  const int64_t* kv_tokens, const int64_t* positions, Value* out);

// mla_prefill.cpp: see reference_mla.mla_prefill.
struct PrefillShape {
  int64_t num_heads, nope_dim, rotary_dim, value_dim, latent_dim, row_step;
  float scale;
};
struct PrefillChunk {
  int64_t first_row, num_rows, context_tokens;
  const int64_t* page_ids;
};
template <class Value>
void mla_prefill(const PrefillShape& shape, const PrefillChunk* chunks, int64_t num_chunks, const Value* q,
                 const Value* pages, const int64_t* positions, const Weight& kv_up, Value* out);

// gqa_prefill.cpp: see reference/gqa.py.
template <class Value>
void gqa_prefill(const GroupedHeads& heads, const PrefillChunk* chunks, int64_t num_chunks, const Value* q,
                 const Value* pages, const int64_t* positions, Value* out);

// sparse.cpp: see reference/sparse.py. Of the weights of heads the scale of a score is a part.
constexpr int32_t kNoSlot = -1;
template <class Value>
void write_index_keys(Rows<Value> x, const Value* norm, const Value* bias, float eps, const Rotary& rotary,
                      int64_t width, const int64_t* slots, Value* pages, int64_t row_step, int64_t num_rows);
struct IndexShape {
  int64_t num_rows, num_heads, width, row_step, table_pages, topk;
};
template <class Value>
void choose_keys(const IndexShape& shape, const Value* q, const float* head_weights, const Value* pages,
                 const int64_t* page_table, const int64_t* requests, const int64_t* positions, int32_t* slots);
struct SparseShape {
  int64_t num_rows, num_heads, width, row_step, latent_dim, num_keys;
  float scale;
};
template <class Value>
void mla_sparse(const SparseShape& shape, const Value* q, const Value* pages, const int32_t* slots, Value* out);

}  // namespace batchinfer
