// The words of lanes.h in AVX-512, as one register each.

#pragma once

namespace batchinfer {

using Floats = __m512;
using Doubles = __m512d;
using Ints = __m512i;
using First = __mmask16;
using Mask = __mmask16;

constexpr int kMostSums = 24;             // Floats that stay in registers while products are added to them
constexpr int64_t kStepBytes = 256 << 10;  // of a panel that stay in the second-level cache while rows pass
constexpr int64_t kTurnSteps = 4;          // after which it is the turn of what comes next (ahead.h)

inline First lanes(int64_t count) { return count >= 16 ? 0xFFFF : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

// Masked loads wait for all earlier stores whose addresses end alike, and masked stores let no load pass; whole ones do not.
inline bool is_whole(First first) { return __builtin_expect(first == 0xFFFF, true); }

inline Floats floats(float value) { return _mm512_set1_ps(value); }
inline Ints ints(int32_t value) { return _mm512_set1_epi32(value); }
// 0, 1, … 15
inline Ints steps() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline Floats load(First first, const float* at) {  // 0 elsewhere
  return is_whole(first) ? load(at) : _mm512_maskz_loadu_ps(first, at);
}
inline Floats load_or(First first, const float* at, float other) {
  return is_whole(first) ? load(at) : _mm512_mask_loadu_ps(floats(other), first, at);
}
inline Ints load_ints(const void* at) { return _mm512_loadu_si512(at); }
inline Ints load_ints(First first, const void* at) {
  return is_whole(first) ? load_ints(at) : _mm512_maskz_loadu_epi32(first, at);
}
inline void store(float* at, Floats values) { _mm512_storeu_ps(at, values); }
inline void store(float* at, First first, Floats values) {
  is_whole(first) ? store(at, values) : _mm512_mask_storeu_ps(at, first, values);
}
inline void store_ints(void* at, Ints values) { _mm512_storeu_si512(at, values); }
inline void store_ints(void* at, First first, Ints values) {
  is_whole(first) ? store_ints(at, values) : _mm512_mask_storeu_epi32(at, first, values);
}

// a * b + c, a * b - c and c - a * b with one rounding.
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats subtract_product(Floats c, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, c); }
// The second one where one of them is not a number.
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats magnitude(Floats a) { return _mm512_abs_ps(a); }
inline Floats nearest_whole(Floats a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// a * 2^n for whole n from -200 to 129.
inline Floats scaled(Floats a, Floats n) { return _mm512_scalef_ps(a, n); }
inline float first_of(Floats a) { return _mm512_cvtss_f32(a); }
// Halves are added to halves.
inline float sum_of(Floats a) {
  const __m256 eight = _mm512_castps512_ps256(a) + _mm512_extractf32x8_ps(a, 1);
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
inline float largest_of(Floats a) { return _mm512_reduce_max_ps(a); }

// float64: the first and the last eight of 16 values; names as for Floats.
inline Doubles doubles(double value) { return _mm512_set1_pd(value); }
inline Doubles low_doubles(Floats a) { return _mm512_cvtps_pd(_mm512_castps512_ps256(a)); }
inline Doubles high_doubles(Floats a) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)); }
inline Doubles load_doubles(const double* at) { return _mm512_loadu_pd(at); }
inline void store(double* at, Doubles values) { _mm512_storeu_pd(at, values); }
inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
inline Doubles subtract_product(Doubles c, Doubles a, Doubles b) { return _mm512_fnmadd_pd(a, b, c); }
inline Doubles smaller(Doubles a, Doubles b) { return _mm512_min_pd(a, b); }
inline Doubles larger(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }
inline Doubles nearest_whole(Doubles a) {
  return _mm512_roundscale_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// a * 2^n for whole n from -1022 to 1023.
inline Doubles scaled(Doubles a, Doubles n) { return _mm512_scalef_pd(a, n); }
// 0 in lanes where x is below the limit.
inline Doubles zero_below(Doubles limit, Doubles x, Doubles a) {
  return _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x, limit, _CMP_NLT_UQ), a);
}
// Halves are added to halves.
inline double sum_of(Doubles a) {
  const __m256d four = _mm512_castpd512_pd256(a) + _mm512_extractf64x4_pd(a, 1);
  const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
  return two[0] + two[1];
}

inline Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints nearest_ints(Floats a) { return _mm512_cvtps_epi32(a); }
inline Floats as_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
// Lanes from 0 to 255 as bytes.
inline void store_bytes(uint8_t* at, Ints a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtusepi32_epi8(a));
}

inline Mask is_less(Ints a, Ints b) { return _mm512_cmplt_epi32_mask(a, b); }
inline Mask is_greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask is_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask not_below(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }  // also what is no number
inline Mask both(First a, Mask b) { return a & b; }
inline Mask mask_of(uint32_t bits) { return static_cast<Mask>(bits); }
inline Mask either(Mask a, Mask b) { return a | b; }
inline Mask no_lanes() { return 0; }
inline bool any(Mask mask) { return mask != 0; }
inline Floats choose(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
inline Ints choose(Mask mask, Ints yes, Ints no) { return _mm512_mask_mov_epi32(no, mask, yes); }
inline int32_t smallest_of(Mask mask, Ints a) { return _mm512_mask_reduce_min_epi32(mask, a); }

// bfloat16: bits in the lower half of each lane; two values next to each other in a lane; wide as float32.
inline Ints load_bits(const bf16* at) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
#ifdef __AVX512BF16__
inline __m256i rounded_halves(Floats values) { return (__m256i)_mm512_cvtneps_pbh(values); }
#else
// As the instruction: to the nearest, to even in the middle; what is not a number stays so, what is subnormal becomes zero.
inline __m256i rounded_halves(Floats values) {
  const __m512i bits = _mm512_castps_si512(values), sign = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  const __mmask16 is_tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7F800000));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  rounded = _mm512_mask_and_epi32(rounded, is_tiny, bits, sign);
  const __mmask16 is_no_number = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_no_number, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
#endif
inline Ints rounded_bits(Floats values) { return _mm512_cvtepu16_epi32(rounded_halves(values)); }
inline Ints beside(Ints low, Ints high) { return _mm512_or_si512(low, _mm512_slli_epi32(high, 16)); }
// beside(rounded_bits(low), rounded_bits(high)).
inline Ints rounded_pairs(Floats low, Floats high) {
#ifdef __AVX512BF16__
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  const Ints places = plus(ints(0x00100000), _mm512_mullo_epi32(ints(0x00010001), steps()));  // 0 16 1 17 …
  return _mm512_permutexvar_epi16(places, halves);
#else
  return beside(rounded_bits(low), rounded_bits(high));
#endif
}
inline Floats low_values(Ints pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Floats high_values(Ints pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline Floats load_wide(First first, const bf16* at) {
  return low_values(is_whole(first) ? load_bits(at) : _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first, at)));
}
inline void store_rounded(bf16* at, First first, Floats values) {
  const __m256i halves = rounded_halves(values);
  if (is_whole(first)) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), halves);
  } else {
    _mm256_mask_storeu_epi16(at, first, halves);
  }
}

// 32 values, whole lines, past the caches: what stood there is not read first.
inline void store_past(bf16* at, Floats low, Floats high) {
#ifdef __AVX512BF16__
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
  const __m512i halves = _mm512_inserti64x4(_mm512_castsi256_si512(rounded_halves(low)), rounded_halves(high), 1);
#endif
  _mm512_stream_si512(reinterpret_cast<__m512i*>(at), halves);
}
inline void store_past(float* at, Floats low, Floats high) {
  _mm512_stream_ps(at, low);
  _mm512_stream_ps(at + 16, high);
}

// Products of 16 columns with one row: pairs of bfloat16, or fours of bytes (columns signed, rows unsigned). Without
// instructions for them (or with slow ones, pairs.cpp) the values of a lane are multiplied in two parts: of a pair the
// second value, then the first, as the instruction does; of a four the second and last, then the others, as 16 bits each,
// so that sums are exact.
inline __attribute__((always_inline)) void add_product(Floats& sum, Floats row, Floats columns) {
  sum = _mm512_fmadd_ps(row, columns, sum);
}
inline Floats pair_part(Ints pairs, int part) { return part == 0 ? high_values(pairs) : low_values(pairs); }

#ifdef __AVX512BF16__
#define BATCHINFER_PAIR_PRODUCTS
using Pairs = __m512bh;
inline Pairs column_pairs(const bf16* at) { return (__m512bh)_mm512_loadu_si512(at); }
inline Pairs row_pair(int32_t pair) { return (__m512bh)_mm512_set1_epi32(pair); }
inline __attribute__((always_inline)) void add_product(Floats& sum, Pairs row, Pairs columns) {
  sum = _mm512_dpbf16_ps(sum, row, columns);
}
#endif

struct FourPart {
  __m512i values;
};
#ifdef __AVX512VNNI__
constexpr int kFourParts = 1;
inline FourPart column_fours(const int8_t* at, int) { return {_mm512_loadu_si512(at)}; }
inline FourPart row_four(int32_t four, int) { return {_mm512_set1_epi32(four)}; }
inline __attribute__((always_inline)) void add_product(Ints& sum, FourPart row, FourPart columns) {
  // as an instruction, since compilers keep the sums of the intrinsic in memory here
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(row.values), "v"(columns.values));
}
#else
constexpr int kFourParts = 2;
inline FourPart column_fours(const int8_t* at, int part) {
  const __m512i fours = _mm512_loadu_si512(at);
  return {_mm512_srai_epi16(part == 0 ? fours : _mm512_slli_epi16(fours, 8), 8)};
}
inline FourPart row_four(int32_t four, int part) {
  const __m512i fours = _mm512_set1_epi32(four);
  return {part == 0 ? _mm512_srli_epi16(fours, 8) : _mm512_and_si512(fours, _mm512_set1_epi16(0xFF))};
}
inline __attribute__((always_inline)) void add_product(Ints& sum, FourPart row, FourPart columns) {
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(row.values, columns.values));
}
#endif

// Four columns' values in 4 bits, the lower or the upper halves of bytes, and four signed bytes of a row.
struct NibblePart {
  __m512i values;
};
struct SignedFour {
  __m512i values;
};
inline NibblePart column_nibbles(const uint8_t* at, int half) {
  const __m512i bytes = _mm512_loadu_si512(at);
  return {_mm512_and_si512(half == 0 ? bytes : _mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15))};
}
inline SignedFour signed_four(int32_t four) { return {_mm512_set1_epi32(four)}; }
inline __attribute__((always_inline)) void add_product(Ints& sum, SignedFour row, NibblePart columns) {
#ifdef __AVX512VNNI__
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(columns.values), "v"(row.values));
#else
  const __m512i pairs = _mm512_maddubs_epi16(columns.values, row.values);  // at most 2 * 15 * 127
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

// Pairs of E2M1 values in bfloat16: lower and upper half of each 32 bits give their `step`-th 4 bits.
inline Ints pairs_of_fp4(Ints words, int step) {
  alignas(64) static constexpr uint16_t kValues[32] = {
      0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080,
      0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040,
      0xC080, 0xC0C0};  // twice: the fifth bit may be anything
  return _mm512_permutexvar_epi16(_mm512_srl_epi16(words, _mm_cvtsi32_si128(4 * step)), _mm512_load_si512(kValues));
}

// The first, third, … and the second, fourth, … of 32 values, and both ways back.
inline void split_pairs(Floats low, Floats high, Floats& first, Floats& second) {
  const Ints even = plus(steps(), steps());
  first = _mm512_permutex2var_ps(low, even, high);
  second = _mm512_permutex2var_ps(low, plus(even, ints(1)), high);
}
inline void join_pairs(Floats first, Floats second, Floats& low, Floats& high) {
  // 0 16 1 17 … of both
  const Ints half = _mm512_srli_epi32(steps(), 1), odd = _mm512_slli_epi32(_mm512_and_si512(steps(), ints(1)), 4);
  low = _mm512_permutex2var_ps(first, plus(half, odd), second);
  high = _mm512_permutex2var_ps(first, plus(plus(half, odd), ints(8)), second);
}

// The first, third, … values of two rows of 32 side by side, and the second, fourth, … ones.
inline Ints first_pairs(Ints a, Ints b) { return _mm512_mask_blend_epi16(0xAAAAAAAA, a, _mm512_slli_epi32(b, 16)); }
inline Ints second_pairs(Ints a, Ints b) { return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(a, 16), b); }

// Turns 16 x 16 values of 32 bits: out[i][j] = rows[j][i] for `count` of the i; rows end after `count` values.
inline void turn_16(const int32_t* rows, int64_t row_stride, int64_t count, int32_t* out, int64_t out_stride) {
  Ints a[16], b[16];
  const First first = lanes(count);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = load_ints(first, rows + i * row_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Ints first_half = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), second = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xDD);
    const Ints third = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    const Ints fourth = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xDD);
    b[i] = _mm512_shuffle_i32x4(first_half, third, 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(second, fourth, 0x88);
    b[i + 8] = _mm512_shuffle_i32x4(first_half, third, 0xDD);
    b[i + 12] = _mm512_shuffle_i32x4(second, fourth, 0xDD);
  }
  for (int64_t i = 0; i < count; ++i) store_ints(out + i * out_stride, b[i]);
}

}  // namespace batchinfer
