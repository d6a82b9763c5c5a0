// Whole steps of a layer as one call each, and of all layers in decode, `torch.classes.batchinfer_cpu.*`: what
// batchinfer/model/ does with one operation after the other, without the way through the interpreter in between. The
// same kernels in the same order, so the same bits.

#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstring>
#include <memory>

#include "speculation.h"
#include "tensors.h"

namespace batchinfer::tensors {
namespace {

// A packed weight as Python holds it: bytes, columns, depth, kind.
using Packed = std::tuple<Tensor, int64_t, int64_t, int64_t>;

struct HeldWeight {
  Tensor bytes;  // keeps them alive
  Weight weight;

  HeldWeight(const Packed& packed, int64_t count, bool is_paired = false)
      : bytes(std::get<0>(packed)),
        weight(weight_of(bytes, count, std::get<1>(packed), std::get<2>(packed), std::get<3>(packed), is_paired)) {}

  bool is_int8() const { return weight.kind == WeightKind::kInt8; }
  bool is_wide() const { return !takes_bytes(weight.kind); }
};

// Rows on their way into products, rounded to 8 bits once for all products that want them so.
class Input {
 public:
  explicit Input(Tensor x) : x_(std::move(x)) {}

  // The product, added to the stream unless that is null.
  Tensor times(const HeldWeight& held, const Tensor* stream = nullptr) {
    const Weight& weight = held.weight;
    TORCH_CHECK(x_.size(1) == weight.depth, "x is ", x_.size(1), " wide, weight ", weight.depth);
    TORCH_CHECK(held.is_int8() || held.is_wide(), "only experts are in 4 bits");
    check_kind(x_, weight);
    Tensor out = empty({x_.size(0), weight.num_columns}, x_.scalar_type());
    if (held.is_int8()) {
      if (!bytes_) bytes_.emplace(x_, WeightKind::kInt8);
      linear(bytes_->rows, weight, stream ? read<bf16>(*stream) : nullptr, write<bf16>(out), x_.size(0));
    } else {
      with_values(x_, [&]<class Value>(Value) {
        linear(rows_of<Value>(x_), weight, stream ? read<Value>(*stream) : nullptr, write<Value>(out), x_.size(0));
      });
    }
    return out;
  }

 private:
  Tensor x_;
  std::optional<Bytes> bytes_;
};

// Latent attention of one layer (model/mla.py).
class Attention : public torch::CustomClassHolder {
 public:
  // dims: heads, width of a head's query without position, rotary width, value width.
  Attention(Tensor norm, double eps, std::optional<Packed> q_down, std::optional<Tensor> q_norm, const Packed& q,
            const Packed& kv_down, Tensor kv_norm, double latent_eps, const Packed& key_up, const Packed& value_up,
            const Packed& kv_up, const Packed& out, std::vector<int64_t> dims, bool is_interleaved, double scale)
      : norm_(std::move(norm)),
        kv_norm_(std::move(kv_norm)),
        q_norm_(std::move(q_norm)),
        eps_(eps),
        latent_eps_(latent_eps),
        scale_(scale),
        num_heads_(dims.at(0)),
        nope_(dims.at(1)),
        rotary_(dims.at(2)),
        value_dim_(dims.at(3)),
        latent_dim_(kv_norm_.numel()),
        is_interleaved_(is_interleaved),
        q_(q, 1),
        kv_down_(kv_down, 1),
        key_up_(key_up, num_heads_),
        value_up_(value_up, num_heads_),
        kv_up_(kv_up, num_heads_),
        out_(out, 1) {
    if (q_down) q_down_.emplace(*q_down, 1);
    TORCH_CHECK(q_down_.has_value() == q_norm_.has_value(), "a compressed query has a weight and a norm");
    TORCH_CHECK(q_.weight.num_columns == num_heads_ * (nope_ + rotary_), "the query weight does not fit the heads");
    TORCH_CHECK(key_up_.weight.depth == nope_ && key_up_.weight.num_columns == latent_dim_, "the key weight");
    TORCH_CHECK(value_up_.weight.depth == latent_dim_ && value_up_.weight.num_columns == value_dim_, "the value weight");
  }

  // Queries [T, H, N + R], turned and times `query_scale` [T], or those of `rows` alone; the tokens' latents go to
  // their slots of the pages.
  Tensor project(const Tensor& hidden, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& query_scale,
                 const Tensor& slots, const Tensor& pages, const std::optional<Tensor>& rows) const {
    const Tensor normed = rms_norm(hidden, norm_, eps_);
    Input x(normed);
    if (!rows) {
      const Tensor q = queries(x);
      rope_and_cache(q, x.times(kv_down_), kv_norm_, latent_eps_, cos, sin, is_interleaved_, slots, pages);
      if (query_scale) scale(q, *query_scale);
      return q;
    }
    const Tensor none = empty({hidden.size(0), 0, rotary_}, hidden.scalar_type());
    rope_and_cache(none, x.times(kv_down_), kv_norm_, latent_eps_, cos, sin, is_interleaved_, slots, pages);
    Input wanted(gathered(normed, *rows));
    const Tensor q = queries(wanted), turns = gathered(cos, *rows), sines = gathered(sin, *rows);
    with_values(q, [&]<class Value>(Value) {
      rope(write<Value>(q) + nope_, q.stride(0), q.stride(1), num_heads_, q.size(0),
           rotary_of(turns, sines, q.size(0), is_interleaved_));
    });
    if (query_scale) scale(q, gathered(query_scale->unsqueeze(1), *rows).squeeze(1));
    return q;
  }

  // The absorbed form and the output projection, added to the stream.
  Tensor attend_decode(const Tensor& hidden, const Tensor& q, const Tensor& pages, const Tensor& page_table,
                       const Tensor& kv_tokens, const Tensor& positions) const {
    check_contiguous(q, 3, "q");
    const int64_t num_rows = q.size(0), width = nope_ + rotary_, latent_width = latent_dim_ + rotary_;
    TORCH_CHECK(q.size(1) == num_heads_ && q.size(2) == width, "q is ", q.sizes());
    const Tensor absorbed = empty({num_rows, num_heads_, latent_width}, q.scalar_type());
    with_values(q, [&]<class Value>(Value) {
      batched_linear<Value>({read<Value>(q), num_heads_ * width}, width, key_up_.weight, write<Value>(absorbed),
                            num_heads_ * latent_width, latent_width, num_heads_, num_rows);
      for (int64_t i = 0; i < num_rows * num_heads_; ++i) {
        std::memcpy(write<Value>(absorbed) + i * latent_width + latent_dim_, read<Value>(q) + i * width + nope_,
                    rotary_ * sizeof(Value));
      }
    });
    const Tensor latents = mla_decode(absorbed, pages, page_table, kv_tokens, positions, latent_dim_, scale_);
    const Tensor values = empty({num_rows, num_heads_ * value_dim_}, q.scalar_type());
    with_values(q, [&]<class Value>(Value) {
      batched_linear<Value>({read<Value>(latents), num_heads_ * latent_dim_}, latent_dim_, value_up_.weight,
                            write<Value>(values), num_heads_ * value_dim_, value_dim_, num_heads_, num_rows);
    });
    return added_to(hidden, values);
  }

  // The plain form and the output projection, added to the stream.
  Tensor attend_prefill(const Tensor& hidden, const Tensor& q, const Tensor& pages, const Tensor& page_table,
                        const Tensor& num_tokens, const Tensor& context_tokens, const Tensor& positions) const {
    const Tensor values = mla_prefill(q, pages, page_table, num_tokens, context_tokens, positions, kv_up_.bytes,
                                      latent_dim_, value_dim_, scale_);
    return added_to(hidden, values.view({q.size(0), num_heads_ * value_dim_}));
  }

 private:
  Tensor queries(Input& x) const {
    const Tensor q = q_down_ ? Input(rms_norm(x.times(*q_down_), *q_norm_, latent_eps_)).times(q_) : x.times(q_);
    return q.view({q.size(0), num_heads_, nope_ + rotary_});
  }

  static void scale(const Tensor& q, const Tensor& factors) {
    TORCH_CHECK(factors.scalar_type() == at::kFloat && factors.is_contiguous() && factors.dim() == 1 &&
                    factors.size(0) == q.size(0),
                "one factor per query, in float32");
    with_values(q, [&]<class Value>(Value) {
      scale_rows(write<Value>(q), read<float>(factors), q.size(0), q.size(1) * q.size(2));
    });
  }

  Tensor added_to(const Tensor& hidden, const Tensor& values) const {
    check_like(hidden, 2, values, "hidden");
    TORCH_CHECK(hidden.size(0) == values.size(0) && hidden.size(1) == out_.weight.num_columns, "the stream is ",
                hidden.sizes());
    return Input(values).times(out_, &hidden);
  }

  Tensor norm_, kv_norm_;
  std::optional<Tensor> q_norm_;
  double eps_, latent_eps_, scale_;
  int64_t num_heads_, nope_, rotary_, value_dim_, latent_dim_;
  bool is_interleaved_;
  HeldWeight q_, kv_down_, key_up_, value_up_, kv_up_, out_;
  std::optional<HeldWeight> q_down_;
};

// A mixture of experts of one layer (model/moe.py).
class Mixture : public torch::CustomClassHolder {
 public:
  // gate: method, experts per token, groups, groups per token.
  Mixture(Tensor norm, double eps, Tensor router, std::optional<Tensor> bias, int64_t num_experts,
          std::vector<int64_t> gate, bool normalize, double scale, const Packed& gate_up, const Packed& down,
          int64_t num_held, std::optional<Packed> shared_gate_up, std::optional<Packed> shared_down)
      : norm_(std::move(norm)),
        router_(std::move(router)),
        bias_(std::move(bias)),
        eps_(eps),
        scale_(scale),
        num_experts_(num_experts),
        method_(gate.at(0)),
        topk_(gate.at(1)),
        num_groups_(gate.at(2)),
        topk_groups_(gate.at(3)),
        normalize_(normalize),
        gate_up_(gate_up, num_held, true),
        down_(down, num_held) {
    TORCH_CHECK(router_.dim() == 3 && num_experts_ <= router_.size(0) * kPanelColumns, "a router of ", num_experts_);
    if (shared_gate_up) shared_gate_up_.emplace(*shared_gate_up, 1, true);
    if (shared_down) shared_down_.emplace(*shared_down, 1);
  }

  // The stream normed; experts of each token and their weights; how many tokens each expert has.
  std::tuple<Tensor, Tensor, Tensor, Tensor> route(const Tensor& hidden) const {
    const Tensor x = rms_norm(hidden, norm_, eps_);
    auto [ids, weights] = gate(tensors::router(x, router_, num_experts_), bias_, method_, topk_, num_groups_,
                               topk_groups_, normalize_, scale_);
    Tensor counts = empty({num_experts_}, ids.scalar_type());
    int64_t* const count = write<int64_t>(counts);
    std::fill_n(count, num_experts_, 0);
    for (int64_t i = 0; i < ids.numel(); ++i) ++count[read<int64_t>(ids)[i]];
    return {x, ids, weights, counts};
  }

  // The new stream, where all experts are here: experts over their tokens, the shared expert over all, summed.
  Tensor run(const Tensor& hidden, const Tensor& x, const Tensor& ids, const Tensor& weights) const {
    check_contiguous(x, 2, "x");
    check_like(hidden, 2, x, "hidden");
    check_indices(ids, "ids");
    TORCH_CHECK(gate_up_.bytes.size(0) == num_experts_, "only ", gate_up_.bytes.size(0), " of ", num_experts_,
                " experts are here");
    check_range(ids, num_experts_, "expert");
    const int64_t num_tokens = x.size(0), num_entries = ids.numel(), width = x.size(1);
    TORCH_CHECK(hidden.sizes() == x.sizes() && num_entries == num_tokens * topk_ && weights.sizes() == ids.sizes() &&
                    weights.scalar_type() == at::kFloat && weights.is_contiguous(),
                "one row of ids and weights per token");
    std::vector<int64_t> tokens(num_entries), place(num_entries), counts(num_experts_);
    sort_by_expert(read<int64_t>(ids), num_tokens, topk_, num_experts_, tokens.data(), place.data(), counts.data());
    std::vector<ExpertRows> experts;
    int64_t first = 0;
    for (const int64_t count : counts) {
      experts.push_back({first, count});
      first += count;
    }
    const Tensor rows = empty({num_entries, width}, x.scalar_type());
    run_experts(x, experts, gate_up_.weight, down_.weight, tokens.data(), nullptr, rows);
    Tensor shared;
    if (shared_down_) {
      shared = empty({num_tokens, width}, x.scalar_type());
      run_experts(x, {{0, num_tokens}}, shared_gate_up_->weight, shared_down_->weight, nullptr, nullptr,
                  shared);
    }
    Tensor out = empty({num_tokens, width}, x.scalar_type());
    with_values(x, [&]<class Value>(Value) {
      combine(read<Value>(hidden), read<Value>(rows), place.data(), read<float>(weights),
              shared_down_ ? read<Value>(shared) : nullptr, write<Value>(out), num_tokens, topk_, width);
    });
    return out;
  }

 private:
  Tensor norm_, router_;
  std::optional<Tensor> bias_;
  double eps_, scale_;
  int64_t num_experts_, method_, topk_, num_groups_, topk_groups_;
  bool normalize_;
  HeldWeight gate_up_, down_;
  std::optional<HeldWeight> shared_gate_up_, shared_down_;
};

// The MLP of a dense layer (model/moe.py).
struct Dense {
  Tensor norm;
  double eps;
  HeldWeight gate_up, down;

  Dense(Tensor norm, double eps, const Packed& gate_up, const Packed& down)
      : norm(std::move(norm)), eps(eps), gate_up(gate_up, 1, true), down(down, 1) {}

  // The new stream.
  Tensor run(const Tensor& hidden) const {
    const Tensor x = rms_norm(hidden, norm, eps), out = empty(hidden.sizes(), hidden.scalar_type());
    run_experts(x, {{0, x.size(0)}}, gate_up.weight, down.weight, nullptr, &hidden, out);
    return out;
  }
};

// All layers between tokens and logits (model/transformer.py), for a rank that holds all experts.
class Stack : public torch::CustomClassHolder {
 public:
  Stack(Tensor embedding, Tensor norm, double eps, const Packed& head)
      : embedding_(std::move(embedding)), norm_(std::move(norm)), eps_(eps), head_(head, 1) {
    TORCH_CHECK(head_.is_wide() && head_.weight.depth == norm_.numel(), "the output head");
  }

  void add_dense(const c10::intrusive_ptr<Attention>& attention, const Tensor& norm, double eps, const Packed& gate_up,
                 const Packed& down) {
    layers_.push_back({attention, {}, std::make_shared<Dense>(norm, eps, gate_up, down)});
  }

  void add_mixture(const c10::intrusive_ptr<Attention>& attention, const c10::intrusive_ptr<Mixture>& mixture) {
    layers_.push_back({attention, mixture, {}});
  }

  // The layer for multi-token prediction: of the embedding of a token and the state before it to its input, and on.
  void set_mtp(const Tensor& token_norm, const Tensor& state_norm, const Packed& joined, const Tensor& norm,
               const c10::intrusive_ptr<Attention>& attention, const c10::intrusive_ptr<Mixture>& mixture) {
    mtp_.emplace(Mtp{token_norm, state_norm, norm, HeldWeight(joined, 1), {attention, mixture, {}}});
  }

  // One decode step: logits [S, vocabulary] in float32 of `logit_rows`, or [0, vocabulary] unless they are wanted, the
  // tokens of each expert, a row per mixture, and the normed states of `logit_rows`. pages [layers, pages, 64, width].
  std::tuple<Tensor, std::vector<Tensor>, Tensor> decode(const Tensor& tokens, const Tensor& cos, const Tensor& sin,
                                                         const std::optional<Tensor>& query_scale,
                                                         const Tensor& positions, const Tensor& slots,
                                                         const Tensor& page_table, const Tensor& kv_tokens,
                                                         const Tensor& logit_rows, const Tensor& pages,
                                                         bool wants_logits) const {
    std::vector<Tensor> counts;
    const Tensor hidden = hidden_of(tokens, {cos, sin, query_scale, positions, slots, page_table, kv_tokens}, pages, counts);
    const Tensor x = rms_norm(gathered(hidden, logit_rows), norm_, eps_);
    return {logits_of(wants_logits ? x : x.narrow(0, 0, 0)), counts, x};
  }

  // Tokens that may come next, [links, requests]: first N rows, of which each request's last one has its first guess,
  // then a row per request and link, whose token is the guess before and whose state the layer's own; see
  // model/mtp.py. Angles, factors, positions, slots, page_table and kv_tokens have N + (links - 1) * requests rows,
  // settings of the draws a value per request; uniforms [links, requests], or [links, 0] where nothing is drawn.
  // pages [pages, 64, width].
  Tensor draft(const Tensor& states, const Tensor& tokens, const Tensor& last_rows, const Tensor& cos,
               const Tensor& sin, const std::optional<Tensor>& query_scale, const Tensor& positions,
               const Tensor& slots, const Tensor& page_table, const Tensor& kv_tokens, const Tensor& pages,
               const std::vector<Tensor>& settings, const Tensor& uniforms) const {
    TORCH_CHECK(mtp_.has_value(), "no layer for multi-token prediction");
    TORCH_CHECK(settings.size() == 4, "temperature, top_k, top_p, min_p");
    const int64_t num_links = uniforms.size(0);
    const bool is_drawn = uniforms.size(1) > 0;
    const Tensor guesses = empty({num_links, last_rows.numel()}, tokens.scalar_type());
    Tensor state = states, next = tokens;
    for (int64_t link = 0, first = 0; link < num_links; ++link) {
      const int64_t count = next.numel();
      const auto part = [&](const Tensor& rows) { return rows.narrow(0, first, count); };
      const auto scale = query_scale ? std::optional<Tensor>(part(*query_scale)) : std::nullopt;
      const RowsOfStep rows{part(cos),   part(sin),        scale,          part(positions),
                            part(slots), part(page_table), part(kv_tokens)};
      const Tensor token_state = rms_norm(gathered(embedding_, next), mtp_->token_norm, eps_);
      Input both(at::cat({token_state, rms_norm(state, mtp_->state_norm, eps_)}, 1));
      state = run(mtp_->layer, both.times(mtp_->joined), rows, pages, nullptr);
      if (link == 0) state = gathered(state, last_rows);
      const Tensor logits = logits_of(rms_norm(state, mtp_->norm, eps_));
      next = std::get<0>(argmax(logits));
      if (is_drawn) {
        const Tensor drawn = batchinfer::tensors::draw(logits, settings[0], settings[1], settings[2], settings[3],
                                                       uniforms.select(0, link));
        next = at::where(settings[0].gt(0), drawn, next);
      }
      guesses.select(0, link).copy_(next);
      first += count;
    }
    return guesses;
  }

  // Decode steps one after the other, each with guesses that the layer for multi-token prediction makes for it, until
  // `limits` say so or nobody goes on; see speculation.h for what comes in and goes out. The rows of requests and what
  // is kept of them are changed in place.
  //
  // Returns [requests, 3 + W] of each request how many new tokens it has, whether it has to be asked if it goes on,
  // whether its last logits are finite, and the tokens; the tokens of each expert, a row per mixture; counts (see
  // Totals); the seconds that guesses took and that steps took.
  std::tuple<Tensor, Tensor, std::vector<int64_t>, std::vector<double>> speculate(
      const Tensor& requests, const Tensor& page_table, const std::vector<Tensor>& kept,
      const std::vector<Tensor>& settings, const std::vector<Tensor>& ends, const std::vector<Tensor>& angles,
      const Tensor& pages, const std::vector<int64_t>& limits) const {
    TORCH_CHECK(mtp_.has_value(), "no layer for multi-token prediction");
    Speculation state(requests, page_table, kept, settings, ends, angles, limits);
    Tensor expert_counts;
    while (state.goes_on()) {
      guess(state);
      state.has_guessed();
      std::vector<Tensor> counts;
      const StepRows rows = state.rows_to_run();
      const Tensor hidden = hidden_of(rows.tokens, of_step(rows), pages, counts);
      const Tensor x = rms_norm(hidden, norm_, eps_);
      const Tensor logits = logits_of(x);
      const auto [tokens, is_finite] = argmax(logits);
      state.draw_into(tokens, logits, is_finite);
      state.accept(tokens, is_finite, x);
      add_counts(counts, expert_counts);
    }
    if (!expert_counts.defined()) expert_counts = empty({0, 0}, at::kLong);
    return {state.outcome(), expert_counts, state.totals().as_list(), {state.draft_s(), state.step_s()}};
  }

 private:
  struct Layer {
    c10::intrusive_ptr<Attention> attention;
    c10::intrusive_ptr<Mixture> mixture;  // or
    std::shared_ptr<Dense> dense;
  };
  // Rows of a decode step, as all layers share them.
  struct RowsOfStep {
    Tensor cos, sin;
    std::optional<Tensor> query_scale;
    Tensor positions, slots, page_table, kv_tokens;
  };
  struct Mtp {
    Tensor token_norm, state_norm, norm;
    HeldWeight joined;
    Layer layer;
  };

  // Queries that are scaled by position are not speculated on here (context.py).
  static RowsOfStep of_step(const StepRows& rows) {
    return {rows.cos, rows.sin, std::nullopt, rows.positions, rows.slots, rows.page_table, rows.kv_tokens};
  }

  // The stream behind the last layer; `counts` gets the tokens of each expert of each mixture.
  Tensor hidden_of(const Tensor& tokens, const RowsOfStep& rows, const Tensor& pages,
                   std::vector<Tensor>& counts) const {
    TORCH_CHECK(pages.size(0) == static_cast<int64_t>(layers_.size()), "pages of ", pages.size(0), " layers, not ",
                layers_.size());
    Tensor hidden = gathered(embedding_, tokens);
    for (size_t number = 0; number < layers_.size(); ++number) {
      hidden = run(layers_[number], hidden, rows, pages.select(0, static_cast<int64_t>(number)), &counts);
    }
    return hidden;
  }

  // One link of guesses after the other, as `draft` makes them, for as many requests as still want one.
  void guess(Speculation& state) const {
    Tensor hidden;
    for (StepRows rows = state.first_link(); rows.tokens.numel() > 0; rows = state.next_link(hidden)) {
      const Tensor token_state = rms_norm(gathered(embedding_, rows.tokens), mtp_->token_norm, eps_);
      Input both(at::cat({token_state, rms_norm(rows.states, mtp_->state_norm, eps_)}, 1));
      hidden = run_last(both.times(mtp_->joined), rows, state.draft_pages());
      const Tensor logits = logits_of(rms_norm(hidden, mtp_->norm, eps_));
      const auto [tokens, is_finite] = argmax(logits);
      state.draw_guesses(tokens, logits, is_finite);
      state.take_guesses(tokens);
    }
  }

  static void add_counts(const std::vector<Tensor>& counts, Tensor& sums) {
    if (counts.empty()) return;
    const int64_t num_layers = static_cast<int64_t>(counts.size()), num_experts = counts[0].numel();
    const bool is_first = !sums.defined();
    if (is_first) sums = empty({num_layers, num_experts}, counts[0].scalar_type());
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      int64_t* const sum = write<int64_t>(sums) + layer * num_experts;
      const int64_t* const count = read<int64_t>(counts[layer]);
      for (int64_t i = 0; i < num_experts; ++i) sum[i] = is_first ? count[i] : sum[i] + count[i];
    }
  }

  // The new stream behind the layer for multi-token prediction, of each request's last row: of the others only the
  // keys are needed.
  Tensor run_last(const Tensor& hidden, const StepRows& rows, const Tensor& pages) const {
    if (!rows.last_rows.defined()) return run(mtp_->layer, hidden, of_step(rows), pages, nullptr);
    const auto& [attention, mixture, dense] = mtp_->layer;
    const Tensor q = attention->project(hidden, rows.cos, rows.sin, std::nullopt, rows.slots, pages, rows.last_rows);
    const Tensor attended = attention->attend_decode(gathered(hidden, rows.last_rows), q, pages, rows.page_table,
                                                     rows.kv_tokens, rows.positions);
    const auto [x, ids, weights, count] = mixture->route(attended);
    return mixture->run(attended, x, ids, weights);
  }

  // The new stream; `counts` gets the tokens of each expert unless it is null.
  static Tensor run(const Layer& layer, const Tensor& hidden, const RowsOfStep& rows, const Tensor& pages,
                    std::vector<Tensor>* counts) {
    const auto& [attention, mixture, dense] = layer;
    const Tensor q = attention->project(hidden, rows.cos, rows.sin, rows.query_scale, rows.slots, pages, std::nullopt);
    const Tensor attended =
        attention->attend_decode(hidden, q, pages, rows.page_table, rows.kv_tokens, rows.positions);
    if (dense) return dense->run(attended);
    const auto [x, ids, weights, count] = mixture->route(attended);
    if (counts) counts->push_back(count);
    return mixture->run(attended, x, ids, weights);
  }

  Tensor logits_of(const Tensor& x) const {
    const Tensor logits = empty({x.size(0), head_.weight.num_columns}, at::kFloat);
    with_values(x, [&]<class Value>(Value) {
      linear<Rows<Value>, float>(rows_of<Value>(x), head_.weight, nullptr, write<float>(logits), x.size(0));
    });
    return logits;
  }

  Tensor embedding_, norm_;
  double eps_;
  HeldWeight head_;
  std::vector<Layer> layers_;
  std::optional<Mtp> mtp_;
};

}  // namespace
}  // namespace batchinfer::tensors

TORCH_LIBRARY_FRAGMENT(batchinfer_cpu, m) {
  using namespace batchinfer::tensors;
  m.class_<Attention>("Attention")
      .def(torch::init<Tensor, double, std::optional<Packed>, std::optional<Tensor>, Packed, Packed, Tensor, double,
                       Packed, Packed, Packed, Packed, std::vector<int64_t>, bool, double>())
      .def("project", &Attention::project)
      .def("attend_decode", &Attention::attend_decode)
      .def("attend_prefill", &Attention::attend_prefill);
  m.class_<Mixture>("Mixture")
      .def(torch::init<Tensor, double, Tensor, std::optional<Tensor>, int64_t, std::vector<int64_t>, bool, double,
                       Packed, Packed, int64_t, std::optional<Packed>, std::optional<Packed>>())
      .def("route", &Mixture::route)
      .def("run", &Mixture::run);
  m.class_<Stack>("Stack")
      .def(torch::init<Tensor, Tensor, double, Packed>())
      .def("add_dense", &Stack::add_dense)
      .def("add_mixture", &Stack::add_mixture)
      .def("set_mtp", &Stack::set_mtp)
      .def("decode", &Stack::decode)
      .def("draft", &Stack::draft)
      .def("speculate", &Stack::speculate);
}
