// Tokens drawn from logits that were filtered; see reference_rows.draw.
//
// A token's weight is a whole number, so sums are exact and may be made in any order. A row goes through
//
//   largest       the largest logit of each group of tokens, and of the row
//   weights       exp((logit - largest) / temperature) in units of 2^-44, rounded; of the groups that are asked for
//   last          the last token that stays, in the order from the largest weight to the smallest: all three filters
//                 keep a first part of it
//   block sums    of the weights that stay, by which the drawn token is found
//
// No row is sorted. Mostly few tokens are enough for a limit: those whose weights are not below the largest ones of some
// groups. Where they are not, weights are added up in buckets of similar ones, and these from the largest on until the limit
// is reached. Of the tokens that are left the last one is looked for, by halves.
//
// Milliseconds for 64 rows of 129,280 logits on one core of an AMD EPYC (Zen 5): 1.4 with top_k (50), 1.8 with top_p behind
// it, 0.5 to 7 with min_p, 7 without filters, 7 with top_p where few tokens are its share, 15 where most of them are.

#include <bit>
#include <cfloat>
#include <numeric>

#include "group_largest.h"

namespace batchinfer {
namespace {

constexpr int kUnitBits = 44;
constexpr double kUnit = 1ll << kUnitBits;
static_assert(kMostTokens < 1ll << (63 - kUnitBits));
constexpr int64_t kGroupsOfBlock = 4;
static_assert(kGroupTokens <= 1ll << (53 - kUnitBits));  // so that a group's sum is exact in float64
constexpr int64_t kFewGroups = 64;  // whose largest weights are mostly enough
// Of two logits the larger one may weigh less by this much where a rounding lies between.
constexpr double kUneven = 1;

// Weights whose exponent and first kBucketBits bits behind the leading one are alike share a bucket.
constexpr int kBucketBits = 7, kDropped = 52 - kBucketBits;
constexpr int64_t kFirstBucket = 1023ll << kBucketBits;  // such bits of the weight 1
constexpr int64_t kNumBuckets = (int64_t{kUnitBits} << kBucketBits) + 1;
// Behind them come some for weights that no filter asks about: a single one would have to wait for itself.
constexpr int64_t kNumRest = 16;

// The smallest weight of a bucket.
inline double least_of(int64_t bucket) {
  return bucket < kNumBuckets ? std::ceil(std::bit_cast<double>((bucket + kFirstBucket) << kDropped)) : INFINITY;
}

// A whole number from 0 to 2^51, in words of which compilers make vectors for all processors.
inline int64_t whole(double weight) {
  return std::bit_cast<int64_t>(weight + 0x1p52) - std::bit_cast<int64_t>(0x1p52);
}
// Weights in the order of their bits, which compilers compare in vectors.
inline int64_t bits(double weight) { return std::bit_cast<int64_t>(weight); }

// A token's place in the order: the largest weight first, the lowest token among equals.
struct Place {
  double weight;
  int64_t token;

  bool operator<(const Place& other) const {
    return weight != other.weight ? weight > other.weight : token < other.token;
  }
};

// What a token counts for in the limits of top_k and top_p.
inline int64_t one(int64_t) { return 1; }
inline int64_t itself(int64_t weight) { return weight; }

// One row at a time; its buffers serve one row after another.
class Row {
 public:
  void begin(const float* logits, int64_t num_tokens, double temperature) {
    logits_ = logits;
    num_tokens_ = num_tokens;
    temperature_ = std::max(temperature, DBL_MIN);  // smaller ones would count as zero
    groups_.find(logits, num_tokens);
    largest_ = groups_.of_row();
    const int64_t num_groups = groups_.size();
    weights_.resize(num_groups * kGroupTokens);
    is_weighed_.assign(num_groups, false);
    sums_.resize((num_groups + kGroupsOfBlock - 1) / kGroupsOfBlock);
    group_most_.resize((num_groups + 15) / 16 * 16);
    for (int64_t group = 0; group < num_groups; group += 16) {
      weigh_16(groups_.data() + group, num_groups - group, group_most_.data() + group);
    }
    for (double& most : group_most_) most += kUneven;
  }

  // The last token that top_k, top_p and min_p leave.
  Place last_kept(int64_t top_k, double top_p, double min_p) {
    const Place in_share{std::ceil(min_p * kUnit), end().token};
    const Place counted = 0 < top_k && top_k < num_tokens_ ? reaching<one>(top_k, 1, std::max(kFewGroups, top_k)) : end();
    if (top_p >= 1) return std::min(in_share, counted);
    const int64_t left = add_up(counted);
    const int64_t limit = std::max<int64_t>(1, std::ceil(top_p * static_cast<double>(left)));
    // all weights below this one together are not more than what may be left out
    const double needless = (left - limit) / num_tokens_;
    const double least = std::max({1.0, counted.weight, needless});
    return std::min({in_share, counted, reaching<itself>(limit, least, kFewGroups)});
  }

  // The first token up to which the weights that stay are more than this share of them all.
  int64_t token_at(double uniform, Place last) {
    const int64_t total = add_up(last);
    int64_t left = std::min(static_cast<int64_t>(uniform * static_cast<double>(total)), total - 1);
    int64_t block = 0;
    while (block + 1 < std::ssize(sums_) && sums_[block] <= left) left -= sums_[block++];
    for (int64_t group = block * kGroupsOfBlock; group < groups_.size(); ++group) {
      if (group_most_[group] < last.weight) continue;
      const double* const weights = weights_of(group);
      const int64_t start = group * kGroupTokens, count = std::min(kGroupTokens, num_tokens_ - start);
      for (int64_t i = 0; i < count; ++i) {
        if (last < Place{weights[i], start + i}) continue;
        left -= whole(weights[i]);
        if (left < 0) return start + i;
      }
    }
    return num_tokens_ - 1;
  }

 private:
  Place end() const { return {0, num_tokens_ - 1}; }

  // The weights of the first 16 of `count` logits; behind them zeros.
  void weigh_16(const float* logits, int64_t count, double* out) const {
    const Floats part = load_or(lanes(count), logits, -INFINITY);
    const Doubles largest = doubles(largest_), divisor = doubles(temperature_);
    const auto weight = [&](Doubles logit) {
      // a row that is not finite means nothing, but its weights must be weights
      const Doubles power = smaller(doubles(0.0), larger((logit - largest) / divisor, doubles(-1000.0)));
      return nearest_whole(exp_values(power) * doubles(kUnit));
    };
    store(out, weight(low_doubles(part)));
    store(out + 8, weight(high_doubles(part)));
  }

  double weight_of(float logit) const {
    double weights[16];
    weigh_16(&logit, 1, weights);
    return weights[0];
  }

  // The weights of a group's tokens; behind the last token zeros.
  const double* weights_of(int64_t group) {
    double* const weights = weights_.data() + group * kGroupTokens;
    if (is_weighed_[group]) return weights;
    is_weighed_[group] = true;
    const int64_t start = group * kGroupTokens;
    for (int64_t i = 0; i < kGroupTokens; i += 16) {
      const int64_t count = num_tokens_ - start - i;
      if (count > 0) {
        weigh_16(logits_ + start + i, count, weights + i);
      } else {
        std::fill_n(weights + i, 16, 0.0);
      }
    }
    return weights;
  }

  // The last of the fewest first tokens in the order whose measures together reach the limit; the very last token where
  // all those with at least this weight do not. At least `num_groups` tokens are tried first.
  template <int64_t (*measure)(int64_t)>
  Place reaching(int64_t limit, double least, int64_t num_groups) {
    if (num_groups <= groups_.size()) {
      gather(std::max(least, weight_of(groups_.nth(num_groups)) - kUneven), INFINITY);
      if (sum_of_places<measure>(places_.begin(), places_.end()) >= limit) return reaching_within<measure>(limit);
    }
    fill_buckets<measure>(least);
    for (int64_t bucket = kNumBuckets - 1; bucket >= 0; --bucket) {
      if (buckets_[bucket] >= limit) {
        gather(least_of(bucket), least_of(bucket + 1));
        return reaching_within<measure>(limit);
      }
      limit -= buckets_[bucket];
    }
    return end();
  }

  template <int64_t (*measure)(int64_t)>
  __attribute__((noinline)) void fill_buckets(double least) {  // where it is part of others compilers make no vectors
    buckets_.assign(kNumBuckets + kNumRest, 0);
    // the compiler cannot know that buckets do not overlap with these members
    int64_t* const buckets = buckets_.data();
    for (int64_t group = 0; group < groups_.size(); ++group) {
      if (group_most_[group] < least) continue;
      const double* const weights = weights_of(group);
      int64_t places[kGroupTokens], measures[kGroupTokens];
      for (int64_t i = 0; i < kGroupTokens; ++i) {
        const int64_t bucket = (bits(weights[i]) >> kDropped) - kFirstBucket;
        places[i] = bits(weights[i]) >= bits(least) ? bucket : kNumBuckets + i % kNumRest;
        measures[i] = measure(whole(weights[i]));
      }
      for (int64_t i = 0; i < kGroupTokens; ++i) buckets[places[i]] += measures[i];
    }
  }

  // Of the tokens that were gathered, which reach it.
  template <int64_t (*measure)(int64_t)>
  Place reaching_within(int64_t limit) {
    auto first = places_.begin(), end = places_.end();
    while (end - first > 1) {
      const auto middle = first + (end - first) / 2;
      std::nth_element(first, middle, end);
      const int64_t before = sum_of_places<measure>(first, middle);
      if (before >= limit) {
        end = middle;
      } else {
        limit -= before;
        first = middle;
      }
    }
    return *first;
  }

  template <int64_t (*measure)(int64_t), class Iterator>
  static int64_t sum_of_places(Iterator first, Iterator end) {
    int64_t sum = 0;
    for (; first < end; ++first) sum += measure(whole(first->weight));
    return sum;
  }

  // The tokens whose weights are from `least`, which is above 0, to below `end`.
  void gather(double least, double end) {
    places_.clear();
    const uint64_t first = bits(least), width = bits(end) - first;
    for (int64_t group = 0; group < groups_.size(); ++group) {
      if (group_most_[group] < least) continue;
      const double* const weights = weights_of(group);
      const auto is_inside = [&](int64_t i) { return bits(weights[i]) - first < width; };
      for (int64_t from = 0; from < kGroupTokens; from += 32) {
        bool is_any = false;
        for (int64_t i = from; i < from + 32; ++i) is_any |= is_inside(i);
        if (!is_any) continue;
        for (int64_t i = from; i < from + 32; ++i) {
          if (is_inside(i)) places_.push_back({weights[i], group * kGroupTokens + i});
        }
      }
    }
  }

  // The sum of the weights up to `last` in the order; sums_ are those of each block.
  int64_t add_up(Place last) {
    std::fill(sums_.begin(), sums_.end(), 0);
    for (int64_t group = 0; group < groups_.size(); ++group) {
      if (group_most_[group] >= last.weight) sums_[group / kGroupsOfBlock] += sum_of_group(group, last);
    }
    return std::accumulate(sums_.begin(), sums_.end(), int64_t{0});
  }

  int64_t sum_of_group(int64_t group, Place last) {
    const double* const weights = weights_of(group);
    const int64_t num_before = std::clamp<int64_t>(last.token + 1 - group * kGroupTokens, 0, kGroupTokens);
    if (num_before % kGroupTokens == 0) {
      const Doubles least = doubles(num_before ? last.weight : last.weight + 1);
      Doubles sum = doubles(0.0);
      for (int64_t i = 0; i < kGroupTokens; i += 8) {
        const Doubles values = load_doubles(weights + i);
        sum = sum + zero_below(least, values, values);
      }
      return static_cast<int64_t>(sum_of(sum));
    }
    int64_t sum = 0;
    for (int64_t i = 0; i < kGroupTokens; ++i) {
      sum += weights[i] >= (i < num_before ? last.weight : last.weight + 1) ? whole(weights[i]) : 0;
    }
    return sum;
  }

  const float* logits_ = nullptr;
  int64_t num_tokens_ = 0;
  double temperature_ = 1;
  float largest_ = 0;
  GroupLargest groups_;
  std::vector<double> weights_, group_most_;  // of a group no weight is more
  std::vector<uint8_t> is_weighed_;
  std::vector<int64_t> buckets_, sums_;
  std::vector<Place> places_;
};

}  // namespace

void draw(const float* logits, const DrawSettings& settings, int64_t num_rows, int64_t num_columns, int64_t* tokens) {
  const double nanoseconds = 1.0 * num_rows * num_columns;  // on one thread, roughly
  run_tasks(num_rows, nanoseconds, [&](int64_t index) {
    static thread_local Row of_thread;
    Row& row = of_thread;  // looked up once
    row.begin(logits + index * num_columns, num_columns, settings.temperature[index]);
    const Place last = row.last_kept(settings.top_k[index], settings.top_p[index], settings.min_p[index]);
    tokens[index] = row.token_at(settings.uniform[index], last);
  });
}

}  // namespace batchinfer
