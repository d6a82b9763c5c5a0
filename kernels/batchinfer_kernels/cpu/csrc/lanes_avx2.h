// The words of lanes.h in AVX2 with FMA, as a pair of registers each.

#pragma once

#include <algorithm>
#include <cstring>

namespace batchinfer {

struct Floats {
  __m256 low, high;
};
struct Doubles {
  __m256d low, high;
};
struct Ints {
  __m256i low, high;
};
struct First {
  int64_t count;
};
struct Mask {
  __m256 low, high;  // all bits of a lane or none
};

constexpr int kMostSums = 5;             // Floats that stay in registers while products are added to them
constexpr int64_t kStepBytes = 16 << 10;  // of a panel that stay in the first-level cache while rows pass
// After which it is the turn of what comes next (ahead.h): between loops, since sums would leave their few registers within.
constexpr int64_t kTurnSteps = 32;

inline First lanes(int64_t count) { return {std::clamp<int64_t>(count, 0, 16)}; }

inline Floats floats(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Ints ints(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
// 0, 1, … 15
inline Ints steps() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}

inline Ints plus(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Ints is_less_bits(Ints a, Ints b) {
  return {_mm256_cmpgt_epi32(b.low, a.low), _mm256_cmpgt_epi32(b.high, a.high)};
}
// All bits of the first lanes.
inline Ints bits_of(First first) { return is_less_bits(steps(), ints(static_cast<int32_t>(first.count))); }

inline Floats load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
inline Floats load(First first, const float* at) {  // 0 elsewhere
  if (first.count == 16) return load(at);
  const Ints bits = bits_of(first);
  return {_mm256_maskload_ps(at, bits.low), _mm256_maskload_ps(at + 8, bits.high)};
}
inline Ints load_ints(const void* at) {
  const __m256i* halves = static_cast<const __m256i*>(at);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Ints load_ints(First first, const void* at) {
  if (first.count == 16) return load_ints(at);
  const int* values = static_cast<const int*>(at);
  const Ints bits = bits_of(first);
  return {_mm256_maskload_epi32(values, bits.low), _mm256_maskload_epi32(values + 8, bits.high)};
}
inline void store(float* at, Floats values) {
  _mm256_storeu_ps(at, values.low);
  _mm256_storeu_ps(at + 8, values.high);
}
inline void store(float* at, First first, Floats values) {
  if (first.count == 16) return store(at, values);
  const Ints bits = bits_of(first);
  _mm256_maskstore_ps(at, bits.low, values.low);
  _mm256_maskstore_ps(at + 8, bits.high, values.high);
}
inline void store_ints(void* at, Ints values) {
  __m256i* halves = static_cast<__m256i*>(at);
  _mm256_storeu_si256(halves, values.low);
  _mm256_storeu_si256(halves + 1, values.high);
}
inline void store_ints(void* at, First first, Ints values) {
  if (first.count == 16) return store_ints(at, values);
  int* out = static_cast<int*>(at);
  const Ints bits = bits_of(first);
  _mm256_maskstore_epi32(out, bits.low, values.low);
  _mm256_maskstore_epi32(out + 8, bits.high, values.high);
}

inline Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
inline Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
inline Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
inline Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }
// a * b + c, a * b - c and c - a * b with one rounding.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats multiply_subtract(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Floats subtract_product(Floats c, Floats a, Floats b) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
// The second one where one of them is not a number.
inline Floats smaller(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats magnitude(Floats a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline Floats nearest_whole(Floats a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, kNearest), _mm256_round_ps(a.high, kNearest)};
}
// a * 2^n for whole n from -200 to 129: in two steps, as 2^n itself may be beyond float32.
inline __m256 scaled(__m256 a, __m256 n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  const __m256i rest = _mm256_sub_epi32(whole, half);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
  return a * _mm256_castsi256_ps(first) * _mm256_castsi256_ps(second);
}
inline Floats scaled(Floats a, Floats n) { return {scaled(a.low, n.low), scaled(a.high, n.high)}; }
inline float first_of(Floats a) { return _mm256_cvtss_f32(a.low); }
// Halves are added to halves.
inline float sum_of(Floats a) {
  const __m256 eight = a.low + a.high;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
inline float largest_of(Floats a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// float64: the first and the last eight of 16 values; names as for Floats.
inline Doubles doubles(double value) { return {_mm256_set1_pd(value), _mm256_set1_pd(value)}; }
inline Doubles wide(__m256 a) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))};
}
inline Doubles low_doubles(Floats a) { return wide(a.low); }
inline Doubles high_doubles(Floats a) { return wide(a.high); }
inline Doubles load_doubles(const double* at) { return {_mm256_loadu_pd(at), _mm256_loadu_pd(at + 4)}; }
inline void store(double* at, Doubles values) {
  _mm256_storeu_pd(at, values.low);
  _mm256_storeu_pd(at + 4, values.high);
}
inline Doubles operator+(Doubles a, Doubles b) { return {a.low + b.low, a.high + b.high}; }
inline Doubles operator-(Doubles a, Doubles b) { return {a.low - b.low, a.high - b.high}; }
inline Doubles operator*(Doubles a, Doubles b) { return {a.low * b.low, a.high * b.high}; }
inline Doubles operator/(Doubles a, Doubles b) { return {a.low / b.low, a.high / b.high}; }
inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) {
  return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)};
}
inline Doubles subtract_product(Doubles c, Doubles a, Doubles b) {
  return {_mm256_fnmadd_pd(a.low, b.low, c.low), _mm256_fnmadd_pd(a.high, b.high, c.high)};
}
inline Doubles smaller(Doubles a, Doubles b) { return {_mm256_min_pd(a.low, b.low), _mm256_min_pd(a.high, b.high)}; }
inline Doubles larger(Doubles a, Doubles b) { return {_mm256_max_pd(a.low, b.low), _mm256_max_pd(a.high, b.high)}; }
inline Doubles nearest_whole(Doubles a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_pd(a.low, kNearest), _mm256_round_pd(a.high, kNearest)};
}
// a * 2^n for whole n from -1022 to 1023: adding 1.5 * 2^52 puts n into the low bits.
inline __m256d scaled(__m256d a, __m256d n) {
  const __m256i whole = _mm256_castpd_si256(n + _mm256_set1_pd(0x1.8p52));
  return a * _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_add_epi64(whole, _mm256_set1_epi64x(1023)), 52));
}
inline Doubles scaled(Doubles a, Doubles n) { return {scaled(a.low, n.low), scaled(a.high, n.high)}; }
// 0 in lanes where x is below the limit.
inline Doubles zero_below(Doubles limit, Doubles x, Doubles a) {
  return {_mm256_and_pd(_mm256_cmp_pd(x.low, limit.low, _CMP_NLT_UQ), a.low),
          _mm256_and_pd(_mm256_cmp_pd(x.high, limit.high, _CMP_NLT_UQ), a.high)};
}
// Halves are added to halves.
inline double sum_of(Doubles a) {
  const __m256d four = a.low + a.high;
  const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
  return two[0] + two[1];
}

inline Ints nearest_ints(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
inline Floats as_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
// The lower halves of all lanes side by side; they must be unsigned 16 bits.
inline __m256i lower_halves(Ints a) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(a.low, a.high), 0xD8); }
// Lanes from 0 to 255 as bytes.
inline void store_bytes(uint8_t* at, Ints a) {
  const __m256i halves = lower_halves(a);
  const __m128i low = _mm256_castsi256_si128(halves), high = _mm256_extracti128_si256(halves, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm_packus_epi16(low, high));
}

inline Mask as_mask(Ints a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
inline Mask is_less(Ints a, Ints b) { return as_mask(is_less_bits(a, b)); }
template <int Comparison>
inline Mask compare(Floats a, Floats b) {
  return {_mm256_cmp_ps(a.low, b.low, Comparison), _mm256_cmp_ps(a.high, b.high, Comparison)};
}
inline Mask is_greater(Floats a, Floats b) { return compare<_CMP_GT_OQ>(a, b); }
inline Mask is_equal(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Mask not_below(Floats a, Floats b) { return compare<_CMP_NLT_UQ>(a, b); }  // also what is no number
inline Mask both(Mask a, Mask b) { return {_mm256_and_ps(a.low, b.low), _mm256_and_ps(a.high, b.high)}; }
inline Mask both(First first, Mask b) {
  if (first.count == 16) return b;
  return both(as_mask(bits_of(first)), b);
}
inline Mask mask_of(uint32_t bits) {
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
  const __m256i all = _mm256_set1_epi32(static_cast<int32_t>(bits));
  return as_mask(Ints{_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low), _mm256_cmpeq_epi32(_mm256_and_si256(all, high), high)});
}
inline Mask either(Mask a, Mask b) { return {_mm256_or_ps(a.low, b.low), _mm256_or_ps(a.high, b.high)}; }
inline Mask no_lanes() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline bool any(Mask mask) { return _mm256_movemask_ps(_mm256_or_ps(mask.low, mask.high)) != 0; }
inline Floats choose(Mask mask, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.low, yes.low, mask.low), _mm256_blendv_ps(no.high, yes.high, mask.high)};
}
inline Floats load_or(First first, const float* at, float other) {
  return first.count == 16 ? load(at) : choose(as_mask(bits_of(first)), load(first, at), floats(other));
}
inline __m256i choose(__m256 mask, __m256i yes, __m256i no) {
  return _mm256_blendv_epi8(no, yes, _mm256_castps_si256(mask));
}
inline Ints choose(Mask mask, Ints yes, Ints no) {
  return {choose(mask.low, yes.low, no.low), choose(mask.high, yes.high, no.high)};
}
inline int32_t smallest_of(Mask mask, Ints a) {
  const Ints left = choose(mask, a, ints(INT32_MAX));
  alignas(32) int32_t values[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(values), _mm256_min_epi32(left.low, left.high));
  return *std::min_element(values, values + 8);
}

// bfloat16: bits in the lower half of each lane; two values next to each other in a lane; wide as float32.
inline Ints load_bits(const bf16* at) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(at);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))};
}
// To the nearest, to even in the middle; what is not a number stays so, what is subnormal becomes zero.
inline __m256i rounded_bits(__m256 values) {
  const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7F800000));
  const __m256i is_tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  const __m256i bits = choose(_mm256_castsi256_ps(is_tiny), _mm256_and_si256(_mm256_castps_si256(values), sign),
                              _mm256_castps_si256(values));
  const __m256i kept = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(kept, _mm256_set1_epi32(1));
  const __m256i moved = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(kept, _mm256_set1_epi32(0x40));
  return choose(_mm256_cmp_ps(values, values, _CMP_UNORD_Q), quiet, _mm256_srli_epi32(moved, 16));
}
inline Ints rounded_bits(Floats values) { return {rounded_bits(values.low), rounded_bits(values.high)}; }
inline Ints beside(Ints low, Ints high) {
  return {_mm256_or_si256(low.low, _mm256_slli_epi32(high.low, 16)),
          _mm256_or_si256(low.high, _mm256_slli_epi32(high.high, 16))};
}
// beside(rounded_bits(low), rounded_bits(high)).
inline Ints rounded_pairs(Floats low, Floats high) { return beside(rounded_bits(low), rounded_bits(high)); }
inline __m256 low_values(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 high_values(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline Floats low_values(Ints pairs) { return {low_values(pairs.low), low_values(pairs.high)}; }
inline Floats high_values(Ints pairs) { return {high_values(pairs.low), high_values(pairs.high)}; }
inline Floats load_wide(First first, const bf16* at) {
  if (first.count == 16) return low_values(load_bits(at));
  bf16 values[16] = {};
  std::memcpy(values, at, first.count * sizeof(bf16));
  return low_values(load_bits(values));
}
inline void store_rounded(bf16* at, First first, Floats values) {
  const __m256i bits = lower_halves(rounded_bits(values));
  if (first.count == 16) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), bits);
  std::memcpy(at, &bits, first.count * sizeof(bf16));
}

// 32 values, whole lines, past the caches: what stood there is not read first.
inline void store_past(bf16* at, Floats low, Floats high) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(at), lower_halves(rounded_bits(low)));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(at + 16), lower_halves(rounded_bits(high)));
}
inline void store_past(float* at, Floats low, Floats high) {
  for (const Floats& values : {low, high}) {
    _mm256_stream_ps(at, values.low);
    _mm256_stream_ps(at + 8, values.high);
    at += 16;
  }
}

// Products of 16 columns with one row: pairs of bfloat16, or fours of bytes (columns signed, rows unsigned). The values
// of a lane are multiplied in parts: of a pair the second value, then the first; of a four the second and last, then the
// others, as 16 bits each, so that sums are exact, or all at once where there is an instruction for it (AVX-VNNI).
// As instructions, since compilers order the operations themselves so that sums do not stay in registers.
struct FourPart {
  __m256i low, high;
};
inline __attribute__((always_inline)) Floats pair_part(Ints pairs, int part) {
  return part == 0 ? high_values(pairs) : low_values(pairs);
}
inline __attribute__((always_inline)) void add_product(Floats& sum, Floats row, Floats columns) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum.low) : "x"(row.low), "x"(columns.low));
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum.high) : "x"(row.high), "x"(columns.high));
}

// Four columns' values in 4 bits, the lower or the upper halves of bytes, and four signed bytes of a row.
struct NibblePart {
  __m256i low, high;
};
struct SignedFour {
  __m256i values;
};
inline __attribute__((always_inline)) NibblePart column_nibbles(const uint8_t* at, int half) {
  const Ints bytes = load_ints(at);
  const __m256i most = _mm256_set1_epi8(15);
  return {_mm256_and_si256(half == 0 ? bytes.low : _mm256_srli_epi16(bytes.low, 4), most),
          _mm256_and_si256(half == 0 ? bytes.high : _mm256_srli_epi16(bytes.high, 4), most)};
}
inline __attribute__((always_inline)) SignedFour signed_four(int32_t four) { return {_mm256_set1_epi32(four)}; }

#ifdef __AVXVNNI__
constexpr int kFourParts = 1;
inline __attribute__((always_inline)) FourPart column_fours(const int8_t* at, int) {
  const Ints fours = load_ints(at);
  return {fours.low, fours.high};
}
inline __attribute__((always_inline)) FourPart row_four(int32_t four, int) {
  const __m256i fours = _mm256_set1_epi32(four);
  return {fours, fours};
}
// sum += unsigned · signed bytes of each lane.
inline __attribute__((always_inline)) void add_fours(__m256i& sum, __m256i unsigned_bytes, __m256i signed_bytes) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(unsigned_bytes), "x"(signed_bytes));
}
inline __attribute__((always_inline)) void add_product(Ints& sum, FourPart row, FourPart columns) {
  add_fours(sum.low, row.low, columns.low);
  add_fours(sum.high, row.high, columns.high);
}
inline __attribute__((always_inline)) void add_product(Ints& sum, SignedFour row, NibblePart columns) {
  add_fours(sum.low, columns.low, row.values);
  add_fours(sum.high, columns.high, row.values);
}
#else
constexpr int kFourParts = 2;
#define BATCHINFER_PARTS_AS_WORDS  // words.h: parts are two words of 16 bits, and may be in memory
inline __attribute__((always_inline)) __m256i column_part(__m256i fours, int part) {
  return _mm256_srai_epi16(part == 0 ? fours : _mm256_slli_epi16(fours, 8), 8);
}
inline __attribute__((always_inline)) FourPart column_fours(const int8_t* at, int part) {
  const Ints fours = load_ints(at);
  return {column_part(fours.low, part), column_part(fours.high, part)};
}
inline __attribute__((always_inline)) __m256i row_part(__m256i fours, int part) {
  return part == 0 ? _mm256_srli_epi16(fours, 8) : _mm256_and_si256(fours, _mm256_set1_epi16(0xFF));
}
inline __attribute__((always_inline)) FourPart row_four(int32_t four, int part) {
  const __m256i values = row_part(_mm256_set1_epi32(four), part);
  return {values, values};
}
// Words of a part: of four bytes of each of 16 columns, and of 64 bytes of a row.
inline Ints column_words(const int8_t* at, int part) {
  const FourPart columns = column_fours(at, part);
  return {columns.low, columns.high};
}
inline Ints row_words(const uint8_t* at, int part) {
  const Ints fours = load_ints(at);
  return {row_part(fours.low, part), row_part(fours.high, part)};
}
// Words in memory: of 16 columns, and of a row, the same in all lanes.
inline __attribute__((always_inline)) FourPart part_at(const int32_t* at) {
  const Ints words = load_ints(at);
  return {words.low, words.high};
}
inline __attribute__((always_inline)) FourPart part_of(int32_t words) {
  const __m256i values = _mm256_set1_epi32(words);
  return {values, values};
}
inline __attribute__((always_inline)) void add_product(Ints& sum, FourPart row, FourPart columns) {
  asm("vpaddd %1, %0, %0" : "+x"(sum.low) : "x"(_mm256_madd_epi16(row.low, columns.low)));
  asm("vpaddd %1, %0, %0" : "+x"(sum.high) : "x"(_mm256_madd_epi16(row.high, columns.high)));
}
inline __attribute__((always_inline)) __m256i four_products(__m256i row, __m256i columns) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(columns, row), _mm256_set1_epi16(1));  // pairs: at most 2 * 15 * 127
}
inline __attribute__((always_inline)) void add_product(Ints& sum, SignedFour row, NibblePart columns) {
  asm("vpaddd %1, %0, %0" : "+x"(sum.low) : "x"(four_products(row.values, columns.low)));
  asm("vpaddd %1, %0, %0" : "+x"(sum.high) : "x"(four_products(row.values, columns.high)));
}
#endif

// Pairs of E2M1 values in bfloat16: lower and upper half of each 32 bits give their `step`-th 4 bits.
inline __m256i pairs_of_fp4(__m256i words, int step) {
  // the upper and the lower byte of each value; both are zero for the zeros in upper bytes
  const __m256i upper = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41, -0x40, -0x40, -0x40, -0x40));
  const __m256i lower = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40, 0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40));
  const __m256i four = _mm256_and_si256(_mm256_srl_epi16(words, _mm_cvtsi32_si128(4 * step)), _mm256_set1_epi16(15));
  return _mm256_or_si256(_mm256_slli_epi16(_mm256_shuffle_epi8(upper, four), 8), _mm256_shuffle_epi8(lower, four));
}
inline Ints pairs_of_fp4(Ints words, int step) {
  return {pairs_of_fp4(words.low, step), pairs_of_fp4(words.high, step)};
}

// The first, third, … and the second, fourth, … of 32 values, and both ways back.
inline __m256 in_order(__m256 values) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(values), 0xD8)); }
inline void split_pairs(Floats low, Floats high, Floats& first, Floats& second) {
  first = {in_order(_mm256_shuffle_ps(low.low, low.high, 0x88)), in_order(_mm256_shuffle_ps(high.low, high.high, 0x88))};
  second = {in_order(_mm256_shuffle_ps(low.low, low.high, 0xDD)), in_order(_mm256_shuffle_ps(high.low, high.high, 0xDD))};
}
inline void join_pairs(__m256 first, __m256 second, Floats& out) {
  const __m256 left = _mm256_unpacklo_ps(first, second), right = _mm256_unpackhi_ps(first, second);
  out = {_mm256_permute2f128_ps(left, right, 0x20), _mm256_permute2f128_ps(left, right, 0x31)};
}
inline void join_pairs(Floats first, Floats second, Floats& low, Floats& high) {
  join_pairs(first.low, second.low, low);
  join_pairs(first.high, second.high, high);
}

// The first, third, … values of two rows of 32 side by side, and the second, fourth, … ones.
inline __m256i first_pairs(__m256i a, __m256i b) { return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xAA); }
inline __m256i second_pairs(__m256i a, __m256i b) { return _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xAA); }
inline Ints first_pairs(Ints a, Ints b) { return {first_pairs(a.low, b.low), first_pairs(a.high, b.high)}; }
inline Ints second_pairs(Ints a, Ints b) { return {second_pairs(a.low, b.low), second_pairs(a.high, b.high)}; }

// Turns 8 x 8 values of 32 bits.
inline void turn_8(const __m256i (&rows)[8], __m256i (&out)[8]) {
  __m256i a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
    out[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
  }
}

// Turns 16 x 16 values of 32 bits: out[i][j] = rows[j][i] for `count` of the i; rows end after `count` values.
inline void turn_16(const int32_t* rows, int64_t row_stride, int64_t count, int32_t* out, int64_t out_stride) {
  const First first = lanes(count);
  for (int64_t half = 0; half < 16; half += 8) {
    __m256i low[8], high[8], turned[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const Ints row = load_ints(first, rows + (half + i) * row_stride);
      low[i] = row.low;
      high[i] = row.high;
    }
    turn_8(low, turned);
    for (int64_t i = 0; i < std::min<int64_t>(count, 8); ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * out_stride + half), turned[i]);
    }
    turn_8(high, turned);
    for (int64_t i = 8; i < count; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * out_stride + half), turned[i - 8]);
    }
  }
}

}  // namespace batchinfer
