// The largest logit of each group of tokens of a row: where the tokens with the largest ones can be, and where not.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "vector_math.h"

namespace batchinfer {

constexpr int64_t kGroupTokens = 128;

// One row at a time; its buffers serve one row after another. What is not a number is passed over.
class GroupLargest {
 public:
  void find(const float* logits, int64_t num_tokens) {
    each_.resize((num_tokens + kGroupTokens - 1) / kGroupTokens);
    for (int64_t group = 0; group < size(); ++group) {
      const int64_t start = group * kGroupTokens;
      each_[group] = largest_value(logits + start, std::min(kGroupTokens, num_tokens - start));
    }
  }

  int64_t size() const { return std::ssize(each_); }
  float operator[](int64_t group) const { return each_[group]; }
  const float* data() const { return each_.data(); }
  float of_row() const { return largest_value(each_.data(), size()); }

  // The number-th largest group maximum, so at least `number` tokens are not below it; -infinity with fewer groups.
  float nth(int64_t number) {
    if (number > size()) return -INFINITY;
    ordered_ = each_;
    std::nth_element(ordered_.begin(), ordered_.begin() + number - 1, ordered_.end(), std::greater<>());
    return ordered_[number - 1];
  }

 private:
  std::vector<float> each_, ordered_;
};

}  // namespace batchinfer
