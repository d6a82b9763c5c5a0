// Rotary positions (arXiv 2104.09864) of one group of values, in place.

#pragma once

#include "vector_math.h"

namespace batchinfer {

// The two values of 16 pairs of a row, and back.
inline void load_pairs(const bf16* x, First those, int64_t, Floats& first, Floats& second) {
  const Ints pairs = load_ints(those, x);
  first = low_values(pairs);
  second = high_values(pairs);
}
inline void load_pairs(const float* x, First, int64_t count, Floats& first, Floats& second) {
  split_pairs(load(lanes(2 * count), x), load(lanes(2 * count - 16), x + 16), first, second);
}
inline void store_pairs(bf16* x, First those, int64_t, Floats first, Floats second) {
  store_ints(x, those, beside(rounded_bits(first), rounded_bits(second)));
}
inline void store_pairs(float* x, First, int64_t count, Floats first, Floats second) {
  Floats low, high;
  join_pairs(first, second, low, high);
  store(x, lanes(2 * count), low);
  store(x + 16, lanes(2 * count - 16), high);
}

template <class Value>
void turn(Value* x, const float* cos, const float* sin, int64_t rotary, bool is_interleaved) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const First those = lanes(half - i);
    const Floats c = load(those, cos + i), s = load(those, sin + i);
    Floats first, second;
    if (is_interleaved) {
      load_pairs(x + 2 * i, those, half - i, first, second);
    } else {
      first = load_wide(those, x + i);
      second = load_wide(those, x + half + i);
    }
    // products and their sum are rounded one by one, as in the reference
    const Floats turned_first = first * c - second * s, turned_second = second * c + first * s;
    if (is_interleaved) {
      store_pairs(x + 2 * i, those, half - i, turned_first, turned_second);
    } else {
      store_rounded(x + i, those, turned_first);
      store_rounded(x + half + i, those, turned_second);
    }
  }
}

}  // namespace batchinfer
