// Tensors as the kernels take them, checked; shared by bindings.cpp and layers.cpp.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace batchinfer::tensors {

using at::Tensor;

// An uninitialised tensor on the CPU. Not inlined into its many callers, so that these compile faster.
[[gnu::noinline]] inline Tensor empty(at::IntArrayRef sizes, at::ScalarType type) { return at::empty(sizes, type); }

template <class Value>
const Value* read(const Tensor& x) {
  return static_cast<const Value*>(x.const_data_ptr());
}
template <class Value>
Value* write(const Tensor& x) {
  return static_cast<Value*>(x.mutable_data_ptr());
}
// Calls call(Value{}) with the type of the values of x.
template <class Call>
decltype(auto) with_values(const Tensor& x, Call call) {
  if (x.scalar_type() == at::kFloat) return call(float{});
  return call(bf16{});
}

inline void check(const Tensor& x, int64_t dim, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat), name,
              " must be bfloat16 or float32 on the CPU");
  TORCH_CHECK(x.dim() == dim, name, " has ", x.dim(), " dimensions, not ", dim);
}

inline void check_contiguous(const Tensor& x, int64_t dim, const char* name) {
  check(x, dim, name);
  TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
}

// Contiguous, with values of the type that `like` has.
inline void check_like(const Tensor& x, int64_t dim, const Tensor& like, const char* name) {
  check_contiguous(x, dim, name);
  TORCH_CHECK(x.scalar_type() == like.scalar_type(), name, " holds ", x.scalar_type(), ", not ", like.scalar_type());
}

// The weight of a norm: of the type of the rows x, or float32.
inline void check_norm(const Tensor& weight, const Tensor& x) {
  check_contiguous(weight, 1, "weight");
  TORCH_CHECK(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == at::kFloat, "weight holds ",
              weight.scalar_type(), ", not ", x.scalar_type());
}

// Calls call(Value{}, Factor{}) with the types of the values of x and of a norm's weight.
template <class Call>
decltype(auto) with_norm(const Tensor& x, const Tensor& weight, Call call) {
  if (x.scalar_type() == at::kFloat) return call(float{}, float{});
  if (weight.scalar_type() == at::kFloat) return call(bf16{}, float{});
  return call(bf16{}, bf16{});
}

// Pages [pages, 64, width] of values like those of `like`, where gaps between rows are allowed: the step between rows.
inline int64_t page_step(const Tensor& pages, const Tensor& like) {
  check(pages, 3, "pages");
  TORCH_CHECK(pages.scalar_type() == like.scalar_type(), "pages hold ", pages.scalar_type(), ", not ",
              like.scalar_type());
  const int64_t step = pages.stride(1);
  TORCH_CHECK(pages.size(1) == 64 && step >= pages.size(2) && (pages.size(2) == 1 || pages.stride(2) == 1) &&
                  (pages.size(0) <= 1 || pages.stride(0) == 64 * step),
              "pages must be [pages, 64, width], rows at equal distances");
  return step;
}

inline void check_indices(const Tensor& x, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kLong && x.is_contiguous(), name, " must be contiguous int64");
}

inline void check_range(const Tensor& indices, int64_t end, const char* name) {
  for (int64_t i = 0; i < indices.numel(); ++i) {
    const int64_t index = read<int64_t>(indices)[i];
    TORCH_CHECK(0 <= index && index < end, name, " ", index, " of ", end);
  }
}

// Settings of draws: `shares` in float64, top_k in int64, a value per row.
inline void check_settings(std::initializer_list<const Tensor*> shares, const Tensor& top_k, int64_t num_rows) {
  for (const Tensor* values : shares) {
    TORCH_CHECK(values->scalar_type() == at::kDouble && values->is_contiguous() && values->numel() == num_rows,
                "settings must be contiguous float64, one value per row");
  }
  TORCH_CHECK(top_k.scalar_type() == at::kLong && top_k.is_contiguous() && top_k.numel() == num_rows,
              "top_k must be contiguous int64, one value per row");
}

inline void check_floats(const Tensor& x, int64_t dim, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && x.dim() == dim, name, " must be contiguous float32");
}

// Bits of the tokens that may come in some rows.
inline Allowed allowed_of(const Tensor& words, int64_t num_rows, int64_t num_columns) {
  const int64_t row_words = Allowed::words_for(num_columns);
  TORCH_CHECK(words.device().is_cpu() && words.scalar_type() == at::kInt && words.is_contiguous() && words.dim() == 2 &&
                  words.size(0) == num_rows && words.size(1) == row_words,
              "allowed tokens must be contiguous int32, ", num_rows, " x ", row_words);
  return {read<uint32_t>(words), row_words};
}

// x itself where each row is contiguous, else a copy.
inline Tensor with_whole_rows(const Tensor& x) { return x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous(); }
template <class Value>
Rows<Value> rows_of(const Tensor& x) {
  return {read<Value>(x), x.stride(0)};
}

inline Weight shape_of(int64_t num_columns, int64_t depth, int64_t kind, bool is_paired) {
  TORCH_CHECK(0 <= kind && kind <= static_cast<int64_t>(WeightKind::kFp4), "no kind of weights ", kind);
  return {nullptr, static_cast<WeightKind>(kind), num_columns, depth, is_paired};
}

// Rows of x meet weights of their own kind; those in 8 or 4 bits take rows of bfloat16.
inline void check_kind(const Tensor& x, const Weight& weight) {
  const bool is_fitting = (x.scalar_type() == at::kFloat) == (weight.kind == WeightKind::kFloat32);
  TORCH_CHECK(is_fitting, "weights of kind ", static_cast<int64_t>(weight.kind), " do not take rows of ",
              x.scalar_type());
}

// The weight behind `packed`, the first of `count`.
inline Weight weight_of(const Tensor& packed, int64_t count, int64_t num_columns, int64_t depth, int64_t kind,
                        bool is_paired) {
  Weight weight = shape_of(num_columns, depth, kind, is_paired);
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.is_contiguous(), "a packed weight must be contiguous bytes");
  TORCH_CHECK(packed.numel() == count * weight.bytes(), "packed weights of ", packed.numel(), " bytes, expected ",
              count * weight.bytes());
  weight.data = read<uint8_t>(packed);
  return weight;
}

// x in 8 bits for weights of this kind, with the memory that holds it.
struct Bytes {
  Tensor values, scales, starts;
  ByteRows rows;

  Bytes(const Tensor& x, WeightKind kind) {
    const int64_t num_rows = x.size(0), width = x.size(1), num_blocks = (width + kBlock - 1) / kBlock;
    values = empty({num_rows, num_blocks * kBlock}, at::kByte);
    scales = empty({num_rows, num_blocks}, at::kFloat);
    int32_t* starts_at = nullptr;
    if (kind == WeightKind::kInt4) {
      starts = empty({num_rows, num_blocks * (kBlock / kGroup)}, at::kInt);
      starts_at = write<int32_t>(starts);
    }
    batchinfer::to_bytes(rows_of<bf16>(x), write<uint8_t>(values), write<float>(scales), starts_at, num_rows, width);
    rows = {read<uint8_t>(values), read<float>(scales), starts_at, num_blocks};
  }
};

inline Rotary rotary_of(const Tensor& cos, const Tensor& sin, int64_t num_rows, bool is_interleaved) {
  for (const Tensor* x : {&cos, &sin}) {
    TORCH_CHECK(x->scalar_type() == at::kFloat && x->is_contiguous() && x->dim() == 2 && x->size(0) == num_rows,
                "angles must be contiguous float32, one row per token");
  }
  return {read<float>(cos), read<float>(sin), 2 * cos.size(1), is_interleaved};
}

// Rows by number.
inline Tensor gathered(const Tensor& rows_in, const Tensor& numbers) {
  check_indices(numbers, "numbers");
  const Tensor rows = with_whole_rows(rows_in);
  check_range(numbers, rows.size(0), "row");
  const Tensor out = empty({numbers.numel(), rows.size(1)}, rows.scalar_type());
  const int64_t value_bytes = rows.element_size();
  gather_rows(rows.const_data_ptr(), rows.stride(0) * value_bytes, rows.size(1) * value_bytes,
              read<int64_t>(numbers), numbers.numel(), out.mutable_data_ptr());
  return out;
}

// Operations of bindings.cpp that layers.cpp is made of; shapes as in ops.py.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor router(const Tensor& x, const Tensor& packed, int64_t num_columns);
std::tuple<Tensor, Tensor> gate(const Tensor& logits, const std::optional<Tensor>& bias, int64_t method, int64_t topk,
                                int64_t num_groups, int64_t topk_groups, bool normalize, double scale);
void rope_and_cache(const Tensor& q, const Tensor& latents, const Tensor& norm, double eps, const Tensor& cos,
                    const Tensor& sin, bool is_interleaved, const Tensor& slots, const Tensor& pages);
Tensor mla_decode(const Tensor& q, const Tensor& pages, const Tensor& page_table, const Tensor& kv_tokens,
                  const Tensor& positions, int64_t latent_dim, double scale);
Tensor mla_prefill(const Tensor& q, const Tensor& pages, const Tensor& page_table, const Tensor& num_tokens,
                   const Tensor& context_tokens, const Tensor& positions, const Tensor& kv_up, int64_t latent_dim,
                   int64_t value_dim, double scale);
std::tuple<Tensor, Tensor> argmax(const Tensor& logits);
Tensor draw(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
            const Tensor& min_p, const Tensor& uniform);
// Runs the experts over their rows of x; their biases are of the type of x.
struct ExpertForms {
  Activation activation;
  std::optional<Tensor> gate_up_bias, down_bias;
};
void run_experts(const Tensor& x, const std::vector<ExpertRows>& experts, const Weight& gate_up, const Weight& down,
                 const int64_t* in_index, const Tensor* stream, const Tensor& out, const ExpertForms& forms = {});

}  // namespace batchinfer::tensors
