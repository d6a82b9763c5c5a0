// Reading from memory while computing: what comes next is asked for little by little.
//
// A step over few rows reads every weight from memory and multiplies it by some rows. Processors look ahead along what is
// being read, but rows beyond the first few meet weights that are in the cache already, and nothing is read meanwhile.

#pragma once

#include <algorithm>
#include <cstdint>

#include <immintrin.h>

namespace batchinfer {

// Some bytes, in turns between pieces of work. Asking for what is not there does no harm.
class Ahead {
 public:
  // `num_bytes` from `at` on, in about num_turns turns.
  Ahead(const void* at, int64_t num_bytes, int64_t num_turns)
      : at_(static_cast<const char*>(at)),
        end_(at_ + num_bytes),
        bytes_a_turn_((num_bytes + num_turns * kLine - 1) / (num_turns * kLine) * kLine) {}
  static Ahead nothing() { return Ahead(nullptr, 0, 1); }

  void turn() {
    // into the second level: the first has fewer reads from memory under way at a time
    const char* const end = std::min(at_ + bytes_a_turn_, end_);
    for (; at_ < end; at_ += kLine) _mm_prefetch(at_, _MM_HINT_T1);
  }

 private:
  static constexpr int64_t kLine = 64;

  const char *at_, *end_;
  int64_t bytes_a_turn_;
};

// Which of the strips of rows that pass a panel one after the other: the first one meets a panel that may still be in
// memory, and while the last one passes, the next panel is asked for.
struct Pass {
  bool is_first = false, is_last = false;

  static Pass of(int64_t begin, int64_t end, int64_t strip_begin, int64_t strip_end) {
    return {strip_begin == begin, strip_end == end};
  }
  // What stands behind a part of a panel: in the same panel, or the next one.
  Ahead behind(bool is_same_panel, const void* at, int64_t num_bytes, int64_t num_turns) const {
    return (is_same_panel ? is_first : is_last) ? Ahead(at, num_bytes, std::max<int64_t>(1, num_turns)) : Ahead::nothing();
  }
};

}  // namespace batchinfer
