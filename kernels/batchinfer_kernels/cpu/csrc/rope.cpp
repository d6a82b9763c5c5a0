// Rotary positions (arXiv 2104.09864) in place, and the latents of new tokens on their way into the pages.

#include <algorithm>
#include <vector>

#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskRows = 32;

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

template <class Row>
void for_rows(int64_t num_rows, Row row) {
  run_tasks((num_rows + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    for (int64_t i = task * kTaskRows; i < std::min(num_rows, (task + 1) * kTaskRows); ++i) row(i);
  });
}

}  // namespace

template <class Value>
void rope(Value* x, int64_t row_stride, int64_t head_stride, int64_t num_heads, int64_t num_rows,
          const Rotary& rotary) {
  const int64_t half = rotary.rotary / 2;
  for_rows(num_rows, [&](int64_t row) {
    for (int64_t head = 0; head < num_heads; ++head) {
      turn(x + row * row_stride + head * head_stride, rotary.cos + row * half, rotary.sin + row * half, rotary.rotary,
           rotary.is_interleaved);
    }
  });
}

template <class Value>
void scale_rows(Value* x, const float* factors, int64_t num_rows, int64_t width) {
  for_rows(num_rows, [&](int64_t row) {
    const Floats factor = floats(factors[row]);
    for (int64_t i = 0; i < width; i += 16) {
      const First those = lanes(width - i);
      Value* const at = x + row * width + i;
      store_rounded(at, those, load_wide(those, at) * factor);
    }
  });
}

template <class Value>
void write_latents(Rows<Value> x, const Value* norm, float eps, const Rotary& rotary, int64_t latent_dim,
                   const int64_t* slots, Value* pages, int64_t row_step, int64_t num_rows) {
  const int64_t half = rotary.rotary / 2;
  for_rows(num_rows, [&](int64_t row) {
    Value* out = pages + slots[row] * row_step;
    norm_row(x.at(row), norm, eps, out, latent_dim);
    std::copy_n(x.at(row) + latent_dim, rotary.rotary, out + latent_dim);
    turn(out + latent_dim, rotary.cos + row * half, rotary.sin + row * half, rotary.rotary, rotary.is_interleaved);
  });
}

template <class Value>
void write_heads(Rows<Value> x, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, const HeadNorms<Value>& norms,
                 const Rotary& rotary, const int64_t* slots, Value* q, Value* pages, int64_t row_step,
                 int64_t num_rows) {
  const int64_t half = rotary.rotary / 2, width = num_kv_heads * head_dim;
  for_rows(num_rows, [&](int64_t row) {
    const auto place = [&](const Value* from, int64_t count, const Value* norm, bool is_whole, Value* to) {
      if (!norm) {
        std::copy_n(from, count * head_dim, to);
      } else if (is_whole) {
        norm_row(from, norm, norms.eps, to, count * head_dim);
      } else {
        for (int64_t i = 0; i < count * head_dim; i += head_dim) norm_row(from + i, norm, norms.eps, to + i, head_dim);
      }
      for (int64_t head = 0; head < count; ++head) {
        turn(to + head * head_dim, rotary.cos + row * half, rotary.sin + row * half, rotary.rotary,
             rotary.is_interleaved);
      }
    };
    const Value* const from = x.at(row);
    Value* const held = pages + slots[row] * row_step;
    place(from, num_heads, norms.q, norms.is_q_whole, q + row * num_heads * head_dim);
    place(from + num_heads * head_dim, num_kv_heads, norms.k, norms.is_k_whole, held);
    std::copy_n(from + num_heads * head_dim + width, width, held + width);
  });
}

#define BATCHINFER_FOR_VALUE(Value)                                                                          \
  template void rope(Value*, int64_t, int64_t, int64_t, int64_t, const Rotary&);                             \
  template void scale_rows(Value*, const float*, int64_t, int64_t);                                          \
  template void write_latents(Rows<Value>, const Value*, float, const Rotary&, int64_t, const int64_t*,      \
                              Value*, int64_t, int64_t);                                                     \
  template void write_heads(Rows<Value>, int64_t, int64_t, int64_t, const HeadNorms<Value>&, const Rotary&,  \
                            const int64_t*, Value*, Value*, int64_t, int64_t);
BATCHINFER_FOR_VALUE(bf16)
BATCHINFER_FOR_VALUE(float)
#undef BATCHINFER_FOR_VALUE

}  // namespace batchinfer
