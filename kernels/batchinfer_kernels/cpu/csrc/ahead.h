// Reading from memory while computing: what comes next is asked for little by little.
//
// A step over few rows reads every weight from memory and multiplies it by some rows. Processors look ahead along what is
// being read, but rows beyond the first few meet weights that are in the cache already, and nothing is read meanwhile.

#pragma once

#include <algorithm>
#include <cstdint>

#include "processor.h"

namespace batchinfer {

// Some bytes, in turns between pieces of work.
class Ahead {
 public:
  // `num_bytes` from `at` on, in about num_turns turns.
  Ahead(const void* at, int64_t num_bytes, int64_t num_turns)
      : at_(static_cast<const char*>(at)),
        end_(at_ + num_bytes),
        bytes_a_turn_((num_bytes + num_turns * kLine - 1) / (num_turns * kLine) * kLine) {}
  static Ahead nothing() { return Ahead(nullptr, 0, 1); }

  void turn() {
    const char* const end = std::min(at_ + bytes_a_turn_, end_);
    for (; at_ < end; at_ += kLine) fetch(at_);
  }

  // As many turns, a few bytes at each of num_steps steps: from where on, and how many. Where nothing is left to ask for, the
  // bytes at `there` again and again.
  struct Steps {
    const char* at;
    int64_t bytes;
  };
  Steps steps(int64_t num_steps, int64_t steps_a_turn, const void* there) {
    if (at_ >= end_) return {static_cast<const char*>(there), 0};
    const Steps found{at_, bytes_a_turn_ / steps_a_turn};
    at_ += num_steps * found.bytes;
    return found;
  }

 private:
  static constexpr int64_t kLine = 64;

  const char *at_, *end_;
  int64_t bytes_a_turn_;
};

// The same of rows of bytes at equal distances, and of other ones behind them.
class RowsAhead {
 public:
  struct Run {
    const void* at = nullptr;
    int64_t bytes = 0, stride = 0, count = 0;

    int64_t num_lines() const { return count * ((bytes + kLine - 1) / kLine); }
  };

  RowsAhead() = default;
  RowsAhead(Run first, Run second, int64_t num_turns)
      : run_(first),
        behind_(second),
        lines_a_turn_((first.num_lines() + second.num_lines() + num_turns - 1) / num_turns) {}

  void turn() {
    for (int64_t line = 0; line < lines_a_turn_; ++line) {
      if (run_.count == 0) {
        run_ = behind_;
        behind_ = {};
        if (run_.count == 0) {
          lines_a_turn_ = 0;
          return;
        }
      }
      const char* const at = static_cast<const char*>(run_.at);
      fetch(at + offset_);
      if ((offset_ += kLine) >= run_.bytes) {
        offset_ = 0;
        run_.at = at + run_.stride;
        --run_.count;
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  Run run_, behind_;
  int64_t offset_ = 0, lines_a_turn_ = 0;
};

// Which of the `count` strips of rows that pass a panel one after the other, and the panel that its thread takes `next`.
// The first strip meets a panel that may still be in memory; each asks for its share of the next panel.
struct Pass {
  int64_t number = 0, count = 0;
  const void* next = nullptr;

  // The next part of the same panel.
  Ahead next_part(const void* at, int64_t num_bytes, int64_t num_turns) const {
    return count > 0 && number == 0 ? Ahead(at, num_bytes, std::max<int64_t>(1, num_turns)) : Ahead::nothing();
  }
  // This strip's share of the first `num_bytes` of the next panel.
  Ahead next_panel(int64_t num_bytes, int64_t num_turns) const {
    if (count == 0 || !next) return Ahead::nothing();
    const int64_t share = (num_bytes + count - 1) / count;
    return Ahead(static_cast<const char*>(next) + number * share, share, std::max<int64_t>(1, num_turns));
  }
};

}  // namespace batchinfer
