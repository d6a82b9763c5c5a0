// Row-wise operations: norm, activation, rounding to 8 bits, sums over experts.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "amx_tiles.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskValues = 16384;  // below this a thread costs more to wake than it does
constexpr float kMostInt8 = 127.0f;

// Calls row(i) for all rows, some at a time on each thread.
template <class Row>
void for_rows(int64_t num_rows, int64_t width, Row row) {
  const int64_t step = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, width));
  run_tasks((num_rows + step - 1) / step, [&](int64_t task) {
    for (int64_t index = task * step; index < std::min(num_rows, (task + 1) * step); ++index) row(index);
  });
}

// The places of the token behind this one, if there is one.
inline const int64_t* next_place(const int64_t* place, int64_t token, int64_t num_tokens, int64_t topk) {
  return place + std::min(token + 1, num_tokens - 1) * topk;
}

// 16 values of a token's sum over its experts, products and sums rounded one by one. Rows are all over memory and too short
// for processors to look ahead in them, so those of the next token are asked for meanwhile.
template <class Value>
inline Floats weighted_sum(const Value* rows, const int64_t* place, const int64_t* next, const float* weights,
                           int64_t topk, int64_t width, First first, int64_t column) {
  if (column % (64 / int64_t{sizeof(Value)}) == 0) {
    for (int64_t k = 0; k < topk; ++k) fetch_near(rows + next[k] * width + column);
  }
  Floats sum = floats(0.0f);
  for (int64_t k = 0; k < topk; ++k) {
    sum = sum + load_wide(first, rows + place[k] * width + column) * floats(weights[k]);
  }
  return sum;
}

}  // namespace

template <class Value, class Factor>
void norm_row(const Value* values, const Factor* weight, float eps, Value* out, int64_t width) {
  Floats squares = floats(0.0f);
  for (int64_t i = 0; i < width; i += 16) {
    const Floats part = load_wide(lanes(width - i), values + i);
    squares = multiply_add(part, part, squares);
  }
  const Floats factor = floats(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < width; i += 16) {
    const First first = lanes(width - i);
    Floats normed = load_wide(first, values + i) * factor;
    // rounded before a weight of the same type, as in the reference
    if constexpr (std::is_same_v<Value, Factor>) normed = rounded<Value>(normed);
    store_rounded(out + i, first, normed * load_wide(first, weight + i));
  }
}

template <class Value, class Factor>
void rms_norm(Rows<Value> x, const Factor* weight, float eps, Value* out, int64_t num_rows, int64_t width) {
  for_rows(num_rows, width, [&](int64_t row) { norm_row(x.at(row), weight, eps, out + row * width, width); });
}

template <class Value>
void silu_mul(Rows<Value> gate, Rows<Value> up, Value* out, int64_t num_rows, int64_t width,
              const Activation& activation) {
  for_rows(num_rows, width, [&](int64_t row) {
    for (int64_t i = 0; i < width; i += 16) {
      const First first = lanes(width - i);
      const Floats own = load_wide(first, gate.at(row) + i), other = load_wide(first, up.at(row) + i);
      store_rounded(out + row * width + i, first, active_values(own, other, activation));
    }
  });
}

template <class Value>
void add_sums(const Value* hidden, const float* sums, const Value* added, Value* out, int64_t num_values) {
  for_rows((num_values + 1023) / 1024, 1024, [&](int64_t part) {
    for (int64_t i = part * 1024; i < std::min(num_values, (part + 1) * 1024); i += 16) {
      const First first = lanes(num_values - i);
      Floats sum = load(first, sums + i);
      if (added) sum = sum + load_wide(first, added + i);
      store_rounded(out + i, first, load_wide(first, hidden + i) + rounded<Value>(sum));
    }
  });
}

// Rounds a block's values to 8 bits, signed ones or ones that are moved up by 128. Returns the scale.
inline float block_to_bytes(const bf16* values, bool is_signed, uint8_t* bytes) {
  // magnitudes in the order of their bits, those that are not finite last; compilers make vectors of this
  bf16 most = 0;
  for (int64_t i = 0; i < kBlock; ++i) most = std::max<bf16>(most, values[i] & 0x7FFF);
  const bool is_finite = most < 0x7F80;
  const float peak = wide_of(most);
  const Floats factor = floats(is_finite && peak > 0 ? kMostInt8 / peak : 0.0f);
  for (int64_t i = 0; i < kBlock; i += 16) {
    const Ints whole = nearest_ints(load_wide(lanes(16), values + i) * factor);
    const Mask wraps = is_less(whole, ints(0));
    store_bytes(bytes + i, is_signed ? choose(wraps, plus(whole, ints(256)), whole) : plus(whole, ints(128)));
  }
  // a row that is not finite must not look finite afterwards: its scale is not
  return is_finite ? peak / kMostInt8 : NAN;
}

void to_bytes(Rows<bf16> x, uint8_t* out, float* scales, int32_t* starts, int64_t num_rows, int64_t width) {
  const int64_t num_blocks = (width + kBlock - 1) / kBlock;
  const bool is_signed = starts || kHasTiles;
  for_rows(num_rows, width, [&](int64_t row) {
    for (int64_t block = 0; block < num_blocks; ++block) {
      const bf16* values = x.at(row) + block * kBlock;
      uint8_t* bytes = out + (row * num_blocks + block) * kBlock;
      bf16 padded[kBlock];
      if (const int64_t count = width - block * kBlock; count < kBlock) {
        std::fill(std::copy_n(values, count, padded), padded + kBlock, bf16{});
        values = padded;
      }
      scales[row * num_blocks + block] = block_to_bytes(values, is_signed, bytes);
      if (!starts) continue;
      for (int64_t group = 0; group < kBlock / kGroup; ++group) {
        int32_t sum = 0;
        for (int64_t i = group * kGroup; i < (group + 1) * kGroup; ++i) {
          sum += static_cast<int8_t>(bytes[i]);
        }
        starts[(row * num_blocks + block) * (kBlock / kGroup) + group] = -8 * sum;
      }
    }
  });
}

template <class Value>
void sum_per_token(const Value* rows, const int64_t* place, const float* weights, float* sums, int64_t num_tokens,
                   int64_t topk, int64_t width) {
  for_rows(num_tokens, width * topk, [&](int64_t token) {
    const int64_t* const next = next_place(place, token, num_tokens, topk);
    for (int64_t i = 0; i < width; i += 16) {
      const First first = lanes(width - i);
      const Floats sum = weighted_sum(rows, place + token * topk, next, weights + token * topk, topk, width, first, i);
      store(sums + token * width + i, first, sum);
    }
  });
}

template <class Value>
void combine(const Value* hidden, const Value* rows, const int64_t* place, const float* weights, const Value* added,
             Value* out, int64_t num_tokens, int64_t topk, int64_t width) {
  for_rows(num_tokens, width * topk, [&](int64_t token) {
    const int64_t* const next = next_place(place, token, num_tokens, topk);
    for (int64_t i = 0; i < width; i += 16) {
      const First first = lanes(width - i);
      Floats sum = weighted_sum(rows, place + token * topk, next, weights + token * topk, topk, width, first, i);
      if (added) sum = sum + load_wide(first, added + token * width + i);
      store_rounded(out + token * width + i, first, load_wide(first, hidden + token * width + i) + rounded<Value>(sum));
    }
  });
}

// Calls copy(row) for all rows of `row_bytes`.
template <class Copy>
void for_copies(int64_t num_rows, int64_t row_bytes, Copy copy) {
  constexpr int64_t kTaskRows = 16, kBytesPerNanosecond = 10;
  const double nanoseconds = 1.0 * num_rows * row_bytes / kBytesPerNanosecond;
  run_tasks((num_rows + kTaskRows - 1) / kTaskRows, nanoseconds, [&](int64_t task) {
    for (int64_t row = task * kTaskRows; row < std::min(num_rows, (task + 1) * kTaskRows); ++row) copy(row);
  });
}

void gather_rows(const void* rows, int64_t step_bytes, int64_t row_bytes, const int64_t* index, int64_t num_rows,
                 void* out) {
  for_copies(num_rows, row_bytes, [&](int64_t row) {
    const auto* const from = static_cast<const uint8_t*>(rows) + index[row] * step_bytes;
    std::memcpy(static_cast<uint8_t*>(out) + row * row_bytes, from, row_bytes);
  });
}

void put_rows(const void* values, const int64_t* index, int64_t num_rows, int64_t step_bytes, int64_t row_bytes,
              void* rows) {
  for_copies(num_rows, row_bytes, [&](int64_t row) {
    const auto* const from = static_cast<const uint8_t*>(values) + row * row_bytes;
    std::memcpy(static_cast<uint8_t*>(rows) + index[row] * step_bytes, from, row_bytes);
  });
}

#define BATCHINFER_FOR_VALUE(Value)                                                                                \
  template void norm_row(const Value*, const Value*, float, Value*, int64_t);                                       \
  template void rms_norm(Rows<Value>, const Value*, float, Value*, int64_t, int64_t);                               \
  template void silu_mul(Rows<Value>, Rows<Value>, Value*, int64_t, int64_t, const Activation&);                    \
  template void add_sums(const Value*, const float*, const Value*, Value*, int64_t);                                \
  template void sum_per_token(const Value*, const int64_t*, const float*, float*, int64_t, int64_t, int64_t);       \
  template void combine(const Value*, const Value*, const int64_t*, const float*, const Value*, Value*, int64_t,    \
                        int64_t, int64_t);
BATCHINFER_FOR_VALUE(bf16)
BATCHINFER_FOR_VALUE(float)
template void norm_row(const bf16*, const float*, float, bf16*, int64_t);
template void rms_norm(Rows<bf16>, const float*, float, bf16*, int64_t, int64_t);
#undef BATCHINFER_FOR_VALUE

}  // namespace batchinfer
