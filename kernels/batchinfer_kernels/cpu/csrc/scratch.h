// Memory for intermediate values. It begins at a cache line: a vector or a tile's row across two lines takes twice the time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

namespace batchinfer {

template <class V>
class Scratch {
 public:
  Scratch() = default;
  // Room for `count` values that are not set to anything.
  explicit Scratch(int64_t count) : values_(new (kLine) V[std::max<int64_t>(1, count)]), count_(count) {}

  // Makes room for `count` values; where there was not enough, all are zero.
  void grow(int64_t count) {
    if (count <= count_) return;
    *this = Scratch(count);
    std::fill_n(data(), count, V{0});
  }

  V* data() const { return values_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(V* values) const { ::operator delete[](values, kLine); }
  };

  std::unique_ptr<V[], Free> values_;
  int64_t count_ = 0;
};

}  // namespace batchinfer
