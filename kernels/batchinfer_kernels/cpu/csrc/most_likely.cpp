// The tokens of a row's largest logits; see reference_rows.most_likely.

#include "group_largest.h"

namespace batchinfer {
namespace {

struct Likely {
  float logit;
  int64_t token;

  bool operator<(const Likely& other) const {
    return logit != other.logit ? logit > other.logit : token < other.token;
  }
};

// The first `count` tokens in the order, and what is not a number behind all others.
void first_tokens(const float* logits, int64_t num_tokens, int64_t count, int64_t* tokens, float* largest) {
  static thread_local GroupLargest of_thread;
  static thread_local std::vector<Likely> found_in_thread;
  GroupLargest& groups = of_thread;  // looked up once
  std::vector<Likely>& found = found_in_thread;
  groups.find(logits, num_tokens);
  const float least = groups.nth(count);
  found.clear();
  for (int64_t group = 0; group < groups.size(); ++group) {
    if (groups[group] < least) continue;
    const int64_t end = std::min(num_tokens, (group + 1) * kGroupTokens);
    for (int64_t token = group * kGroupTokens; token < end; ++token) {
      if (logits[token] >= least) found.push_back({logits[token], token});
    }
  }
  for (int64_t token = 0; std::ssize(found) < count; ++token) {
    if (std::isnan(logits[token])) found.push_back({-INFINITY, token});
  }
  std::partial_sort(found.begin(), found.begin() + count, found.end());
  for (int64_t i = 0; i < count; ++i) {
    tokens[i] = found[i].token;
    largest[i] = logits[found[i].token];
  }
}

}  // namespace

void most_likely(const float* logits, int64_t num_rows, int64_t num_columns, int64_t count, int64_t* tokens,
                 float* largest) {
  if (count == 0) return;
  const double nanoseconds = num_rows * num_columns / 8.0;  // on one thread, roughly
  run_tasks(num_rows, nanoseconds, [&](int64_t row) {
    first_tokens(logits + row * num_columns, num_columns, count, tokens + row * count, largest + row * count);
  });
}

}  // namespace batchinfer
