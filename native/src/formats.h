// Sixteen-bit floats, one at a time. Everything is inlined: this is included by kernels_*.cpp too, and code compiled
// for one instruction set must never be what the linker picks for another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace giveway {

[[gnu::always_inline]] static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

[[gnu::always_inline]] static inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

[[gnu::always_inline]] static inline float bf16_to_float(uint16_t stored) {
  return float_of(static_cast<uint32_t>(stored) << 16);
}

// The nearest bfloat16, ties to even; NaN stays NaN.
[[gnu::always_inline]] static inline uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((std::isnan(value) ? bits | 0x00400000u : bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[gnu::always_inline]] static inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u, fraction = half & 1023u;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (fraction != 0 ? 0x00400000u | fraction << 13 : 0u));
  if (exponent != 0) return float_of(sign | (exponent + 112u) << 23 | fraction << 13);
  const float value = static_cast<float>(fraction) * 0x1p-24f;
  return sign != 0 ? -value : value;
}

}  // namespace giveway
