// The largest products of a row with all columns of a weight, of which most are never computed exactly.
//
//   screening   products of rows and columns that were rounded to 8 bits, with a bound on how far each can be from the
//               exact product's float32 value
//   scoring     exact products of the columns whose upper bound reaches the k-th largest value known: for each row first
//               the k groups of 16 columns with the largest lower bounds, then those that exact values do not rule out
//
// x · w = (x' + dx) · (w' + dw) with x', w' the rounded ones, so |x · w - x' · w'| <= |dx| |w| + |x'| |dw| (Cauchy, Schwarz).
// The norms are computed from the rounded values themselves, and rounded up. The float32 sum of a product, in whatever order,
// is not further from x · w than 2 * depth * 2^-24 * |x| |w|, for depths to 2^16 (Higham 2002, section 3.1).

#pragma once

#include <vector>

#include "kernels.h"

namespace batchinfer {

constexpr int64_t kMostScreened = 1 << 16;  // values of a row: sums fit into 32 bits

// A weight's columns in 8 bits with one scale each, in the panels of pack.cpp's 8 bits.
struct Screen {
  const uint8_t* values;  // [panels][words of 4 values][64 columns][4]
  const float* columns;   // [panels][kParts][64]
  float most;             // largest norm of a column, and its error

  enum Part { kScale, kNorm, kError, kStart, kParts };  // the start is an int32, -128 times the sum of a column's values

  static int64_t words(int64_t depth) { return (depth + kBlock - 1) / kBlock * (kBlock / 4); }
  static int64_t panel_bytes(int64_t depth) { return words(depth) * 4 * kPanelColumns; }
};

// Fills a screen's values and columns from a packed weight in bfloat16 or float32.
void make_screen(const Weight& weight, uint8_t* values, float* columns);

// The columns that a row's token may be: those of the `count` largest products (0: of all) that are at most `reach` below
// the largest. Products that weigh the same in a draw at this temperature count as equal.
struct Wanted {
  int64_t count;
  double reach, temperature;

  // Temperature 0: the largest product. Else what draw may draw, if top_k or min_p limits that.
  static Wanted of(double temperature, int64_t top_k, double top_p, double min_p);
};

struct Candidate {
  int64_t column;
  float product;  // the bits of linear
};

// For each row the allowed columns that it wants, ascending. A row is not certain where the bounds rule out too few columns
// or its products might not be finite: its columns mean nothing.
template <class Value>
std::vector<std::vector<Candidate>> candidates(const Rows<Value>& x, const Weight& weight, const Screen& screen,
                                               const Wanted* wanted, const Allowed& allowed, int64_t num_rows,
                                               bool* is_certain);

// Whether products in 8 bits take half the time here.
bool screening_pays();

// linear.cpp: out [num_rows, 16] = products with 16 columns from 16 * chunk on, which exist; the bits of linear.
template <class Value>
void linear_chunk(const Rows<Value>& x, const Weight& weight, int64_t chunk, float* out, int64_t num_rows);

}  // namespace batchinfer
