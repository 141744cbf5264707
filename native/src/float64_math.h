// exp and log in float64 out of additions, multiplications and divisions only.
//
// Those of the C library give other last bits on other processors and in other versions. These give the same bits
// everywhere, and a loop over exp_of_bounded becomes vector instructions. No product may be fused with a sum:
// compile with -ffp-contract=off.
#pragma once

#include <cstdint>
#include <cstring>

namespace giveway {

namespace float64 {

inline constexpr double kLog2e = 0x1.71547652b82fep+0;
// ln 2 in two parts. The first has 40 bits, so that its product with a whole number below 2^13 is exact.
inline constexpr double kLn2High = 0x1.62e42fefa2000p-1;
inline constexpr double kLn2Low = 0x1.9ef35793c7673p-41;
// Added to a double below 2^51, it leaves no room for a fraction: the sum's low bits are the nearest whole number.
inline constexpr double kRounder = 0x1.8p+52;

inline uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline double double_of(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace float64

// The power of this is rounded to 0, as is that of all below it.
inline constexpr double kLowestPower = -746.0;

// e^x, for kLowestPower <= x <= 0, is 2^exponent * e^r.
struct ReducedPower {
  double r;      // at most 0.347 either way
  double scale;  // 2^(exponent + 512), which is a normal number always
};

[[gnu::always_inline]] inline ReducedPower reduce_power(double x) {
  using namespace float64;
  const double shifted = x * kLog2e + kRounder;
  const double exponent = shifted - kRounder;
  return {(x - exponent * kLn2High) - exponent * kLn2Low, double_of((bits_of(shifted) + (1023 + 512)) << 52)};
}

// The series of e^r to r^13; what is left out is below 2^-57 of the result. Added up in pairs, in fours and then in one
// chain, so that few of the operations have to wait for others.
[[gnu::always_inline]] inline double restore_power(ReducedPower power) {
  const double r = power.r, r2 = r * r, r4 = r2 * r2;
  const double low = (1.0 / 2 + r * (1.0 / 6)) + r2 * (1.0 / 24 + r * (1.0 / 120));
  const double middle = (1.0 / 720 + r * (1.0 / 5040)) + r2 * (1.0 / 40320 + r * (1.0 / 362880));
  const double high = (1.0 / 3628800 + r * (1.0 / 39916800)) + r2 * (1.0 / 479001600 + r * (1.0 / 6227020800));
  const double result = 1.0 + (r + r2 * (low + r4 * (middle + r4 * high)));
  return result * power.scale * 0x1p-512;  // only the last product can round, where there is no normal number
}

// e^x for x <= 0, also -infinity, within 1 unit in the last place; below 2^-1022 with the bits that a double has there.
inline double exp_of_nonpositive(double x) { return restore_power(reduce_power(x > kLowestPower ? x : kLowestPower)); }

// Natural logarithm of a positive finite number, within 2 units in the last place.
inline double log_of_positive(double x) {
  using namespace float64;
  double exponent = 0;
  if (x < 0x1p-1022) {  // no normal number: its exponent field is 0
    x *= 0x1p+54;
    exponent = -54;
  }
  const uint64_t bits = bits_of(x);
  exponent += static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  double mantissa = double_of((bits & 0xfffffffffffffu) | 0x3ff0000000000000u);  // [1, 2)
  if (mantissa > 0x1.6a09e667f3bcdp+0) {                                         // the root of 2
    mantissa *= 0.5;
    exponent += 1;
  }
  // ln m = 2 artanh(f) = 2 (f + f^3/3 + f^5/5 + ...) with f = (m - 1) / (m + 1), |f| < 0.172.
  const double f = (mantissa - 1.0) / (mantissa + 1.0);
  const double f2 = f * f;
  double series = 0;
  for (int power = 23; power >= 3; power -= 2) series = (series + 1.0 / power) * f2;
  return exponent * kLn2High + (exponent * kLn2Low + (2.0 * f + 2.0 * f * series));
}

}  // namespace giveway
