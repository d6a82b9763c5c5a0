// The kernels as torch operations `torch.ops.batchinfer_cpu.*`. Shapes and meanings are those of the Python functions
// in ops.py, which only call these with tensors of the right dtypes on the CPU. A packed weight comes as its bytes, its
// number of columns, its depth and its kind (WeightKind).

#include <cstring>

#include "operations.h"
#include "tensors.h"

namespace batchinfer::tensors {

int64_t packed_bytes(int64_t num_columns, int64_t depth, int64_t kind, bool is_paired) {
  return shape_of(num_columns, depth, kind, is_paired).bytes();
}

void pack(const Tensor& packed, at::TensorList sources, int64_t kind, bool is_paired) {
  TORCH_CHECK(!sources.empty(), "no parts");
  with_values(sources[0], [&]<class Value>(Value) {
    batchinfer::Parts<Value> parts{{}, sources[0].size(0), sources[0].size(1)};
    for (const Tensor& source : sources) {
      check_like(source, 2, sources[0], "source");
      TORCH_CHECK(source.sizes() == sources[0].sizes(), "parts have different shapes");
      parts.starts.push_back(read<Value>(source));
    }
    const int64_t num_columns = parts.part_columns * static_cast<int64_t>(sources.size());
    const Weight shape = shape_of(num_columns, parts.depth, kind, is_paired);
    check_kind(sources[0], shape);
    TORCH_CHECK(packed.is_contiguous() && packed.numel() == shape.bytes(), "room for ", shape.bytes(), " bytes");
    batchinfer::pack(parts, shape, write<uint8_t>(packed));
  });
}

void pack_groups(const Tensor& packed, at::TensorList values, at::TensorList scales, int64_t depth, int64_t kind,
                 bool is_paired) {
  TORCH_CHECK(!values.empty() && values.size() == scales.size(), "one tensor of scales for each part");
  const int64_t part_columns = values[0].size(0), num_columns = part_columns * static_cast<int64_t>(values.size());
  const Weight shape = shape_of(num_columns, depth, kind, is_paired);
  TORCH_CHECK(shape.kind == WeightKind::kInt4 || shape.kind == WeightKind::kFp4, "weights of kind ", kind, " have no groups");
  batchinfer::Parts<uint8_t> value_parts{{}, part_columns, shape.num_groups() * kGroup / 2};
  batchinfer::Parts<bf16> scale_parts{{}, part_columns, shape.num_groups()};
  for (size_t part = 0; part < values.size(); ++part) {
    TORCH_CHECK(values[part].scalar_type() == at::kByte && values[part].is_contiguous() && values[part].dim() == 2 &&
                    values[part].size(0) == part_columns && values[part].size(1) == value_parts.depth,
                "values must be contiguous bytes of one shape, two values in each");
    check_contiguous(scales[part], 2, "scales");
    TORCH_CHECK(scales[part].scalar_type() == at::kBFloat16 && scales[part].size(0) == part_columns &&
                    scales[part].size(1) == scale_parts.depth,
                "scales must be bfloat16, one per group");
    value_parts.starts.push_back(read<uint8_t>(values[part]));
    scale_parts.starts.push_back(read<bf16>(scales[part]));
  }
  TORCH_CHECK(packed.is_contiguous() && packed.numel() == shape.bytes(), "room for ", shape.bytes(), " bytes");
  batchinfer::pack(value_parts, scale_parts, shape, write<uint8_t>(packed));
}

Tensor linear(const Tensor& x_in, const Tensor& packed, int64_t num_columns, int64_t depth, int64_t kind, bool wide,
              const std::optional<Tensor>& stream) {
  check(x_in, 2, "x");
  TORCH_CHECK(x_in.size(1) == depth, "x is ", x_in.size(1), " wide, weight ", depth);
  const Tensor x = with_whole_rows(x_in);
  const Weight weight = weight_of(packed, 1, num_columns, depth, kind, false);
  check_kind(x, weight);
  Tensor out = empty({x.size(0), num_columns}, wide ? at::kFloat : x.scalar_type());
  if (stream) {
    check_like(*stream, 2, x, "stream");
    TORCH_CHECK(!wide && stream->sizes() == out.sizes(), "stream is ", stream->sizes(), ", not ", out.sizes());
  }
  const auto run = [&]<class Value>(const auto& rows, Value) {
    batchinfer::linear(rows, weight, stream ? read<Value>(*stream) : nullptr, write<Value>(out), x.size(0));
  };
  if (takes_bytes(weight.kind)) {
    TORCH_CHECK(!wide, "products of 8-bit rows are rounded to bfloat16");
    run(Bytes(x, weight.kind).rows, bf16{});
  } else if (weight.kind == WeightKind::kFloat32) {
    run(rows_of<float>(x), float{});
  } else if (wide) {
    run(rows_of<bf16>(x), float{});
  } else {
    run(rows_of<bf16>(x), bf16{});
  }
  return out;
}

// The result is in memory as [T, B, N], the order in which callers use it.
Tensor batched_linear(const Tensor& x_in, const Tensor& packed, int64_t num_columns, int64_t depth, int64_t kind) {
  check(x_in, 3, "x");
  TORCH_CHECK(x_in.size(2) == depth, "x is ", x_in.size(2), " wide, weight ", depth);
  const Tensor x = x_in.stride(2) == 1 ? x_in : x_in.contiguous();
  const int64_t num_batches = x.size(0), num_rows = x.size(1);
  const Weight weights = weight_of(packed, num_batches, num_columns, depth, kind, false);
  check_kind(x, weights);
  TORCH_CHECK(!takes_bytes(weights.kind), "there are no batched products of 8-bit rows");
  Tensor out = empty({num_rows, num_batches, num_columns}, x.scalar_type());
  with_values(x, [&]<class Value>(Value) {
    batchinfer::batched_linear<Value>({read<Value>(x), x.stride(1)}, x.stride(0), weights, write<Value>(out),
                                      num_batches * num_columns, num_columns, num_batches, num_rows);
  });
  return out.transpose(0, 1);
}

Tensor router(const Tensor& x_in, const Tensor& packed, int64_t num_columns) {
  check(x_in, 2, "x");
  TORCH_CHECK(packed.scalar_type() == at::kFloat && packed.is_contiguous() && packed.dim() == 3, "a packed router");
  TORCH_CHECK(packed.size(1) == x_in.size(1), "x is ", x_in.size(1), " wide, weight ", packed.size(1));
  TORCH_CHECK(num_columns <= packed.size(0) * kPanelColumns, "a router of ", num_columns);
  const Tensor x = with_whole_rows(x_in);
  const Weight weight{read<uint8_t>(packed), WeightKind::kFloat32, num_columns, x.size(1)};
  Tensor out = empty({x.size(0), num_columns}, at::kFloat);
  with_values(x, [&]<class Value>(Value) {
    batchinfer::linear<Rows<Value>, float>(rows_of<Value>(x), weight, nullptr, write<float>(out), x.size(0));
  });
  return out;
}

void run_experts(const Tensor& x, const std::vector<batchinfer::ExpertRows>& experts, const Weight& gate_up,
                 const Weight& down, const int64_t* in_index, const Tensor* stream, const Tensor& out,
                 const ExpertForms& forms) {
  check_kind(x, gate_up);
  check_kind(x, down);
  const auto run = [&]<class Value>(auto rows, Value) {
    rows.index = in_index;
    const batchinfer::ExpertForm<Value> form{forms.activation,
                                             forms.gate_up_bias ? read<Value>(*forms.gate_up_bias) : nullptr,
                                             forms.down_bias ? read<Value>(*forms.down_bias) : nullptr};
    batchinfer::expert_mlp<decltype(rows), Value>(rows, experts.data(), experts.size(), gate_up, down,
                                                  stream ? read<Value>(*stream) : nullptr, write<Value>(out), form);
  };
  if (takes_bytes(gate_up.kind)) {
    const Bytes bytes(x, gate_up.kind);
    run(bytes.rows, bf16{});
  } else {
    with_values(x, [&]<class Value>(Value value) { run(rows_of<Value>(x), value); });
  }
}

struct ExpertWeights {
  Weight gate_up, down;

  ExpertWeights(const Tensor& num_rows, const Tensor& gate_up_in, const Tensor& down_in, int64_t intermediate,
                int64_t hidden, int64_t kind) {
    check_indices(num_rows, "num_rows");
    gate_up = weight_of(gate_up_in, num_rows.numel(), 2 * intermediate, hidden, kind, true);
    down = weight_of(down_in, num_rows.numel(), hidden, intermediate, kind, false);
  }
};

batchinfer::Activation activation_of(double limit, double alpha, double shift, double cubic) {
  return {static_cast<float>(limit), static_cast<float>(alpha), static_cast<float>(shift), static_cast<float>(cubic)};
}

ExpertForms forms_of(const Tensor& x, const ExpertWeights& weights, int64_t num_experts,
                     const batchinfer::Activation& activation, const std::optional<Tensor>& gate_up_bias,
                     const std::optional<Tensor>& down_bias) {
  const auto check_bias = [&](const std::optional<Tensor>& bias, const Weight& weight) {
    if (!bias) return;
    check_contiguous(*bias, 2, "bias");
    TORCH_CHECK(bias->scalar_type() == x.scalar_type() && bias->size(0) == num_experts && bias->size(1) == weight.num_columns,
                "a bias is ", bias->scalar_type(), " ", bias->sizes(), ", not one row per expert of the type of x");
  };
  check_bias(gate_up_bias, weights.gate_up);
  check_bias(down_bias, weights.down);
  return {activation, gate_up_bias, down_bias};
}

// `tokens` says which row of x each row for the experts is; without it x has these rows themselves.
Tensor grouped_mlp(const Tensor& x_in, const Tensor& num_rows, const Tensor& gate_up, const Tensor& down,
                   const std::optional<Tensor>& tokens, int64_t intermediate, int64_t kind, double limit, double alpha,
                   double shift, double cubic, const std::optional<Tensor>& gate_up_bias,
                   const std::optional<Tensor>& down_bias) {
  check(x_in, 2, "x");
  const Tensor x = with_whole_rows(x_in);
  const int64_t hidden = x.size(1), total = tokens ? tokens->numel() : x.size(0);
  const ExpertWeights weights(num_rows, gate_up, down, intermediate, hidden, kind);
  const int64_t* counts = read<int64_t>(num_rows);
  std::vector<batchinfer::ExpertRows> experts;
  int64_t start = 0;
  for (int64_t expert = 0; expert < num_rows.numel(); ++expert) {
    TORCH_CHECK(counts[expert] >= 0, "expert ", expert, " has ", counts[expert], " rows");
    experts.push_back({start, counts[expert]});
    start += counts[expert];
  }
  TORCH_CHECK(start == total, "num_rows add up to ", start, ", x has ", total);
  if (tokens) {
    check_indices(*tokens, "tokens");
    check_range(*tokens, x.size(0), "row");
  }
  Tensor out = empty({total, hidden}, x.scalar_type());
  run_experts(x, experts, weights.gate_up, weights.down, tokens ? read<int64_t>(*tokens) : nullptr, nullptr, out,
              forms_of(x, weights, num_rows.numel(), activation_of(limit, alpha, shift, cubic), gate_up_bias, down_bias));
  return out;
}

// One MLP over all rows; the rounded result is added to `stream`.
Tensor mlp(const Tensor& x_in, const Tensor& gate_up_in, const Tensor& down_in, int64_t intermediate, int64_t kind,
           const std::optional<Tensor>& stream, double limit, double alpha, double shift, double cubic) {
  check(x_in, 2, "x");
  const Tensor x = with_whole_rows(x_in);
  const Weight gate_up = weight_of(gate_up_in, 1, 2 * intermediate, x.size(1), kind, true);
  const Weight down = weight_of(down_in, 1, x.size(1), intermediate, kind, false);
  Tensor out = empty({x.size(0), x.size(1)}, x.scalar_type());
  if (stream) {
    check_like(*stream, 2, x, "stream");
    TORCH_CHECK(stream->sizes() == out.sizes(), "stream is ", stream->sizes(), ", not ", out.sizes());
  }
  run_experts(x, {{0, x.size(0)}}, gate_up, down, nullptr, stream ? &*stream : nullptr, out,
              {activation_of(limit, alpha, shift, cubic)});
  return out;
}

Tensor masked_mlp(const Tensor& x, const Tensor& num_rows, const Tensor& gate_up, const Tensor& down,
                  int64_t intermediate, int64_t kind, double limit, double alpha, double shift, double cubic,
                  const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias) {
  check_contiguous(x, 3, "x");
  const int64_t room = x.size(1), hidden = x.size(2), num_experts = num_rows.numel();
  const ExpertWeights weights(num_rows, gate_up, down, intermediate, hidden, kind);
  const int64_t* counts = read<int64_t>(num_rows);
  TORCH_CHECK(x.size(0) == num_experts, "x has ", x.size(0), " experts, num_rows ", num_experts);
  Tensor out = empty({x.size(0), room, hidden}, x.scalar_type());
  std::vector<batchinfer::ExpertRows> experts;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t count = counts[expert];
    TORCH_CHECK(0 <= count && count <= room, "expert ", expert, " has ", count, " rows and room for ", room);
    experts.push_back({expert * room, count});
    std::memset(write<char>(out) + (expert * room + count) * hidden * out.element_size(), 0,
                (room - count) * hidden * out.element_size());
  }
  run_experts(x.view({num_experts * room, hidden}), experts, weights.gate_up, weights.down, nullptr, nullptr,
              out, forms_of(x, weights, num_experts, activation_of(limit, alpha, shift, cubic), gate_up_bias, down_bias));
  return out;
}

// Heads over pages whose rows hold keys [key heads, width of q] and, from value `first_value` on, values.
batchinfer::GroupedHeads grouped_heads(const Tensor& q, const Tensor& pages, int64_t num_kv_heads, int64_t first_value,
                                       int64_t value_dim, double scale, int64_t window,
                                       const std::optional<Tensor>& sinks) {
  check_contiguous(q, 3, "q");
  const int64_t row_step = page_step(pages, q), num_heads = q.size(1), width = q.size(2);
  TORCH_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0, num_heads, " query heads for ", num_kv_heads, " key heads");
  TORCH_CHECK(window >= 0, "a window of ", window, " tokens");
  if (sinks) {
    check_floats(*sinks, 1, "sinks");
    TORCH_CHECK(sinks->numel() == num_heads, "one sink per query head");
  }
  return {num_heads, num_kv_heads, width, row_step, first_value, value_dim, static_cast<float>(scale), window,
          sinks ? read<float>(*sinks) : nullptr};
}

// The same where a row has as many values as keys, the values behind them.
batchinfer::GroupedHeads keys_and_values(const Tensor& q, const Tensor& pages, int64_t num_kv_heads, double scale,
                                         int64_t window, const std::optional<Tensor>& sinks) {
  TORCH_CHECK(pages.dim() == 3 && pages.size(2) == 2 * num_kv_heads * q.size(2),
              "pages must be [pages, 64, keys and values of ", num_kv_heads, " heads]");
  return grouped_heads(q, pages, num_kv_heads, num_kv_heads * q.size(2), q.size(2), scale, window, sinks);
}

Tensor decode(const batchinfer::GroupedHeads& heads, const Tensor& q, const Tensor& pages, const Tensor& page_table,
              const Tensor& kv_tokens, const Tensor& positions) {
  for (const Tensor* indices : {&page_table, &kv_tokens, &positions}) check_indices(*indices, "indices");
  const int64_t num_requests = page_table.size(0), table_pages = page_table.size(1);
  TORCH_CHECK(kv_tokens.numel() == num_requests, "one length per request");
  TORCH_CHECK(positions.numel() == q.size(0), "one position per row");
  check_range(page_table, pages.size(0), "page");
  const int64_t* lengths = read<int64_t>(kv_tokens);
  for (int64_t i = 0; i < num_requests; ++i) {
    TORCH_CHECK(lengths[i] <= 64 * table_pages, lengths[i], " tokens in ", table_pages, " pages");
  }
  Tensor out = empty({q.size(0), q.size(1), heads.value_dim}, q.scalar_type());
  if (num_requests == 0) return out;
  TORCH_CHECK(q.size(0) % num_requests == 0, q.size(0), " rows are not a multiple of ", num_requests, " requests");
  const batchinfer::DecodeShape shape{heads, num_requests, q.size(0) / num_requests, table_pages};
  with_values(q, [&]<class Value>(Value) {
    batchinfer::paged_decode(shape, read<Value>(q), read<Value>(pages), read<int64_t>(page_table), lengths,
                             read<int64_t>(positions), write<Value>(out));
  });
  return out;
}

Tensor mla_decode(const Tensor& q, const Tensor& pages, const Tensor& page_table, const Tensor& kv_tokens,
                  const Tensor& positions, int64_t latent_dim, double scale) {
  const batchinfer::GroupedHeads heads = grouped_heads(q, pages, 1, 0, latent_dim, scale, 0, std::nullopt);
  TORCH_CHECK(pages.size(2) == q.size(2), "pages must be [pages, 64, width of q]");
  TORCH_CHECK(0 < latent_dim && latent_dim <= q.size(2), "latent_dim must be within the width");
  return decode(heads, q, pages, page_table, kv_tokens, positions);
}

Tensor gqa_decode(const Tensor& q, const Tensor& pages, const Tensor& page_table, const Tensor& kv_tokens,
                  const Tensor& positions, int64_t num_kv_heads, double scale, int64_t window,
                  const std::optional<Tensor>& sinks) {
  const batchinfer::GroupedHeads heads = keys_and_values(q, pages, num_kv_heads, scale, window, sinks);
  return decode(heads, q, pages, page_table, kv_tokens, positions);
}

// The chunks of a prefill that have tokens; they add up to `num_rows`.
std::vector<batchinfer::PrefillChunk> chunks_of(const Tensor& pages, const Tensor& page_table, const Tensor& num_tokens,
                                                const Tensor& context_tokens, const Tensor& positions, int64_t num_rows) {
  for (const Tensor* indices : {&page_table, &num_tokens, &context_tokens, &positions}) {
    check_indices(*indices, "indices");
  }
  TORCH_CHECK(positions.numel() == num_rows, "one position per query");
  const int64_t num_chunks = page_table.size(0), table_pages = page_table.size(1);
  TORCH_CHECK(num_tokens.numel() == num_chunks && context_tokens.numel() == num_chunks, "one count per chunk");
  const int64_t* ids = read<int64_t>(page_table);
  std::vector<batchinfer::PrefillChunk> chunks;
  int64_t first = 0;
  for (int64_t i = 0; i < num_chunks; ++i) {
    const int64_t count = read<int64_t>(num_tokens)[i], context = read<int64_t>(context_tokens)[i];
    TORCH_CHECK(0 <= count && count <= context && context <= 64 * table_pages, context, " tokens in ", table_pages,
                " pages, ", count, " of them new");
    for (int64_t page = 0; 64 * page < context; ++page) {
      const int64_t id = ids[i * table_pages + page];
      TORCH_CHECK(0 <= id && id < pages.size(0), "page ", id, " of ", pages.size(0));
    }
    if (count > 0) chunks.push_back({first, count, context, ids + i * table_pages});
    first += count;
  }
  TORCH_CHECK(first == num_rows, "the chunks have ", first, " tokens, q ", num_rows);
  return chunks;
}

Tensor mla_prefill(const Tensor& q, const Tensor& pages, const Tensor& page_table, const Tensor& num_tokens,
                   const Tensor& context_tokens, const Tensor& positions, const Tensor& kv_up, int64_t latent_dim,
                   int64_t value_dim, double scale) {
  check_contiguous(q, 3, "q");
  const int64_t row_step = page_step(pages, q);
  const int64_t num_heads = q.size(1), width = q.size(2), rotary = pages.size(2) - latent_dim, nope = width - rotary;
  TORCH_CHECK(rotary >= 0 && nope >= 0, "the widths of q and pages do not fit");
  const auto chunks = chunks_of(pages, page_table, num_tokens, context_tokens, positions, q.size(0));
  const int64_t kind = static_cast<int64_t>(q.scalar_type() == at::kFloat ? WeightKind::kFloat32 : WeightKind::kBfloat16);
  const Weight weight = weight_of(kv_up, num_heads, nope + value_dim, latent_dim, kind, false);
  Tensor out = empty({q.size(0), num_heads, value_dim}, q.scalar_type());
  const batchinfer::PrefillShape shape{num_heads, nope, rotary, value_dim, latent_dim, row_step,
                                       static_cast<float>(scale)};
  with_values(q, [&]<class Value>(Value) {
    batchinfer::mla_prefill(shape, chunks.data(), chunks.size(), read<Value>(q), read<Value>(pages),
                            read<int64_t>(positions), weight, write<Value>(out));
  });
  return out;
}

Tensor gqa_prefill(const Tensor& q, const Tensor& pages, const Tensor& page_table, const Tensor& num_tokens,
                   const Tensor& context_tokens, const Tensor& positions, int64_t num_kv_heads, double scale,
                   int64_t window, const std::optional<Tensor>& sinks) {
  const batchinfer::GroupedHeads heads = keys_and_values(q, pages, num_kv_heads, scale, window, sinks);
  const auto chunks = chunks_of(pages, page_table, num_tokens, context_tokens, positions, q.size(0));
  Tensor out = empty({q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  with_values(q, [&]<class Value>(Value) {
    batchinfer::gqa_prefill(heads, chunks.data(), chunks.size(), read<Value>(q), read<Value>(pages),
                            read<int64_t>(positions), write<Value>(out));
  });
  return out;
}

// The queries [rows, heads, head_dim]; rows of x are [query heads | key heads | value heads].
Tensor gqa_rope_and_cache(const Tensor& x_in, int64_t num_heads, int64_t num_kv_heads, const std::optional<Tensor>& norm_q,
                          const std::optional<Tensor>& norm_k, double eps, const Tensor& cos, const Tensor& sin,
                          const Tensor& slots, const Tensor& pages) {
  check(x_in, 2, "x");
  const Tensor x = with_whole_rows(x_in);
  const int64_t num_rows = x.size(0), num_all = num_heads + 2 * num_kv_heads, row_step = page_step(pages, x);
  TORCH_CHECK(num_heads > 0 && num_kv_heads > 0 && x.size(1) % num_all == 0, "rows of ", x.size(1), " values for ", num_all,
              " heads");
  const int64_t head_dim = x.size(1) / num_all;
  check_indices(slots, "slots");
  const batchinfer::Rotary rotary = rotary_of(cos, sin, num_rows, false);
  TORCH_CHECK(slots.numel() == num_rows && pages.size(2) == 2 * num_kv_heads * head_dim && rotary.rotary <= head_dim,
              "the widths of rows, pages and angles do not fit");
  check_range(slots, pages.size(0) * pages.size(1), "slot");
  const auto check_heads = [&](const std::optional<Tensor>& norm, int64_t count) {
    if (!norm) return;
    check_norm(*norm, x);
    TORCH_CHECK(norm->numel() == head_dim || norm->numel() == count * head_dim, "a norm of ", norm->numel(), " values");
  };
  check_heads(norm_q, num_heads);
  check_heads(norm_k, num_kv_heads);
  TORCH_CHECK(!norm_q || !norm_k || norm_q->scalar_type() == norm_k->scalar_type(), "norms of two types");
  Tensor q = empty({num_rows, num_heads, head_dim}, x.scalar_type());
  with_norm(x, norm_q ? *norm_q : norm_k ? *norm_k : x, [&]<class Value, class Factor>(Value, Factor) {
    const batchinfer::HeadNorms<Factor> norms{norm_q ? read<Factor>(*norm_q) : nullptr,
                                              norm_k ? read<Factor>(*norm_k) : nullptr,
                                              norm_q && norm_q->numel() != head_dim, norm_k && norm_k->numel() != head_dim,
                                              static_cast<float>(eps)};
    batchinfer::write_heads(rows_of<Value>(x), num_heads, num_kv_heads, head_dim, norms, rotary, read<int64_t>(slots),
                            write<Value>(q), write<Value>(pages), row_step, num_rows);
  });
  return q;
}

void rope_and_cache(const Tensor& q, const Tensor& latents, const Tensor& norm, double eps, const Tensor& cos,
                    const Tensor& sin, bool is_interleaved, const Tensor& slots, const Tensor& pages) {
  check_contiguous(q, 3, "q");
  check_like(latents, 2, q, "latents");
  check_like(norm, 1, q, "norm");
  const int64_t row_step = page_step(pages, q);
  check_indices(slots, "slots");
  const int64_t num_rows = q.size(0), width = latents.size(1), latent_dim = norm.numel();
  const batchinfer::Rotary rotary = rotary_of(cos, sin, num_rows, is_interleaved);
  TORCH_CHECK(latents.size(0) == num_rows && slots.numel() == num_rows, "one latent and one slot per token");
  TORCH_CHECK(width == latent_dim + rotary.rotary && pages.size(2) == width && q.size(2) >= rotary.rotary,
              "the widths of latents, pages and angles do not fit");
  check_range(slots, pages.size(0) * pages.size(1), "slot");
  with_values(q, [&]<class Value>(Value) {
    batchinfer::rope(write<Value>(q) + q.size(2) - rotary.rotary, q.stride(0), q.stride(1), q.size(1), num_rows,
                     rotary);
    batchinfer::write_latents(rows_of<Value>(latents), read<Value>(norm), static_cast<float>(eps), rotary, latent_dim,
                              read<int64_t>(slots), write<Value>(pages), row_step, num_rows);
  });
}

void index_cache(const Tensor& keys, const Tensor& norm, const Tensor& bias, double eps, const Tensor& cos,
                 const Tensor& sin, bool is_interleaved, const Tensor& slots, const Tensor& pages) {
  check_contiguous(keys, 2, "keys");
  check_like(norm, 1, keys, "norm");
  check_like(bias, 1, keys, "bias");
  const int64_t row_step = page_step(pages, keys), num_rows = keys.size(0), width = keys.size(1);
  check_indices(slots, "slots");
  const batchinfer::Rotary rotary = rotary_of(cos, sin, num_rows, is_interleaved);
  TORCH_CHECK(norm.numel() == width && bias.numel() == width && pages.size(2) == width && rotary.rotary <= width &&
                  slots.numel() == num_rows,
              "the widths of keys, norm, pages and angles do not fit");
  check_range(slots, pages.size(0) * pages.size(1), "slot");
  with_values(keys, [&]<class Value>(Value) {
    batchinfer::write_index_keys(rows_of<Value>(keys), read<Value>(norm), read<Value>(bias), static_cast<float>(eps),
                                 rotary, width, read<int64_t>(slots), write<Value>(pages), row_step, num_rows);
  });
}

Tensor choose_keys(const Tensor& q_in, const Tensor& head_weights, const Tensor& cos, const Tensor& sin,
                   bool is_interleaved, const Tensor& pages, const Tensor& page_table, const Tensor& requests,
                   const Tensor& positions, int64_t topk) {
  check_contiguous(q_in, 3, "q");
  check_floats(head_weights, 2, "weights of heads");
  const int64_t row_step = page_step(pages, q_in), num_rows = q_in.size(0), num_heads = q_in.size(1);
  for (const Tensor* indices : {&page_table, &requests, &positions}) check_indices(*indices, "indices");
  TORCH_CHECK(pages.size(2) == q_in.size(2) && head_weights.size(0) == num_rows && head_weights.size(1) == num_heads &&
                  requests.numel() == num_rows && positions.numel() == num_rows,
              "queries, weights, requests and positions do not fit");
  check_range(page_table, pages.size(0), "page");
  check_range(requests, page_table.size(0), "request");
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t position = read<int64_t>(positions)[i];
    TORCH_CHECK(0 < topk && 0 <= position && position < 64 * page_table.size(1), "position ", position, " of ",
                page_table.size(1), " pages, of which ", topk, " keys are wanted");
  }
  const batchinfer::Rotary rotary = rotary_of(cos, sin, num_rows, is_interleaved);
  TORCH_CHECK(rotary.rotary <= q_in.size(2), "the widths of q and angles do not fit");
  const Tensor q = q_in.clone();
  Tensor slots = empty({num_rows, topk}, at::kInt);
  const batchinfer::IndexShape shape{num_rows, num_heads, q.size(2), row_step, page_table.size(1), topk};
  with_values(q, [&]<class Value>(Value) {
    batchinfer::rope(write<Value>(q), q.stride(0), q.stride(1), num_heads, num_rows, rotary);
    batchinfer::choose_keys(shape, read<Value>(q), read<float>(head_weights), read<Value>(pages),
                            read<int64_t>(page_table), read<int64_t>(requests), read<int64_t>(positions),
                            write<int32_t>(slots));
  });
  return slots;
}

Tensor mla_sparse(const Tensor& q, const Tensor& pages, const Tensor& slots, int64_t latent_dim, double scale) {
  check_contiguous(q, 3, "q");
  const int64_t row_step = page_step(pages, q), num_slots = pages.size(0) * pages.size(1);
  TORCH_CHECK(slots.scalar_type() == at::kInt && slots.is_contiguous() && slots.dim() == 2 &&
                  slots.size(0) == q.size(0) && slots.size(1) > 0,
              "slots must be contiguous int32, one row of them per query");
  TORCH_CHECK(pages.size(2) == q.size(2) && 0 < latent_dim && latent_dim <= q.size(2), "the widths of q and pages");
  for (int64_t i = 0; i < slots.numel(); ++i) {
    const int32_t slot = read<int32_t>(slots)[i], first = read<int32_t>(slots)[i - i % slots.size(1)];
    TORCH_CHECK((0 <= slot && slot < num_slots) || slot == batchinfer::kNoSlot, "slot ", slot, " of ", num_slots);
    TORCH_CHECK((slot == batchinfer::kNoSlot) == (first == batchinfer::kNoSlot), "a query has keys in some slots only");
  }
  Tensor out = empty({q.size(0), q.size(1), latent_dim}, q.scalar_type());
  const batchinfer::SparseShape shape{q.size(0),  q.size(1),     q.size(2),                row_step,
                                      latent_dim, slots.size(1), static_cast<float>(scale)};
  with_values(q, [&]<class Value>(Value) {
    batchinfer::mla_sparse(shape, read<Value>(q), read<Value>(pages), read<int32_t>(slots), write<Value>(out));
  });
  return out;
}

std::tuple<Tensor, Tensor> gate(const Tensor& logits, const std::optional<Tensor>& bias, int64_t method, int64_t topk,
                                int64_t num_groups, int64_t topk_groups, bool normalize, double scale) {
  check_floats(logits, 2, "logits");
  const int64_t num_tokens = logits.size(0), experts = logits.size(1);
  if (bias) {
    TORCH_CHECK(bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == experts,
                "one float32 bias per expert");
  }
  TORCH_CHECK(0 <= method && method <= static_cast<int64_t>(batchinfer::GateMethod::kTopkSoftmax), "no gate ",
              method);
  TORCH_CHECK(num_groups > 0 && experts % num_groups == 0 && topk_groups <= num_groups, "groups must be equal");
  TORCH_CHECK(topk <= topk_groups * (experts / num_groups), "more experts per token than groups allow");
  Tensor ids = empty({num_tokens, topk}, at::kLong);
  Tensor weights = empty({num_tokens, topk}, logits.scalar_type());
  batchinfer::gate({static_cast<batchinfer::GateMethod>(method), num_tokens, experts, topk, num_groups, topk_groups,
                    normalize, static_cast<float>(scale)},
                   read<float>(logits), bias ? read<float>(*bias) : nullptr, write<int64_t>(ids),
                   write<float>(weights));
  return {ids, weights};
}

std::tuple<Tensor, Tensor, Tensor> sort_by_expert(const Tensor& ids, int64_t num_experts) {
  check_indices(ids, "ids");
  check_range(ids, num_experts, "expert");
  TORCH_CHECK(ids.dim() == 2, "one row of ids per token");
  Tensor tokens = empty({ids.numel()}, ids.scalar_type()), place = empty({ids.numel()}, ids.scalar_type());
  Tensor counts = empty({num_experts}, ids.scalar_type());
  batchinfer::sort_by_expert(read<int64_t>(ids), ids.size(0), ids.size(1), num_experts, write<int64_t>(tokens),
                             write<int64_t>(place), write<int64_t>(counts));
  return {tokens, place, counts};
}

Tensor sum_per_token(const Tensor& rows, const Tensor& place, const Tensor& weights) {
  check_contiguous(rows, 2, "rows");
  check_indices(place, "place");
  check_floats(weights, 2, "weights");
  TORCH_CHECK(place.numel() == weights.numel() && rows.size(0) == weights.numel(), "one row per token and expert");
  Tensor sums = empty({weights.size(0), rows.size(1)}, weights.scalar_type());
  with_values(rows, [&]<class Value>(Value) {
    batchinfer::sum_per_token(read<Value>(rows), read<int64_t>(place), read<float>(weights),
                              write<float>(sums), weights.size(0), weights.size(1), rows.size(1));
  });
  return sums;
}

Tensor add_sums(const Tensor& hidden, const Tensor& sums, const std::optional<Tensor>& added) {
  check_contiguous(hidden, 2, "hidden");
  TORCH_CHECK(sums.scalar_type() == at::kFloat && sums.is_contiguous() && sums.sizes() == hidden.sizes(), "sums");
  if (added) {
    check_like(*added, 2, hidden, "added");
    TORCH_CHECK(added->sizes() == hidden.sizes(), "added has another shape");
  }
  Tensor out = empty({hidden.size(0), hidden.size(1)}, hidden.scalar_type());
  with_values(hidden, [&]<class Value>(Value) {
    batchinfer::add_sums(read<Value>(hidden), read<float>(sums), added ? read<Value>(*added) : nullptr,
                         write<Value>(out), hidden.numel());
  });
  return out;
}

Tensor rms_norm(const Tensor& x_in, const Tensor& weight, double eps) {
  check(x_in, 2, "x");
  check_norm(weight, x_in);
  TORCH_CHECK(weight.size(0) == x_in.size(1), "x is ", x_in.size(1), " wide, weight ", weight.size(0));
  const Tensor x = with_whole_rows(x_in);
  Tensor out = empty({x.size(0), x.size(1)}, x.scalar_type());
  with_norm(x, weight, [&]<class Value, class Factor>(Value, Factor) {
    batchinfer::rms_norm(rows_of<Value>(x), read<Factor>(weight), static_cast<float>(eps), write<Value>(out), x.size(0),
                         x.size(1));
  });
  return out;
}

Tensor silu_mul(const Tensor& gate_in, const Tensor& up_in, double limit, double alpha, double shift, double cubic) {
  check(gate_in, 2, "gate");
  check(up_in, 2, "up");
  TORCH_CHECK(gate_in.sizes() == up_in.sizes() && gate_in.scalar_type() == up_in.scalar_type(),
              "gate and up must have one shape and one type");
  const Tensor gate = with_whole_rows(gate_in), up = with_whole_rows(up_in);
  Tensor out = empty({gate.size(0), gate.size(1)}, gate.scalar_type());
  with_values(gate, [&]<class Value>(Value) {
    batchinfer::silu_mul(rows_of<Value>(gate), rows_of<Value>(up), write<Value>(out), gate.size(0), gate.size(1),
                         activation_of(limit, alpha, shift, cubic));
  });
  return out;
}

void check_logits(const Tensor& logits) {
  check_floats(logits, 2, "logits");
  TORCH_CHECK(logits.size(1) > 0, "logits of no token");
}

std::tuple<Tensor, Tensor> argmax(const Tensor& logits) {
  check_logits(logits);
  Tensor tokens = empty({logits.size(0)}, at::kLong);
  Tensor is_finite = empty({logits.size(0)}, at::kBool);
  batchinfer::argmax(read<float>(logits), logits.size(0), logits.size(1), write<int64_t>(tokens),
                     write<bool>(is_finite));
  return {tokens, is_finite};
}

Tensor draw(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
            const Tensor& min_p, const Tensor& uniform) {
  check_logits(logits);
  TORCH_CHECK(logits.size(1) <= kMostTokens, "a vocabulary of ", logits.size(1), " tokens, more than ", kMostTokens);
  check_settings({&temperature, &top_p, &min_p, &uniform}, top_k, logits.size(0));
  Tensor tokens = empty({logits.size(0)}, at::kLong);
  const DrawSettings settings{read<double>(temperature), read<int64_t>(top_k), read<double>(top_p),
                              read<double>(min_p), read<double>(uniform)};
  batchinfer::draw(read<float>(logits), settings, logits.size(0), logits.size(1), write<int64_t>(tokens));
  return tokens;
}

Tensor log_sum_exp(const Tensor& logits) {
  check_logits(logits);
  Tensor out = empty({logits.size(0)}, at::kDouble);
  batchinfer::log_sum_exp(read<float>(logits), logits.size(0), logits.size(1), write<double>(out));
  return out;
}

std::tuple<Tensor, Tensor> most_likely(const Tensor& logits, int64_t count) {
  check_logits(logits);
  TORCH_CHECK(count >= 0, count, " tokens");
  count = std::min(count, logits.size(1));
  Tensor tokens = empty({logits.size(0), count}, at::kLong);
  Tensor largest = empty({logits.size(0), count}, logits.scalar_type());
  batchinfer::most_likely(read<float>(logits), logits.size(0), logits.size(1), count, write<int64_t>(tokens),
                          write<float>(largest));
  return {tokens, largest};
}

void apply_token_bitmask(const Tensor& logits, const Tensor& rows, const Tensor& allowed) {
  check_floats(logits, 2, "logits");
  check_indices(rows, "rows");
  check_range(rows, logits.size(0), "row");
  batchinfer::apply_token_bitmask(write<float>(logits), read<int64_t>(rows), allowed_of(allowed, rows.numel(), logits.size(1)),
                                  rows.numel(), logits.size(1));
}

void copy_rows(const Tensor& rows, const Tensor& from, const Tensor& to) {
  TORCH_CHECK(rows.size(1) <= 1 || rows.stride(1) == 1, "values of a row must be side by side");
  check_indices(to, "to");
  TORCH_CHECK(from.numel() == to.numel(), from.numel(), " rows for ", to.numel());
  check_range(to, rows.size(0), "row");
  const Tensor values = gathered(rows, from);
  const int64_t value_bytes = rows.element_size();
  put_rows(values.const_data_ptr(), read<int64_t>(to), to.numel(), rows.stride(0) * value_bytes,
           rows.size(1) * value_bytes, rows.mutable_data_ptr());
}

std::tuple<Tensor, Tensor> cos_sin(const Tensor& angles, double scale) {
  TORCH_CHECK(angles.scalar_type() == at::kFloat && angles.is_contiguous(), "angles must be contiguous float32");
  Tensor cos = empty(angles.sizes(), angles.scalar_type()), sin = empty(angles.sizes(), angles.scalar_type());
  batchinfer::cos_sin(read<float>(angles), scale, angles.numel(), write<float>(cos), write<float>(sin));
  return {cos, sin};
}

}  // namespace batchinfer::tensors

TORCH_LIBRARY(batchinfer_cpu, m) {
  using namespace batchinfer::tensors;
  using batchinfer::operations::define;
  // the numbers are those of the arguments that the function writes to
  define<pack>(m, "pack", {0});
  define<pack_groups>(m, "pack_groups", {0});
  define<rope_and_cache>(m, "rope_and_cache", {0, 8});
  define<index_cache>(m, "index_cache", {8});
  define<gqa_rope_and_cache>(m, "gqa_rope_and_cache", {9});
  define<apply_token_bitmask>(m, "apply_token_bitmask", {0});
  define<copy_rows>(m, "copy_rows", {0});
  define<packed_bytes>(m, "packed_bytes");
  define<linear>(m, "linear");
  define<batched_linear>(m, "batched_linear");
  define<router>(m, "router");
  define<mlp>(m, "mlp");
  define<grouped_mlp>(m, "grouped_mlp");
  define<masked_mlp>(m, "masked_mlp");
  define<mla_decode>(m, "mla_decode");
  define<mla_prefill>(m, "mla_prefill");
  define<gqa_decode>(m, "gqa_decode");
  define<gqa_prefill>(m, "gqa_prefill");
  define<choose_keys>(m, "choose_keys");
  define<mla_sparse>(m, "mla_sparse");
  define<gate>(m, "gate");
  define<sort_by_expert>(m, "sort_by_expert");
  define<sum_per_token>(m, "sum_per_token");
  define<add_sums>(m, "add_sums");
  define<gathered>(m, "gather_rows");
  define<rms_norm>(m, "rms_norm");
  define<silu_mul>(m, "silu_mul");
  define<argmax>(m, "argmax");
  define<draw>(m, "draw");
  define<log_sum_exp>(m, "log_sum_exp");
  define<most_likely>(m, "most_likely");
  define<cos_sin>(m, "cos_sin");
  define<batchinfer::tiles_agree>(m, "tiles_agree");
  define<batchinfer::pairs_are_quick>(m, "pairs_are_quick");
  define<batchinfer::choose_pairs>(m, "choose_pairs");
}
