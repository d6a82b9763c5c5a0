// Hyper-connections (DeepSeek-V4 report section 2.2): several streams of a token between sublayers, all in float32.

#include <algorithm>
#include <cmath>
#include <vector>

#include "streams.h"
#include "vector_math.h"

namespace batchinfer {
namespace {

constexpr int64_t kTaskValues = 16384;

template <class Row>
void for_rows(int64_t num_rows, int64_t width, Row row) {
  const int64_t step = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, width));
  run_tasks((num_rows + step - 1) / step, [&](int64_t task) {
    for (int64_t index = task * step; index < std::min(num_rows, (task + 1) * step); ++index) row(index);
  });
}

// 16 values of the sum of streams times their factors, products and sums rounded one by one.
template <class Value>
inline Floats weighted(const Value* streams, const float* factors, int64_t factor_step, int64_t num_streams,
                       int64_t hidden, First first, int64_t column) {
  Floats sum = floats(factors[0]) * load_wide(first, streams + column);
  for (int64_t stream = 1; stream < num_streams; ++stream) {
    sum = sum + floats(factors[stream * factor_step]) * load_wide(first, streams + stream * hidden + column);
  }
  return sum;
}

template <class Function>
void for_vectors(const float* from, float* to, int64_t count, Function function) {
  for (int64_t i = 0; i < count; i += 16) {
    const First first = lanes(count - i);
    store(to + i, first, function(load(first, from + i)));
  }
}

// Divides each value by the sum over its row (or column) plus `eps`, sums in the order of streams.
void divide_by_sums(float* values, int64_t count, int64_t step, int64_t next, float eps) {
  for (int64_t line = 0; line < count; ++line) {
    float* const own = values + line * next;
    float sum = own[0];
    for (int64_t i = 1; i < count; ++i) sum = sum + own[i * step];
    sum = sum + eps;
    for (int64_t i = 0; i < count; ++i) own[i * step] = own[i * step] / sum;
  }
}

}  // namespace

template <class Value>
void norm_products(const Value* streams, float* products, float eps, int64_t num_rows, int64_t width,
                   int64_t num_products) {
  for_rows(num_rows, width, [&](int64_t row) {
    const Value* const values = streams + row * width;
    Floats squares = floats(0.0f);
    for (int64_t i = 0; i < width; i += 16) {
      const Floats part = load_wide(lanes(width - i), values + i);
      squares = multiply_add(part, part, squares);
    }
    const float factor = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(width) + eps);
    for (int64_t i = 0; i < num_products; ++i) products[row * num_products + i] *= factor;
  });
}

void stream_mix(const StreamShape& shape, const float* mixed, const float* scale, const float* base, int64_t num_rounds,
                float eps, float* before, float* after, float* past) {
  const int64_t count = shape.num_streams, square = count * count, num_mixed = 2 * count + square;
  for_rows(shape.num_rows, 64 * num_mixed, [&](int64_t row) {
    static thread_local std::vector<float> values;
    values.assign((num_mixed + 15) / 16 * 16, 0.0f);
    for (int64_t i = 0; i < num_mixed; ++i) {
      values[i] = mixed[row * num_mixed + i] * scale[i < count ? 0 : i < 2 * count ? 1 : 2] + base[i];
    }
    for_vectors(values.data(), before + row * count, count, [&](Floats x) { return sigmoid_values(x) + floats(eps); });
    for_vectors(values.data() + count, after + row * count, count,
                [&](Floats x) { return floats(2.0f) * sigmoid_values(x); });
    float* const own = past + row * square;
    for (int64_t line = 0; line < count; ++line) {
      float* const logits = values.data() + 2 * count + line * count;
      float peak = logits[0];
      for (int64_t i = 1; i < count; ++i) peak = logits[i] > peak || std::isnan(logits[i]) ? logits[i] : peak;
      for (int64_t i = 0; i < count; ++i) logits[i] = logits[i] - peak;
    }
    for_vectors(values.data() + 2 * count, own, square, [](Floats x) { return exp_values(x); });
    divide_by_sums(own, count, 1, count, 0.0f);
    for (int64_t i = 0; i < square; ++i) own[i] = own[i] + eps;
    divide_by_sums(own, count, count, 1, eps);
    for (int64_t round = 1; round < num_rounds; ++round) {
      divide_by_sums(own, count, 1, count, eps);
      divide_by_sums(own, count, count, 1, eps);
    }
  });
}

template <class Value>
void join_streams(const StreamShape& shape, const Value* streams, const float* factors, Value* out) {
  const auto [num_rows, count, hidden] = shape;
  for_rows(num_rows, count * hidden, [&, count = count, hidden = hidden](int64_t row) {
    for (int64_t i = 0; i < hidden; i += 16) {
      const First first = lanes(hidden - i);
      store_rounded(out + row * hidden + i, first,
                    weighted(streams + row * count * hidden, factors + row * count, 1, count, hidden, first, i));
    }
  });
}

template <class Value>
void leave_streams(const StreamShape& shape, const Value* streams, const float* after, const float* past, const Value* y,
                   Value* out) {
  const auto [num_rows, count, hidden] = shape;
  for_rows(num_rows, 2 * count * hidden, [&, count = count, hidden = hidden](int64_t row) {
    const Value* const own = streams + row * count * hidden;
    for (int64_t i = 0; i < hidden; i += 16) {
      const First first = lanes(hidden - i);
      const Floats result = load_wide(first, y + row * hidden + i);
      for (int64_t stream = 0; stream < count; ++stream) {
        const Floats sum = weighted(own, past + row * count * count + stream, count, count, hidden, first, i);
        store_rounded(out + (row * count + stream) * hidden + i, first, floats(after[row * count + stream]) * result + sum);
      }
    }
  });
}

#define BATCHINFER_FOR_VALUE(Value)                                                                             \
  template void norm_products(const Value*, float*, float, int64_t, int64_t, int64_t);                          \
  template void join_streams(const StreamShape&, const Value*, const float*, Value*);                           \
  template void leave_streams(const StreamShape&, const Value*, const float*, const float*, const Value*, Value*);
BATCHINFER_FOR_VALUE(bf16)
BATCHINFER_FOR_VALUE(float)
#undef BATCHINFER_FOR_VALUE

}  // namespace batchinfer
