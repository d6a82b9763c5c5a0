// The words of lanes.h for 64-bit Arm processors, as four registers each.

#pragma once

#include <algorithm>
#include <cstring>

namespace batchinfer {

struct Floats {
  float32x4_t at[4];
};
struct Doubles {
  float64x2_t at[4];
};
struct Ints {
  int32x4_t at[4];
};
struct First {
  int64_t count;
};
struct Mask {
  uint32x4_t at[4];  // all bits of a lane or none
};

constexpr int kMostSums = 6;              // Floats that stay in registers while products are added to them
constexpr int64_t kStepBytes = 32 << 10;  // of a panel that stay in the first-level cache while rows pass
// After which it is the turn of what comes next (ahead.h): between loops, since sums would leave their few registers within.
constexpr int64_t kTurnSteps = 32;

// All four parts by the same rule.
template <class Lanes, class Part>
inline __attribute__((always_inline)) Lanes each(Part part) {
  return {{part(0), part(1), part(2), part(3)}};
}

inline First lanes(int64_t count) { return {std::clamp<int64_t>(count, 0, 16)}; }

inline Floats floats(float value) {
  return each<Floats>([=](int) { return vdupq_n_f32(value); });
}
inline Ints ints(int32_t value) {
  return each<Ints>([=](int) { return vdupq_n_s32(value); });
}
// 0, 1, … 15
inline Ints steps() {
  const int32x4_t first = {0, 1, 2, 3};
  return each<Ints>([=](int i) { return first + 4 * i; });
}

inline Ints plus(Ints a, Ints b) {
  return each<Ints>([&](int i) { return a.at[i] + b.at[i]; });
}
inline Mask is_less(Ints a, Ints b) {
  return each<Mask>([&](int i) { return vcltq_s32(a.at[i], b.at[i]); });
}
inline Mask as_mask(First first) { return is_less(steps(), ints(static_cast<int32_t>(first.count))); }

inline Floats load(const float* at) {
  return each<Floats>([=](int i) { return vld1q_f32(at + 4 * i); });
}
inline Ints load_ints(const void* at) {
  const int32_t* const values = static_cast<const int32_t*>(at);
  return each<Ints>([=](int i) { return vld1q_s32(values + 4 * i); });
}
inline void store(float* at, Floats values) {
  for (int i = 0; i < 4; ++i) vst1q_f32(at + 4 * i, values.at[i]);
}
inline void store_ints(void* at, Ints values) {
  for (int i = 0; i < 4; ++i) vst1q_s32(static_cast<int32_t*>(at) + 4 * i, values.at[i]);
}
inline Floats load(First first, const float* at) {  // 0 elsewhere
  if (first.count == 16) return load(at);
  float values[16] = {};
  std::memcpy(values, at, first.count * sizeof(float));
  return load(values);
}
inline Ints load_ints(First first, const void* at) {
  if (first.count == 16) return load_ints(at);
  int32_t values[16] = {};
  std::memcpy(values, at, first.count * sizeof(int32_t));
  return load_ints(values);
}
inline void store(float* at, First first, Floats values) {
  if (first.count == 16) return store(at, values);
  float own[16];
  store(own, values);
  std::memcpy(at, own, first.count * sizeof(float));
}
inline void store_ints(void* at, First first, Ints values) {
  if (first.count == 16) return store_ints(at, values);
  int32_t own[16];
  store_ints(own, values);
  std::memcpy(at, own, first.count * sizeof(int32_t));
}

inline Floats operator+(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.at[i] + b.at[i]; });
}
inline Floats operator-(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.at[i] - b.at[i]; });
}
inline Floats operator*(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.at[i] * b.at[i]; });
}
inline Floats operator/(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.at[i] / b.at[i]; });
}
// a * b + c, a * b - c and c - a * b with one rounding.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return each<Floats>([&](int i) { return vfmaq_f32(c.at[i], a.at[i], b.at[i]); });
}
inline Floats multiply_subtract(Floats a, Floats b, Floats c) {
  return each<Floats>([&](int i) { return vfmaq_f32(vnegq_f32(c.at[i]), a.at[i], b.at[i]); });
}
inline Floats subtract_product(Floats c, Floats a, Floats b) {
  return each<Floats>([&](int i) { return vfmsq_f32(c.at[i], a.at[i], b.at[i]); });
}
// The second one where one of them is not a number.
inline float32x4_t smaller(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Floats smaller(Floats a, Floats b) {
  return each<Floats>([&](int i) { return smaller(a.at[i], b.at[i]); });
}
inline Floats larger(Floats a, Floats b) {
  return each<Floats>([&](int i) { return larger(a.at[i], b.at[i]); });
}
inline Floats magnitude(Floats a) {
  return each<Floats>([&](int i) { return vabsq_f32(a.at[i]); });
}
inline Floats nearest_whole(Floats a) {
  return each<Floats>([&](int i) { return vrndnq_f32(a.at[i]); });
}
// a * 2^n for whole n from -200 to 129: in two steps, as 2^n itself may be beyond float32.
inline float32x4_t scaled(float32x4_t a, float32x4_t n) {
  const int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1);
  const int32x4_t first = vshlq_n_s32(half + 127, 23), second = vshlq_n_s32(whole - half + 127, 23);
  return a * vreinterpretq_f32_s32(first) * vreinterpretq_f32_s32(second);
}
inline Floats scaled(Floats a, Floats n) {
  return each<Floats>([&](int i) { return scaled(a.at[i], n.at[i]); });
}
inline float first_of(Floats a) { return a.at[0][0]; }
// Halves are added to halves.
inline float sum_of(Floats a) {
  const float32x4_t both = (a.at[0] + a.at[2]) + (a.at[1] + a.at[3]);
  const float32x2_t two = vget_low_f32(both) + vget_high_f32(both);
  return two[0] + two[1];
}
inline float largest_of(Floats a) {
  const float32x4_t both = larger(larger(a.at[0], a.at[2]), larger(a.at[1], a.at[3]));
  const float32x4_t two = larger(both, vextq_f32(both, both, 2));
  return larger(two, vextq_f32(two, two, 1))[0];
}

// float64: the first and the last eight of 16 values; names as for Floats.
inline Doubles doubles(double value) {
  return each<Doubles>([=](int) { return vdupq_n_f64(value); });
}
inline Doubles wide(float32x4_t low, float32x4_t high) {
  return {{vcvt_f64_f32(vget_low_f32(low)), vcvt_high_f64_f32(low), vcvt_f64_f32(vget_low_f32(high)),
           vcvt_high_f64_f32(high)}};
}
inline Doubles low_doubles(Floats a) { return wide(a.at[0], a.at[1]); }
inline Doubles high_doubles(Floats a) { return wide(a.at[2], a.at[3]); }
inline Doubles load_doubles(const double* at) {
  return each<Doubles>([&](int i) { return vld1q_f64(at + 2 * i); });
}
inline void store(double* at, Doubles values) {
  for (int i = 0; i < 4; ++i) vst1q_f64(at + 2 * i, values.at[i]);
}
inline Doubles operator+(Doubles a, Doubles b) {
  return each<Doubles>([&](int i) { return a.at[i] + b.at[i]; });
}
inline Doubles operator-(Doubles a, Doubles b) {
  return each<Doubles>([&](int i) { return a.at[i] - b.at[i]; });
}
inline Doubles operator*(Doubles a, Doubles b) {
  return each<Doubles>([&](int i) { return a.at[i] * b.at[i]; });
}
inline Doubles operator/(Doubles a, Doubles b) {
  return each<Doubles>([&](int i) { return a.at[i] / b.at[i]; });
}
inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) {
  return each<Doubles>([&](int i) { return vfmaq_f64(c.at[i], a.at[i], b.at[i]); });
}
inline Doubles subtract_product(Doubles c, Doubles a, Doubles b) {
  return each<Doubles>([&](int i) { return vfmsq_f64(c.at[i], a.at[i], b.at[i]); });
}
inline Doubles smaller(Doubles a, Doubles b) {
  return each<Doubles>([&](int i) { return vbslq_f64(vcltq_f64(a.at[i], b.at[i]), a.at[i], b.at[i]); });
}
inline Doubles larger(Doubles a, Doubles b) {
  return each<Doubles>([&](int i) { return vbslq_f64(vcgtq_f64(a.at[i], b.at[i]), a.at[i], b.at[i]); });
}
inline Doubles nearest_whole(Doubles a) {
  return each<Doubles>([&](int i) { return vrndnq_f64(a.at[i]); });
}
// a * 2^n for whole n from -1022 to 1023.
inline Doubles scaled(Doubles a, Doubles n) {
  return each<Doubles>([&](int i) {
    return a.at[i] * vreinterpretq_f64_s64(vshlq_n_s64(vcvtnq_s64_f64(n.at[i]) + 1023, 52));
  });
}
// 0 in lanes where x is below the limit.
inline Doubles zero_below(Doubles limit, Doubles x, Doubles a) {
  return each<Doubles>([&](int i) {
    return vbslq_f64(vcltq_f64(x.at[i], limit.at[i]), vdupq_n_f64(0.0), a.at[i]);
  });
}
// Halves are added to halves.
inline double sum_of(Doubles a) {
  const float64x2_t two = (a.at[0] + a.at[2]) + (a.at[1] + a.at[3]);
  return two[0] + two[1];
}

// The nearest whole numbers; INT32_MIN for what is none or beyond.
inline Ints nearest_ints(Floats a) {
  return each<Ints>([&](int i) {
    const uint32x4_t is_there = vcltq_f32(vabsq_f32(a.at[i]), vdupq_n_f32(0x1p31f));
    return vbslq_s32(is_there, vcvtnq_s32_f32(a.at[i]), vdupq_n_s32(INT32_MIN));
  });
}
inline Floats as_floats(Ints a) {
  return each<Floats>([&](int i) { return vcvtq_f32_s32(a.at[i]); });
}
// The lower halves of all lanes side by side.
inline uint16x8_t lower_halves(int32x4_t a, int32x4_t b) {
  return vuzp1q_u16(vreinterpretq_u16_s32(a), vreinterpretq_u16_s32(b));
}
inline void store_halves(void* at, Ints a) {
  vst1q_u16(static_cast<uint16_t*>(at), lower_halves(a.at[0], a.at[1]));
  vst1q_u16(static_cast<uint16_t*>(at) + 8, lower_halves(a.at[2], a.at[3]));
}
// Lanes from 0 to 255 as bytes.
inline void store_bytes(uint8_t* at, Ints a) {
  const uint16x8_t low = lower_halves(a.at[0], a.at[1]), high = lower_halves(a.at[2], a.at[3]);
  vst1q_u8(at, vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)));
}

inline Mask is_greater(Floats a, Floats b) {
  return each<Mask>([&](int i) { return vcgtq_f32(a.at[i], b.at[i]); });
}
inline Mask is_equal(Floats a, Floats b) {
  return each<Mask>([&](int i) { return vceqq_f32(a.at[i], b.at[i]); });
}
inline Mask not_below(Floats a, Floats b) {  // also what is no number
  return each<Mask>([&](int i) { return vmvnq_u32(vcltq_f32(a.at[i], b.at[i])); });
}
inline Mask both(Mask a, Mask b) {
  return each<Mask>([&](int i) { return a.at[i] & b.at[i]; });
}
inline Mask both(First first, Mask b) { return both(as_mask(first), b); }
inline Mask mask_of(uint32_t bits) {
  const int32x4_t first = {1, 2, 4, 8};
  return each<Mask>([=](int i) { return vtstq_s32(vdupq_n_s32(static_cast<int32_t>(bits)), first << 4 * i); });
}
inline Mask either(Mask a, Mask b) {
  return each<Mask>([&](int i) { return a.at[i] | b.at[i]; });
}
inline Mask no_lanes() {
  return each<Mask>([](int) { return vdupq_n_u32(0); });
}
inline bool any(Mask mask) { return vmaxvq_u32((mask.at[0] | mask.at[1]) | (mask.at[2] | mask.at[3])) != 0; }
inline Floats choose(Mask mask, Floats yes, Floats no) {
  return each<Floats>([&](int i) { return vbslq_f32(mask.at[i], yes.at[i], no.at[i]); });
}
inline Ints choose(Mask mask, Ints yes, Ints no) {
  return each<Ints>([&](int i) { return vbslq_s32(mask.at[i], yes.at[i], no.at[i]); });
}
inline Floats load_or(First first, const float* at, float other) {
  return first.count == 16 ? load(at) : choose(as_mask(first), load(first, at), floats(other));
}
inline int32_t smallest_of(Mask mask, Ints a) {
  const Ints left = choose(mask, a, ints(INT32_MAX));
  return vminvq_s32(vminq_s32(vminq_s32(left.at[0], left.at[1]), vminq_s32(left.at[2], left.at[3])));
}

// bfloat16: bits in the lower half of each lane; two values next to each other in a lane; wide as float32.
inline Ints load_bits(const bf16* at) {
  return each<Ints>([=](int i) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(at + 4 * i))); });
}
// To the nearest, to even in the middle; what is not a number stays so, what is subnormal becomes zero.
inline int32x4_t rounded_bits(float32x4_t values) {
  const uint32x4_t all = vreinterpretq_u32_f32(values);
  const uint32x4_t bits = vbslq_u32((all & 0x7F800000u) == 0, all & 0x80000000u, all);
  const uint32x4_t kept = bits >> 16, moved = bits + 0x7FFFu + (kept & 1u);
  return vreinterpretq_s32_u32(vbslq_u32(vceqq_f32(values, values), moved >> 16, kept | 0x40u));
}
inline Ints rounded_bits(Floats values) {
  return each<Ints>([&](int i) { return rounded_bits(values.at[i]); });
}
inline Ints beside(Ints low, Ints high) {
  return each<Ints>([&](int i) { return low.at[i] | vshlq_n_s32(high.at[i], 16); });
}
// beside(rounded_bits(low), rounded_bits(high)).
inline Ints rounded_pairs(Floats low, Floats high) { return beside(rounded_bits(low), rounded_bits(high)); }
inline __attribute__((always_inline)) Floats low_values(Ints pairs) {
  return each<Floats>([&](int i) { return vreinterpretq_f32_s32(vshlq_n_s32(pairs.at[i], 16)); });
}
inline __attribute__((always_inline)) Floats high_values(Ints pairs) {
  return each<Floats>([&](int i) {
    return vreinterpretq_f32_u32(vreinterpretq_u32_s32(pairs.at[i]) & 0xFFFF0000u);
  });
}
inline Floats load_wide(First first, const bf16* at) {
  if (first.count == 16) return low_values(load_bits(at));
  bf16 values[16] = {};
  std::memcpy(values, at, first.count * sizeof(bf16));
  return low_values(load_bits(values));
}
inline void store_rounded(bf16* at, First first, Floats values) {
  if (first.count == 16) return store_halves(at, rounded_bits(values));
  bf16 own[16];
  store_halves(own, rounded_bits(values));
  std::memcpy(at, own, first.count * sizeof(bf16));
}

// 32 values. There are no stores past the caches here that could be relied on.
inline void store_past(bf16* at, Floats low, Floats high) {
  store_halves(at, rounded_bits(low));
  store_halves(at + 16, rounded_bits(high));
}
inline void store_past(float* at, Floats low, Floats high) {
  store(at, low);
  store(at + 16, high);
}

// Products of 16 columns with one row: pairs of bfloat16, or fours of bytes (columns signed, rows unsigned). Of a pair the
// second value is multiplied, then the first. Fours go at once where there is an instruction for mixed signs (i8mm), else
// the lower seven bits of rows, then their highest. As instructions, since compilers order the operations themselves so
// that sums do not stay in registers.
inline __attribute__((always_inline)) Floats pair_part(Ints pairs, int part) {
  return part == 0 ? high_values(pairs) : low_values(pairs);
}
inline __attribute__((always_inline)) void add_product(Floats& sum, Floats row, Floats columns) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum.at[i]) : "w"(row.at[i]), "w"(columns.at[i]));
}

struct FourPart {
  int8x16_t at[4];
};
// Four columns' values in 4 bits, the lower or the upper halves of bytes, and four signed bytes of a row.
struct NibblePart {
  int8x16_t at[4];
};
struct SignedFour {
  int8x16_t values;
};
inline __attribute__((always_inline)) int8x16_t fours_of(int32_t four) { return vreinterpretq_s8_s32(vdupq_n_s32(four)); }
inline __attribute__((always_inline)) NibblePart column_nibbles(const uint8_t* at, int half) {
  return each<NibblePart>([=](int i) {
    const uint8x16_t bytes = vld1q_u8(at + 16 * i);
    return vreinterpretq_s8_u8(half == 0 ? bytes & 15 : bytes >> 4);
  });
}
inline __attribute__((always_inline)) SignedFour signed_four(int32_t four) { return {fours_of(four)}; }
inline __attribute__((always_inline)) void add_fours(int32x4_t& sum, int8x16_t a, int8x16_t b) {
  asm("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
}
inline __attribute__((always_inline)) void add_product(Ints& sum, SignedFour row, NibblePart columns) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) add_fours(sum.at[i], columns.at[i], row.values);
}
inline __attribute__((always_inline)) FourPart column_fours(const int8_t* at, int) {
  return each<FourPart>([=](int i) { return vld1q_s8(at + 16 * i); });
}

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr int kFourParts = 1;
using RowFour = SignedFour;  // of bytes that are unsigned
inline __attribute__((always_inline)) RowFour row_four(int32_t four, int) { return {fours_of(four)}; }
inline __attribute__((always_inline)) void add_product(Ints& sum, RowFour row, FourPart columns) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    asm("usdot %0.4s, %1.16b, %2.16b" : "+w"(sum.at[i]) : "w"(row.values), "w"(columns.at[i]));
  }
}
#else
constexpr int kFourParts = 2;
struct RowFour {
  int8x16_t values;
  int part;
};
inline __attribute__((always_inline)) RowFour row_four(int32_t four, int part) {
  const uint32_t all = static_cast<uint32_t>(four);
  return {fours_of(static_cast<int32_t>(part == 0 ? all & 0x7F7F7F7Fu : (all >> 7) & 0x01010101u)), part};
}
inline __attribute__((always_inline)) void add_product(Ints& sum, RowFour row, FourPart columns) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if (row.part == 0) {
      add_fours(sum.at[i], row.values, columns.at[i]);
    } else {
      int32x4_t highest = vdupq_n_s32(0);
      add_fours(highest, row.values, columns.at[i]);
      sum.at[i] += vshlq_n_s32(highest, 7);
    }
  }
}
#endif

// The first, third, … and the second, fourth, … of 32 values, and both ways back.
inline void split_pairs(Floats low, Floats high, Floats& first, Floats& second) {
  const float32x4_t values[8] = {low.at[0],  low.at[1],  low.at[2],  low.at[3],
                                 high.at[0], high.at[1], high.at[2], high.at[3]};
  first = each<Floats>([&](int i) { return vuzp1q_f32(values[2 * i], values[2 * i + 1]); });
  second = each<Floats>([&](int i) { return vuzp2q_f32(values[2 * i], values[2 * i + 1]); });
}
inline void join_pairs(Floats first, Floats second, Floats& low, Floats& high) {
  const auto part = [&](int i) {
    return i % 2 == 0 ? vzip1q_f32(first.at[i / 2], second.at[i / 2]) : vzip2q_f32(first.at[i / 2], second.at[i / 2]);
  };
  low = each<Floats>([&](int i) { return part(i); });
  high = each<Floats>([&](int i) { return part(i + 4); });
}

// Pairs of E2M1 values in bfloat16: lower and upper half of each 32 bits give their `step`-th 4 bits.
inline Ints pairs_of_fp4(Ints words, int step) {
  static constexpr uint8_t kUpper[16] = {0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                         0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
  static constexpr uint8_t kLower[16] = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0,
                                         0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0};
  const uint8x16_t upper = vld1q_u8(kUpper), lower = vld1q_u8(kLower);
  return each<Ints>([&](int i) {
    const uint16x8_t moved = vshlq_u16(vreinterpretq_u16_s32(words.at[i]), vdupq_n_s16(static_cast<int16_t>(-4 * step)));
    const uint8x16_t four = vreinterpretq_u8_u16(vandq_u16(moved, vdupq_n_u16(15)));  // upper bytes are zero, and stay it
    const uint16x8_t high = vshlq_n_u16(vreinterpretq_u16_u8(vqtbl1q_u8(upper, four)), 8);
    return vreinterpretq_s32_u16(vorrq_u16(high, vreinterpretq_u16_u8(vqtbl1q_u8(lower, four))));
  });
}

// The first, third, … values of two rows of 32 side by side, and the second, fourth, … ones.
inline Ints first_pairs(Ints a, Ints b) {
  return each<Ints>([&](int i) { return vsliq_n_s32(a.at[i], b.at[i], 16); });
}
inline Ints second_pairs(Ints a, Ints b) {
  return each<Ints>([&](int i) { return vsriq_n_s32(b.at[i], a.at[i], 16); });
}

// Turns 16 x 16 values of 32 bits: out[i][j] = rows[j][i] for `count` of the i; rows end after `count` values.
inline void turn_16(const int32_t* rows, int64_t row_stride, int64_t count, int32_t* out, int64_t out_stride) {
  const First first = lanes(count);
  for (int64_t row = 0; row < 16; row += 4) {
    Ints four_rows[4];
    for (int i = 0; i < 4; ++i) four_rows[i] = load_ints(first, rows + (row + i) * row_stride);
    for (int64_t part = 0; 4 * part < count; ++part) {
      const int32x4_t a = four_rows[0].at[part], b = four_rows[1].at[part];
      const int32x4_t c = four_rows[2].at[part], d = four_rows[3].at[part];
      const int64x2_t ab = vreinterpretq_s64_s32(vzip1q_s32(a, b)), cd = vreinterpretq_s64_s32(vzip1q_s32(c, d));
      const int64x2_t ab2 = vreinterpretq_s64_s32(vzip2q_s32(a, b)), cd2 = vreinterpretq_s64_s32(vzip2q_s32(c, d));
      const int64x2_t turned[4] = {vzip1q_s64(ab, cd), vzip2q_s64(ab, cd), vzip1q_s64(ab2, cd2), vzip2q_s64(ab2, cd2)};
      for (int64_t i = 0; i < std::min<int64_t>(4, count - 4 * part); ++i) {
        vst1q_s32(out + (4 * part + i) * out_stride + row, vreinterpretq_s32_s64(turned[i]));
      }
    }
  }
}

}  // namespace batchinfer
