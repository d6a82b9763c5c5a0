// Which experts a token goes to (DeepSeek-V3 report section 2.1.2), and the order of rows that follows from it.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskTokens = 64;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

constexpr float kLeast = std::numeric_limits<float>::lowest() / 2;  // so that two of them can be added
constexpr float kTaken = std::numeric_limits<float>::quiet_NaN();

// Takes the largest value that is left, the first among equals; returns its index. One must be left.
int64_t take_best(float* values, int64_t count) {
  const Floats best = floats(largest_value(values, count));  // of those that are numbers
  int64_t i = 0;
  Mask is_best;
  while (!any(is_best = both(lanes(count - i), is_equal(load(lanes(count - i), values + i), best)))) i += 16;
  i += smallest_of(is_best, steps());
  values[i] = kTaken;
  return i;
}

float best_two(const float* values, int64_t count) {
  float first = kMinusInfinity, second = kMinusInfinity;
  for (int64_t i = 0; i < count; ++i) {
    second = std::max(second, std::min(first, values[i]));
    first = std::max(first, values[i]);
  }
  return first + second;
}

// Scores of one token, and what its experts are chosen by. Values that are no numbers come last, and then no score is a
// number: the token's result would look sound without the expert that has none.
void sigmoid_scores(const float* logits, const float* bias, int64_t experts, float* scores, float* choice) {
  bool is_finite = true;
  for (int64_t i = 0; i < experts; i += 16) {
    const First first = lanes(experts - i);
    const Floats score = sigmoid_values(load(first, logits + i));
    store(scores + i, first, score);
    const Floats moved = bias ? score + load(first, bias + i) : score;
    is_finite = is_finite && !any(not_below(magnitude(moved), floats(INFINITY)));
    store(choice + i, first, larger(moved, floats(kLeast)));
  }
  if (!is_finite) std::fill_n(scores, experts, NAN);
}

void softmax_scores(const float* logits, int64_t experts, float* scores, float* choice) {
  static thread_local std::vector<double> powers;
  powers.resize((experts + 15) / 16 * 16);
  const double total = powers_of(logits, experts, largest_value(logits, experts), powers.data());
  for (int64_t i = 0; i < experts; ++i) {
    scores[i] = static_cast<float>(powers[i] / total);
    choice[i] = std::isnan(scores[i]) ? kLeast : scores[i];
  }
}

// Experts are chosen by the logits with their bias; scores are the powers that a softmax over the chosen ones divides.
void chosen_scores(const float* logits, const float* bias, int64_t experts, double* scores, float* choice) {
  for (int64_t i = 0; i < experts; i += 16) {
    const First first = lanes(experts - i);
    const Floats logit = load(first, logits + i);
    store(choice + i, first, bias ? logit + load(first, bias + i) : logit);
  }
  const float largest = largest_value(choice, experts);
  powers_of(choice, experts, largest, scores);
  bool is_sound = std::isfinite(largest);
  for (int64_t i = 0; i < experts; ++i) {
    is_sound = is_sound && !std::isnan(choice[i]);
    choice[i] = std::isnan(choice[i]) ? kLeast : std::max(choice[i], kLeast);
  }
  if (!is_sound) std::fill_n(scores, experts, NAN);
}

}  // namespace

void gate(const GateShape& shape, const float* logits, const float* bias, int64_t* ids, float* weights) {
  const int64_t experts = shape.num_experts, group_size = experts / shape.num_groups;
  run_tasks((shape.num_tokens + kTaskTokens - 1) / kTaskTokens, [&](int64_t task) {
    static thread_local std::vector<float> scores, choice, groups;
    static thread_local std::vector<double> powers;
    powers.resize((experts + 15) / 16 * 16);
    scores.resize(experts);
    choice.resize(experts);
    groups.resize(shape.num_groups);
    for (int64_t token = task * kTaskTokens; token < std::min(shape.num_tokens, (task + 1) * kTaskTokens); ++token) {
      const float* const own_logits = logits + token * experts;
      if (shape.method == GateMethod::kNoauxTc) {
        sigmoid_scores(own_logits, bias, experts, scores.data(), choice.data());
      } else if (shape.method == GateMethod::kTopkSoftmax) {
        chosen_scores(own_logits, bias, experts, powers.data(), choice.data());
      } else {
        softmax_scores(own_logits, experts, scores.data(), choice.data());
      }
      const bool has_groups = shape.method != GateMethod::kGreedy && shape.method != GateMethod::kTopkSoftmax;
      if (has_groups && shape.topk_groups < shape.num_groups) {
        for (int64_t group = 0; group < shape.num_groups; ++group) {
          const float* const of_group = choice.data() + group * group_size;
          groups[group] = shape.method == GateMethod::kGroupLimitedGreedy
                              ? *std::max_element(of_group, of_group + group_size)
                              : best_two(of_group, group_size);
        }
        for (int64_t k = 0; k < shape.topk_groups; ++k) take_best(groups.data(), shape.num_groups);
        // scores of a softmax are masked with zero, as in the reference
        const float left_out = shape.method == GateMethod::kNoauxTc ? kMinusInfinity : 0.0f;
        for (int64_t group = 0; group < shape.num_groups; ++group) {
          if (std::isnan(groups[group])) continue;
          std::fill_n(choice.data() + group * group_size, group_size, left_out);
        }
      }
      int64_t* const chosen = ids + token * shape.topk;
      const auto score_of = [&](int64_t expert) {
        return shape.method == GateMethod::kTopkSoftmax ? powers[expert] : double{scores[expert]};
      };
      double total = 0;
      for (int64_t k = 0; k < shape.topk; ++k) {
        chosen[k] = take_best(choice.data(), experts);
        total += score_of(chosen[k]);
      }
      for (int64_t k = 0; k < shape.topk; ++k) {
        const double score = score_of(chosen[k]), share = shape.normalize ? score / (total + 1e-20) : score;
        const bool always_scales = shape.method != GateMethod::kGreedy && shape.method != GateMethod::kGroupLimitedGreedy;
        const bool is_scaled = always_scales || !shape.normalize;
        weights[token * shape.topk + k] = static_cast<float>(is_scaled ? share * shape.scale : share);
      }
    }
  });
}

void sort_by_expert(const int64_t* ids, int64_t num_tokens, int64_t topk, int64_t num_experts, int64_t* tokens,
                    int64_t* place, int64_t* counts) {
  const int64_t num_entries = num_tokens * topk;
  std::fill_n(counts, num_experts, 0);
  for (int64_t entry = 0; entry < num_entries; ++entry) ++counts[ids[entry]];
  std::vector<int64_t> next(num_experts, 0);
  for (int64_t expert = 1; expert < num_experts; ++expert) next[expert] = next[expert - 1] + counts[expert - 1];
  for (int64_t token = 0, entry = 0; token < num_tokens; ++token) {
    for (int64_t k = 0; k < topk; ++k, ++entry) {
      place[entry] = next[ids[entry]]++;
      tokens[place[entry]] = token;
    }
  }
}

}  // namespace batchinfer
