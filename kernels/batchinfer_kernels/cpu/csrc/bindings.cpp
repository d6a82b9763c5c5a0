// The kernels as torch operations `torch.ops.batchinfer_cpu.*`. Shapes and meanings are those of the Python functions
// in ops.py, which only call these with bfloat16 tensors on the CPU.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <vector>

#include "kernels.h"

namespace {

using at::Tensor;
using batchinfer::bf16;

const bf16* values_of(const Tensor& x) { return static_cast<const bf16*>(x.const_data_ptr()); }
bf16* room_of(const Tensor& x) { return static_cast<bf16*>(x.mutable_data_ptr()); }

void check(const Tensor& x, int64_t dim, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == at::kBFloat16, name, " must be bfloat16 on the CPU");
  TORCH_CHECK(x.dim() == dim, name, " has ", x.dim(), " dimensions, not ", dim);
}

void check_contiguous(const Tensor& x, int64_t dim, const char* name) {
  check(x, dim, name);
  TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
}

// x itself where each row is contiguous, else a copy.
Tensor with_whole_rows(const Tensor& x) { return x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous(); }
batchinfer::Rows rows_of(const Tensor& x) { return {values_of(x), x.stride(0)}; }

Tensor linear(const Tensor& x_in, const Tensor& weight_in) {
  check(x_in, 2, "x");
  check(weight_in, 2, "weight");
  TORCH_CHECK(x_in.size(1) == weight_in.size(1), "x is ", x_in.size(1), " wide, weight ", weight_in.size(1));
  const Tensor x = with_whole_rows(x_in), weight = with_whole_rows(weight_in);
  Tensor out = at::empty({x.size(0), weight.size(0)}, x.options());
  batchinfer::linear(rows_of(x), rows_of(weight), room_of(out), x.size(0), weight.size(0), x.size(1));
  return out;
}

// The result stands in memory as [T, B, N], which is how callers go on with it.
Tensor batched_matmul(const Tensor& x_in, const Tensor& y_in) {
  check(x_in, 3, "x");
  check(y_in, 3, "y");
  const bool fits = x_in.size(0) == y_in.size(0) && x_in.size(2) == y_in.size(1);
  TORCH_CHECK(fits, "x is ", x_in.sizes(), ", y ", y_in.sizes());
  const Tensor x = x_in.stride(2) == 1 ? x_in : x_in.contiguous();
  const bool is_transposed = y_in.stride(1) == 1 && y_in.stride(2) != 1;
  const Tensor y = is_transposed || y_in.stride(2) == 1 ? y_in : y_in.contiguous();
  const int64_t num_batches = x.size(0), num_rows = x.size(1), depth = x.size(2), num_columns = y.size(2);
  Tensor out = at::empty({num_rows, num_batches, num_columns}, x.options());
  const auto product = is_transposed ? batchinfer::batched_linear : batchinfer::batched_matmul;
  product({values_of(x), x.stride(1)}, x.stride(0), {values_of(y), y.stride(is_transposed ? 2 : 1)}, y.stride(0),
          room_of(out), num_batches * num_columns, num_columns, num_batches, num_rows, depth, num_columns);
  return out.transpose(0, 1);
}

void check_experts(const Tensor& num_rows, const Tensor& gate_up, const Tensor& down, int64_t hidden) {
  check_contiguous(gate_up, 3, "gate_up");
  check_contiguous(down, 3, "down");
  TORCH_CHECK(num_rows.scalar_type() == at::kLong && num_rows.is_contiguous(), "num_rows must be contiguous int64");
  const int64_t experts = num_rows.numel(), intermediate = down.size(2);
  TORCH_CHECK(down.size(0) == experts && down.size(1) == hidden, "down must be [experts, hidden, intermediate]");
  TORCH_CHECK(gate_up.size(0) == experts && gate_up.size(1) == 2 * intermediate && gate_up.size(2) == hidden,
              "gate_up must be [experts, 2 * intermediate, hidden]");
}

// Runs the experts over the rows at row_of[expert] of x and out.
void run_experts(const Tensor& x, const Tensor& num_rows, const std::vector<int64_t>& row_of, const Tensor& gate_up,
                 const Tensor& down, const Tensor& out) {
  const int64_t width = down.size(1), intermediate = down.size(2), num_experts = num_rows.numel();
  const int64_t* counts = num_rows.const_data_ptr<int64_t>();
  int64_t total = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) total += counts[expert];
  const Tensor hidden = at::empty({total, intermediate}, x.options());
  std::vector<batchinfer::ExpertRows> experts;
  int64_t start = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    experts.push_back({values_of(x) + row_of[expert] * width, room_of(hidden) + start * intermediate,
                       room_of(out) + row_of[expert] * width, values_of(gate_up) + expert * 2 * intermediate * width,
                       values_of(down) + expert * width * intermediate, counts[expert]});
    start += counts[expert];
  }
  batchinfer::expert_mlp(experts.data(), num_experts, width, intermediate);
}

Tensor grouped_mlp(const Tensor& x, const Tensor& num_rows, const Tensor& gate_up, const Tensor& down) {
  check_contiguous(x, 2, "x");
  check_experts(num_rows, gate_up, down, x.size(1));
  const int64_t* counts = num_rows.const_data_ptr<int64_t>();
  std::vector<int64_t> row_of(num_rows.numel());
  int64_t start = 0;
  for (int64_t expert = 0; expert < num_rows.numel(); ++expert) {
    TORCH_CHECK(counts[expert] >= 0, "expert ", expert, " has ", counts[expert], " rows");
    row_of[expert] = start;
    start += counts[expert];
  }
  TORCH_CHECK(start == x.size(0), "num_rows add up to ", start, ", x has ", x.size(0));
  Tensor out = at::empty({x.size(0), x.size(1)}, x.options());
  run_experts(x, num_rows, row_of, gate_up, down, out);
  return out;
}

Tensor masked_mlp(const Tensor& x, const Tensor& num_rows, const Tensor& gate_up, const Tensor& down) {
  check_contiguous(x, 3, "x");
  check_experts(num_rows, gate_up, down, x.size(2));
  const int64_t* counts = num_rows.const_data_ptr<int64_t>();
  const int64_t room = x.size(1), width = x.size(2);
  TORCH_CHECK(x.size(0) == num_rows.numel(), "x has ", x.size(0), " experts, num_rows ", num_rows.numel());
  Tensor out = at::empty({x.size(0), room, width}, x.options());
  std::vector<int64_t> row_of(num_rows.numel());
  for (int64_t expert = 0; expert < num_rows.numel(); ++expert) {
    const int64_t count = counts[expert];
    TORCH_CHECK(0 <= count && count <= room, "expert ", expert, " has ", count, " rows and room for ", room);
    row_of[expert] = expert * room;
    std::memset(room_of(out) + (expert * room + count) * width, 0, (room - count) * width * sizeof(bf16));
  }
  run_experts(x, num_rows, row_of, gate_up, down, out);
  return out;
}

Tensor mla_decode(const Tensor& q, const Tensor& pages, const Tensor& page_table, const Tensor& kv_tokens,
                  const Tensor& positions, int64_t latent_dim, double scale) {
  check_contiguous(q, 3, "q");
  check_contiguous(pages, 3, "pages");
  for (const Tensor* indices : {&page_table, &kv_tokens, &positions}) {
    TORCH_CHECK(indices->scalar_type() == at::kLong && indices->is_contiguous(), "indices must be contiguous int64");
  }
  const int64_t num_requests = page_table.size(0), table_pages = page_table.size(1);
  TORCH_CHECK(pages.size(1) == 64 && pages.size(2) == q.size(2), "pages must be [pages, 64, width of q]");
  TORCH_CHECK(latent_dim % 16 == 0 && latent_dim <= q.size(2), "latent_dim must be a multiple of 16 within the width");
  TORCH_CHECK(q.size(2) % 2 == 0, "the width ", q.size(2), " is odd");
  TORCH_CHECK(kv_tokens.numel() == num_requests, "one length per request");
  TORCH_CHECK(positions.numel() == q.size(0), "one position per row");
  const int64_t* ids = page_table.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < page_table.numel(); ++i) {
    TORCH_CHECK(0 <= ids[i] && ids[i] < pages.size(0), "page ", ids[i], " of ", pages.size(0));
  }
  const int64_t* lengths = kv_tokens.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_requests; ++i) {
    TORCH_CHECK(lengths[i] <= 64 * table_pages, lengths[i], " tokens in ", table_pages, " pages");
  }
  Tensor out = at::empty({q.size(0), q.size(1), latent_dim}, q.options());
  if (num_requests == 0) return out;
  TORCH_CHECK(q.size(0) % num_requests == 0, q.size(0), " rows are not a multiple of ", num_requests, " requests");
  batchinfer::mla_decode({num_requests, q.size(0) / num_requests, q.size(1), q.size(2), latent_dim, table_pages,
                          static_cast<float>(scale)},
                         values_of(q), values_of(pages), ids, lengths, positions.const_data_ptr<int64_t>(),
                         room_of(out));
  return out;
}

Tensor mla_prefill(const Tensor& q, const Tensor& latents, const Tensor& kv, const Tensor& positions, int64_t context,
                   int64_t value_dim, double scale) {
  check_contiguous(q, 3, "q");
  check_contiguous(latents, 2, "latents");
  check_contiguous(kv, 3, "kv");
  TORCH_CHECK(positions.scalar_type() == at::kLong && positions.is_contiguous(), "positions must be contiguous int64");
  const int64_t num_keys = latents.size(0), num_heads = q.size(1), width = q.size(2), nope = kv.size(2) - value_dim;
  TORCH_CHECK(kv.size(0) == num_keys && kv.size(1) == num_heads, "kv must be [keys, heads, nope + value]");
  TORCH_CHECK(num_keys % 64 == 0 && context <= num_keys, "the keys must be whole pages with room for the context");
  TORCH_CHECK(positions.numel() == q.size(0), "one position per query");
  TORCH_CHECK(width % 2 == 0 && value_dim % 16 == 0, "the width must be even and value_dim a multiple of 16");
  const int64_t rotary = width - nope, latent_width = latents.size(1);
  TORCH_CHECK(0 <= nope && 0 <= rotary && rotary <= latent_width, "the widths of q, latents and kv do not fit");
  const Tensor keys = at::empty({num_heads, num_keys, width}, q.options());
  Tensor out = at::empty({q.size(0), num_heads, value_dim}, q.options());
  batchinfer::mla_prefill({q.size(0), num_heads, num_keys, context, nope, rotary, value_dim, static_cast<float>(scale)},
                          values_of(q), values_of(kv), {values_of(latents) + latent_width - rotary, latent_width},
                          positions.const_data_ptr<int64_t>(), room_of(keys), room_of(out));
  return out;
}

Tensor rms_norm(const Tensor& x_in, const Tensor& weight, double eps) {
  check(x_in, 2, "x");
  check_contiguous(weight, 1, "weight");
  TORCH_CHECK(weight.size(0) == x_in.size(1), "x is ", x_in.size(1), " wide, weight ", weight.size(0));
  const Tensor x = with_whole_rows(x_in);
  Tensor out = at::empty({x.size(0), x.size(1)}, x.options());
  batchinfer::rms_norm(rows_of(x), values_of(weight), static_cast<float>(eps), room_of(out), x.size(0), x.size(1));
  return out;
}

Tensor silu_mul(const Tensor& gate_in, const Tensor& up_in) {
  check(gate_in, 2, "gate");
  check(up_in, 2, "up");
  TORCH_CHECK(gate_in.sizes() == up_in.sizes(), "gate and up must have one shape");
  const Tensor gate = with_whole_rows(gate_in), up = with_whole_rows(up_in);
  Tensor out = at::empty({gate.size(0), gate.size(1)}, gate.options());
  batchinfer::silu_mul(rows_of(gate), rows_of(up), room_of(out), gate.size(0), gate.size(1));
  return out;
}

}  // namespace

TORCH_LIBRARY(batchinfer_cpu, m) {
  m.def("linear(Tensor x, Tensor weight) -> Tensor", linear);
  m.def("batched_matmul(Tensor x, Tensor y) -> Tensor", batched_matmul);
  m.def("grouped_mlp(Tensor x, Tensor num_rows, Tensor gate_up, Tensor down) -> Tensor", grouped_mlp);
  m.def("masked_mlp(Tensor x, Tensor num_rows, Tensor gate_up, Tensor down) -> Tensor", masked_mlp);
  m.def(
      "mla_decode(Tensor q, Tensor pages, Tensor page_table, Tensor kv_tokens, Tensor positions, int latent_dim, "
      "float scale) -> Tensor",
      mla_decode);
  m.def(
      "mla_prefill(Tensor q, Tensor latents, Tensor kv, Tensor positions, int context_tokens, int value_dim, "
      "float scale) -> Tensor",
      mla_prefill);
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm);
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor", silu_mul);
}
