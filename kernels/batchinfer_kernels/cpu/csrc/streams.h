// Hyper-connections (streams.cpp); see reference/hyper.py.

#pragma once

#include "kernels.h"

namespace batchinfer {

// Products of streams as they are become those of normed ones, in place.
template <class Value>
void norm_products(const Value* streams, float* products, float eps, int64_t num_rows, int64_t width, int64_t num_products);
struct StreamShape {
  int64_t num_rows, num_streams, hidden;
};
// `before` and `after` [rows, streams], `past` [rows, streams, streams].
void stream_mix(const StreamShape& shape, const float* mixed, const float* scale, const float* base, int64_t num_rounds,
                float eps, float* before, float* after, float* past);
template <class Value>
void join_streams(const StreamShape& shape, const Value* streams, const float* factors, Value* out);
template <class Value>
void leave_streams(const StreamShape& shape, const Value* streams, const float* after, const float* past, const Value* y,
                   Value* out);

}  // namespace batchinfer
