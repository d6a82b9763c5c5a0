// The best of some scores; among equal ones the first.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <vector>

namespace batchinfer {

// Larger scores have larger numbers; both zeros have one.
inline uint32_t number_of(float score) {
  const int32_t bits = std::bit_cast<int32_t>(score + 0.0f);
  return static_cast<uint32_t>(bits ^ ((bits >> 31) & INT32_MAX)) ^ 0x80000000u;
}

// Calls take(key) for the `topk` best of `num_keys` scores, at least as many, in ascending order.
template <class Take>
void take_best(const float* scores, int64_t num_keys, int64_t topk, Take take) {
  static thread_local std::vector<uint32_t> numbers, ordered;
  numbers.resize(num_keys);
  std::transform(scores, scores + num_keys, numbers.begin(), number_of);
  ordered = numbers;
  std::nth_element(ordered.begin(), ordered.begin() + (topk - 1), ordered.end(), std::greater<>());
  const uint32_t least = ordered[topk - 1];
  int64_t num_equal = topk - std::count_if(ordered.begin(), ordered.begin() + topk, [&](uint32_t number) {
    return number > least;
  });
  for (int64_t key = 0; key < num_keys; ++key) {
    if (numbers[key] > least || (numbers[key] == least && num_equal-- > 0)) take(key);
  }
}

}  // namespace batchinfer
