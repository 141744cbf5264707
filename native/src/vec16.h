// Sixteen float lanes, the unit of everything vectorised here: one register of AVX-512, two of AVX2, an array
// elsewhere. The operations round alike on each, so a kernel written on them gives the same bits on every instruction
// set.
//
// Included only by kernels_*.cpp, each compiled for its own set. Everything lies in a namespace named after the set and
// is inlined: code compiled for AVX-512 must never be what the linker picks for another set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "formats.h"
#include "types.h"

#if defined(GIVEWAY_X86)
#include <immintrin.h>
#endif

#define GW_INLINE [[gnu::always_inline]] static inline

#if !defined(GW_PACKS_BF16)
#define GW_PACKS_BF16 false
#endif

namespace giveway::GW_SET {

// Whether this set stores activations of Compute::bf16 as 2-byte values, as its product instructions want them.
inline constexpr bool kPacksBf16 = GW_PACKS_BF16;

// The compiler moves no load or store past this place. Intrinsics that load AMX tiles do not tell it which memory they
// read: what they are to find must be stored before.
GW_INLINE void keep_order() { __asm__ volatile("" ::: "memory"); }

#if defined(__AVX512F__)

struct v16 {
  __m512 lanes;
};

GW_INLINE v16 zero() { return {_mm512_setzero_ps()}; }
GW_INLINE v16 broadcast(float value) { return {_mm512_set1_ps(value)}; }
GW_INLINE v16 load(const float* at) { return {_mm512_loadu_ps(at)}; }
GW_INLINE void store(float* at, v16 x) { _mm512_storeu_ps(at, x.lanes); }
GW_INLINE v16 add(v16 a, v16 b) { return {_mm512_add_ps(a.lanes, b.lanes)}; }
GW_INLINE v16 sub(v16 a, v16 b) { return {_mm512_sub_ps(a.lanes, b.lanes)}; }
GW_INLINE v16 mul(v16 a, v16 b) { return {_mm512_mul_ps(a.lanes, b.lanes)}; }
GW_INLINE v16 div(v16 a, v16 b) { return {_mm512_div_ps(a.lanes, b.lanes)}; }
GW_INLINE v16 fma(v16 a, v16 b, v16 c) { return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }
GW_INLINE v16 fms(v16 a, v16 b, v16 c) { return {_mm512_fmsub_ps(a.lanes, b.lanes, c.lanes)}; }
GW_INLINE v16 max(v16 a, v16 b) { return {_mm512_max_ps(a.lanes, b.lanes)}; }  // b where either is NaN
GW_INLINE v16 min(v16 a, v16 b) { return {_mm512_min_ps(a.lanes, b.lanes)}; }
// Bit i: whether lane i of a is greater than that of b.
GW_INLINE uint32_t greater(v16 a, v16 b) { return _mm512_cmp_ps_mask(a.lanes, b.lanes, _CMP_GT_OQ); }
// a in the first `count` lanes (0 to 16), b in the others.
GW_INLINE v16 first_lanes(int count, v16 a, v16 b) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << count) - 1u), b.lanes, a.lanes)};
}
GW_INLINE v16 round_to_integer(v16 a) {
  return {_mm512_roundscale_ps(a.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a times 2 to the power of `exponent`, whole numbers from -126 to 127; of a and the result none is denormal.
GW_INLINE v16 times_power_of_two(v16 a, v16 exponent) { return {_mm512_scalef_ps(a.lanes, exponent.lanes)}; }

// The 16-bit floats of 16 pairs, as 32-bit lanes: first = even elements.
struct v16_pair {
  v16 even, odd;
};
GW_INLINE v16_pair load_bf16_pairs(const uint16_t* at) {
  const __m512i pairs = _mm512_loadu_si512(at);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
GW_INLINE v16 load_bf16(const uint16_t* at) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
GW_INLINE v16 load_f16(const uint16_t* at) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))};
}
GW_INLINE v16 load_i8(const int8_t* at) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw))};
}
GW_INLINE v16_pair load_nibbles(const uint8_t* at) {  // even = low nibbles
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return {{_mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)))},
          {_mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4))}};
}
// Rounded to the nearest bfloat16, ties to even; NaN stays NaN.
GW_INLINE v16 round_bf16(v16 a) {
  const __m512i bits = _mm512_castps_si512(a.lanes);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lsb);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.lanes, a.lanes, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  const __m512i chosen = _mm512_mask_blend_epi32(is_nan, rounded, quiet);
  return {_mm512_castsi512_ps(_mm512_and_si512(chosen, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
// a, but every NaN is the one without a payload, whose bits round_bf16_plain cannot carry into the sign.
GW_INLINE v16 plain_nan(v16 a) {
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.lanes, a.lanes, _CMP_UNORD_Q);
  return {_mm512_mask_blend_ps(is_nan, a.lanes, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)))};
}
// round_bf16 of numbers whose NaNs, if any, are plain: five operations instead of nine.
GW_INLINE v16 round_bf16_plain(v16 a) {
  const __m512i bits = _mm512_castps_si512(a.lanes);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lsb);
  return {_mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
// Values that round_bf16 gave, as 16-bit floats.
GW_INLINE void store_bf16(uint16_t* at, v16 rounded) {
  const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(rounded.lanes), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16(high));
}

#elif defined(__AVX2__)

struct v16 {
  __m256 low, high;
};

GW_INLINE v16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
GW_INLINE v16 broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
GW_INLINE v16 load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
GW_INLINE void store(float* at, v16 x) {
  _mm256_storeu_ps(at, x.low);
  _mm256_storeu_ps(at + 8, x.high);
}
GW_INLINE v16 add(v16 a, v16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
GW_INLINE v16 sub(v16 a, v16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
GW_INLINE v16 mul(v16 a, v16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
GW_INLINE v16 div(v16 a, v16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
GW_INLINE v16 fma(v16 a, v16 b, v16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
GW_INLINE v16 fms(v16 a, v16 b, v16 c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
GW_INLINE v16 max(v16 a, v16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
GW_INLINE v16 min(v16 a, v16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
GW_INLINE uint32_t greater(v16 a, v16 b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ));
  return static_cast<uint32_t>(low | _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ)) << 8);
}
GW_INLINE v16 first_lanes(int count, v16 a, v16 b) {
  const __m256i counts = _mm256_set1_epi32(count);
  const __m256i low = _mm256_cmpgt_epi32(counts, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i high = _mm256_cmpgt_epi32(counts, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
  return {_mm256_blendv_ps(b.low, a.low, _mm256_castsi256_ps(low)),
          _mm256_blendv_ps(b.high, a.high, _mm256_castsi256_ps(high))};
}
GW_INLINE v16 round_to_integer(v16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, kNearest), _mm256_round_ps(a.high, kNearest)};
}
GW_INLINE __m256 power_of_two(__m256 exponent) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
GW_INLINE v16 times_power_of_two(v16 a, v16 exponent) {
  return {_mm256_mul_ps(a.low, power_of_two(exponent.low)), _mm256_mul_ps(a.high, power_of_two(exponent.high))};
}

struct v16_pair {
  v16 even, odd;
};
GW_INLINE v16_pair load_bf16_pairs(const uint16_t* at) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 16));
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(low, mask)), _mm256_castsi256_ps(_mm256_and_si256(high, mask))}};
}
GW_INLINE __m256 widen_bf16(const uint16_t* at) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
GW_INLINE v16 load_bf16(const uint16_t* at) { return {widen_bf16(at), widen_bf16(at + 8)}; }
GW_INLINE v16 load_f16(const uint16_t* at) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 8)))};
}
GW_INLINE v16 load_i8(const int8_t* at) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + 8))))};
}
GW_INLINE v16_pair load_nibbles(const uint8_t* at) {
  const __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
  const __m256i high = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + 8)));
  const __m256i mask = _mm256_set1_epi32(15);
  return {{_mm256_cvtepi32_ps(_mm256_and_si256(low, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(high, mask))},
          {_mm256_cvtepi32_ps(_mm256_srli_epi32(low, 4)), _mm256_cvtepi32_ps(_mm256_srli_epi32(high, 4))}};
}
GW_INLINE __m256 round_half_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), lsb);
  const __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
  return _mm256_castsi256_ps(_mm256_and_si256(chosen, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
GW_INLINE v16 round_bf16(v16 a) { return {round_half_bf16(a.low), round_half_bf16(a.high)}; }
GW_INLINE __m256 plain_half_nan(__m256 a) {
  return _mm256_blendv_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
GW_INLINE v16 plain_nan(v16 a) { return {plain_half_nan(a.low), plain_half_nan(a.high)}; }
GW_INLINE __m256 round_half_bf16_plain(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), lsb);
  return _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
GW_INLINE v16 round_bf16_plain(v16 a) { return {round_half_bf16_plain(a.low), round_half_bf16_plain(a.high)}; }
GW_INLINE void store_bf16(uint16_t* at, v16 rounded) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(rounded.low), 16);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(rounded.high), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), packed);
}

#else

struct v16 {
  float lanes[kLanes];
};

template <typename Function>
GW_INLINE v16 each(Function function) {
  v16 result;
  for (int lane = 0; lane < kLanes; ++lane) result.lanes[lane] = function(lane);
  return result;
}
GW_INLINE v16 broadcast(float value) {
  return each([=](int) { return value; });
}
GW_INLINE v16 zero() { return broadcast(0.0f); }
GW_INLINE v16 load(const float* at) {
  return each([=](int i) { return at[i]; });
}
GW_INLINE void store(float* at, v16 x) { std::memcpy(at, x.lanes, sizeof x.lanes); }
GW_INLINE v16 add(v16 a, v16 b) {
  return each([&](int i) { return a.lanes[i] + b.lanes[i]; });
}
GW_INLINE v16 sub(v16 a, v16 b) {
  return each([&](int i) { return a.lanes[i] - b.lanes[i]; });
}
GW_INLINE v16 mul(v16 a, v16 b) {
  return each([&](int i) { return a.lanes[i] * b.lanes[i]; });
}
GW_INLINE v16 div(v16 a, v16 b) {
  return each([&](int i) { return a.lanes[i] / b.lanes[i]; });
}
GW_INLINE v16 fma(v16 a, v16 b, v16 c) {
  return each([&](int i) { return std::fma(a.lanes[i], b.lanes[i], c.lanes[i]); });
}
GW_INLINE v16 fms(v16 a, v16 b, v16 c) {
  return each([&](int i) { return std::fma(a.lanes[i], b.lanes[i], -c.lanes[i]); });
}
GW_INLINE v16 max(v16 a, v16 b) {
  return each([&](int i) { return a.lanes[i] > b.lanes[i] ? a.lanes[i] : b.lanes[i]; });
}
GW_INLINE v16 min(v16 a, v16 b) {
  return each([&](int i) { return a.lanes[i] < b.lanes[i] ? a.lanes[i] : b.lanes[i]; });
}
GW_INLINE uint32_t greater(v16 a, v16 b) {
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint32_t>(a.lanes[lane] > b.lanes[lane]) << lane;
  return bits;
}
GW_INLINE v16 first_lanes(int count, v16 a, v16 b) {
  return each([&](int i) { return i < count ? a.lanes[i] : b.lanes[i]; });
}
GW_INLINE v16 round_to_integer(v16 a) {
  return each([&](int i) { return std::nearbyint(a.lanes[i]); });
}
GW_INLINE v16 times_power_of_two(v16 a, v16 exponent) {
  return each([&](int i) {
    return a.lanes[i] * float_of(static_cast<uint32_t>(static_cast<int>(exponent.lanes[i]) + 127) << 23);
  });
}

struct v16_pair {
  v16 even, odd;
};
GW_INLINE v16_pair load_bf16_pairs(const uint16_t* at) {
  return {each([=](int i) { return bf16_to_float(at[2 * i]); }),
          each([=](int i) { return bf16_to_float(at[2 * i + 1]); })};
}
GW_INLINE v16 load_bf16(const uint16_t* at) {
  return each([=](int i) { return bf16_to_float(at[i]); });
}
GW_INLINE v16 load_f16(const uint16_t* at) {
  return each([=](int i) { return half_to_float(at[i]); });
}
GW_INLINE v16 load_i8(const int8_t* at) {
  return each([=](int i) { return static_cast<float>(at[i]); });
}
GW_INLINE v16_pair load_nibbles(const uint8_t* at) {
  return {each([=](int i) { return static_cast<float>(at[i] & 15); }),
          each([=](int i) { return static_cast<float>(at[i] >> 4); })};
}
GW_INLINE v16 round_bf16(v16 a) {
  return each([&](int i) { return bf16_to_float(to_bf16(a.lanes[i])); });
}
GW_INLINE v16 plain_nan(v16 a) {
  return each([&](int i) { return std::isnan(a.lanes[i]) ? float_of(0x7fc00000u) : a.lanes[i]; });
}
GW_INLINE v16 round_bf16_plain(v16 a) {
  return each([&](int i) {
    const uint32_t bits = bits_of(a.lanes[i]);
    return float_of((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
  });
}
GW_INLINE void store_bf16(uint16_t* at, v16 rounded) {
  for (int lane = 0; lane < kLanes; ++lane) at[lane] = static_cast<uint16_t>(bits_of(rounded.lanes[lane]) >> 16);
}

#endif

// What store_bf16 stores, to every second place: what lies between is not touched.
GW_INLINE void store_every_second(uint16_t* at, v16 rounded) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_epi16(at, 0x55555555, _mm512_srli_epi32(_mm512_castps_si512(rounded.lanes), 16));
#else
  uint16_t values[kLanes];
  store_bf16(values, rounded);
  for (int lane = 0; lane < kLanes; ++lane) at[2 * lane] = values[lane];
#endif
}

// Numbers of which none is denormal, rounded to bfloat16, as 16-bit floats.
GW_INLINE void store_rounded(uint16_t* at, v16 a) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.lanes)));
#else
  store_bf16(at, round_bf16(a));
#endif
}

// Thirty-two of them side by side.
GW_INLINE void store_rounded(uint16_t* at, v16 first, v16 second) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(at, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.lanes, first.lanes)));
#else
  store_rounded(at, first);
  store_rounded(at + kLanes, second);
#endif
}

// Sums and largest of the lanes, folded in halves: lane i with lane i + 8, then + 4, + 2, + 1.
#if defined(__AVX2__)
#if defined(__AVX512F__)
GW_INLINE __m256 lower_half(v16 x) { return _mm512_castps512_ps256(x.lanes); }
GW_INLINE __m256 upper_half(v16 x) { return _mm512_extractf32x8_ps(x.lanes, 1); }
#else
GW_INLINE __m256 lower_half(v16 x) { return x.low; }
GW_INLINE __m256 upper_half(v16 x) { return x.high; }
#endif
GW_INLINE float sum_of_lanes(v16 x) {
  const __m256 eight = _mm256_add_ps(lower_half(x), upper_half(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
GW_INLINE float largest_lane(v16 x) {
  const __m256 eight = _mm256_max_ps(lower_half(x), upper_half(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
GW_INLINE float sum_of_lanes(v16 x) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) x.lanes[lane] += x.lanes[lane + half];
  return x.lanes[0];
}
GW_INLINE float largest_lane(v16 x) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane)
      x.lanes[lane] = x.lanes[lane] > x.lanes[lane + half] ? x.lanes[lane] : x.lanes[lane + half];
  return x.lanes[0];
}
#endif

// Lane i: the largest of rows[i], folded as largest_lane does.
GW_INLINE v16 largest_of_sixteen(const v16 (&rows)[kLanes]) {
#if defined(__AVX512F__)
  // Of two registers the one half of the lanes beside the other: half as many registers, and lanes of each row, remain.
  const auto row = [&](int number) { return rows[number % 4 * 4 + number / 4].lanes; };  // where the last step puts it
  __m512 eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 a = row(2 * i), b = row(2 * i + 1);
    eight[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = eight[2 * i], b = eight[2 * i + 1];
    four[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512 a = four[2 * i], b = four[2 * i + 1];
    two[i] = _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  return {_mm512_max_ps(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd))};
#else
  float largest[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) largest[lane] = largest_lane(rows[lane]);
  return load(largest);
#endif
}

// e to the power of x between -87 and 88, beyond that of the nearest of the two (so 1.6e-38 at least). Range reduction
// by powers of two and a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]: relative error below 2e-7. Source: the method
// of Cephes' expf (Moshier, 1989); the coefficients are those of the Taylor series, which the short range makes good
// enough.
GW_INLINE v16 exp(v16 x) {
  const v16 clipped = max(min(x, broadcast(88.0f)), broadcast(-87.0f));
  const v16 power = round_to_integer(mul(clipped, broadcast(1.44269504f)));
  v16 rest = fma(power, broadcast(-0.693359375f), clipped);
  rest = fma(power, broadcast(2.12194440e-4f), rest);
  v16 sum = broadcast(1.0f / 720);
  sum = fma(sum, rest, broadcast(1.0f / 120));
  sum = fma(sum, rest, broadcast(1.0f / 24));
  sum = fma(sum, rest, broadcast(1.0f / 6));
  sum = fma(sum, rest, broadcast(0.5f));
  sum = fma(sum, rest, broadcast(1.0f));
  sum = fma(sum, rest, broadcast(1.0f));
  return times_power_of_two(sum, power);
}

// 2 to the power of x * scale, for x up to 0 and scale above 0; `least` is kLeastPower / scale, and below it every x
// gives what it does. Terms: of the polynomial on [-1/2, 1/2] whose largest relative error is smallest among those that
// give exactly 1 for 0 (found by fitting): 1e-4 with three, 1e-7 with five. NaN stays NaN.
inline constexpr float kLeastPower = -125.0f;
template <int terms>
GW_INLINE v16 power_of_2(v16 x, v16 scale, v16 least) {
  const v16 shift = broadcast(0x1.8p23f);  // floats as large as this are whole numbers
  const v16 clipped = max(least, x);
  const v16 power = sub(fma(clipped, scale, shift), shift);
  const v16 rest = fms(clipped, scale, power);
  v16 sum;
  if constexpr (terms == 3) {
    sum = fma(fma(broadcast(5.50089329e-2f), rest, broadcast(0.242210954f)), rest, broadcast(0.693282902f));
  } else {
    sum = fma(broadcast(1.32647273e-3f), rest, broadcast(9.67151299e-3f));
    sum = fma(fma(sum, rest, broadcast(5.55073358e-2f)), rest, broadcast(0.240222424f));
    sum = fma(sum, rest, broadcast(0.693147004f));
  }
  return times_power_of_two(fma(sum, rest, broadcast(1.0f)), power);
}

}  // namespace giveway::GW_SET
