// Whether to multiply bfloat16 by the instruction for pairs (vdpbf16ps) where there is one, or widened to float32.
//
// AMD's Zen 4 and 5 run that instruction as often as a multiply-add of float32, so it is twice as fast; Intel's Emerald
// and Granite Rapids run it a quarter as often. Both ways have the same bits, so the rates decide, measured once in a
// process.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>

#include "lanes.h"

namespace batchinfer {

#ifdef BATCHINFER_PAIR_PRODUCTS

namespace {

constexpr int kSums = 12, kTrials = 9;
constexpr int64_t kRounds = 400;
// A pair as float32 takes two multiply-adds and a share of the widening: 28 instructions where 24 multiply.
constexpr double kWidePair = 2.0 * 28 / 24;

std::atomic<int64_t> choice{-1};

// Nanoseconds of products that do not wait for each other.
template <class Value>
double trial(Value row, Value columns) {
  Floats sums[kSums] = {};
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (Floats& sum : sums) {
      add_product(sum, row, columns);
      asm volatile("" : "+v"(sum));
    }
  }
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
}

// Of some trials by turns the shortest: nothing else can make them quicker than they are.
bool measured() {
  double pairs = std::numeric_limits<double>::infinity(), singles = pairs;
  for (int i = 0; i < kTrials; ++i) {
    pairs = std::min(pairs, trial(row_pair(0), (Pairs)ints(0)));
    singles = std::min(singles, trial(floats(0.0f), floats(0.0f)));
  }
  return pairs < kWidePair * singles;
}

}  // namespace

bool pairs_are_quick() {
  static const bool are_quick = measured();
  const int64_t chosen = choice.load(std::memory_order_relaxed);
  return chosen < 0 ? are_quick : chosen > 0;
}

void choose_pairs(int64_t chosen) { choice.store(chosen); }

#else

bool pairs_are_quick() { return false; }
void choose_pairs(int64_t) {}

#endif

}  // namespace batchinfer
