// The most that a core can do, to hold the kernels against: multiply-adds that touch no memory, and reading that does
// nothing else. Included by kernels_*.cpp only.
#pragma once

#include "kernels.h"
#include "matmul_amx.h"

namespace giveway::GW_SET {

// Independent sums: more than the latency of a multiply-add times the units that start one each cycle, and all in
// registers.
#if defined(__AVX512F__)
inline constexpr int kPeakSums = 12;
#else
inline constexpr int kPeakSums = 6;
#endif

// The compiler must take the value for used, and for another one afterwards: nothing is computed beforehand or left
// out.
GW_INLINE void keep(v16& x) {
#if defined(__AVX512F__)
  __asm__ volatile("" : "+v"(x.lanes));
#elif defined(__AVX2__)
  __asm__ volatile("" : "+x"(x.low), "+x"(x.high));
#else
  __asm__ volatile("" : "+m"(x));
#endif
}

// Calls multiply(sum) for `rounds` rounds of kPeakSums sums.
template <typename Multiply>
GW_INLINE void multiply_in_registers(int64_t rounds, Multiply multiply) {
  v16 sums[kPeakSums];
#pragma GCC unroll 16
  for (v16& sum : sums) {
    sum = zero();
    keep(sum);  // or the compiler would see that all are the same, and compute one
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (v16& sum : sums) sum = multiply(sum);
  }
#pragma GCC unroll 16
  for (v16& sum : sums) keep(sum);
}

#if defined(__AMX_BF16__)

// Four sums of two by two tiles, as in a product of matrices.
static int64_t bf16_peak(int64_t rounds) {
  configure_tiles(16);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return rounds * 4 * (16 * 16 * kBlockK) * 2;
}

#elif defined(__AVX512BF16__)

static int64_t bf16_peak(int64_t rounds) {
  v16 factor = zero();
  keep(factor);
  const auto pairs = (__m512bh)factor.lanes;
  multiply_in_registers(rounds, [=](v16 sum) { return v16{_mm512_dpbf16_ps(sum.lanes, pairs, pairs)}; });
  return rounds * kPeakSums * (2 * kLanes) * 2;
}

#endif

// Runs rounds of the fastest multiply-adds that suit the compute type, in registers. Returns how many operations that
// were; a multiply-add is two.
static int64_t multiply_peak([[maybe_unused]] Compute compute, int64_t rounds) {
#if defined(__AVX512BF16__)
  if (compute == Compute::bf16) return bf16_peak(rounds);
#endif
  v16 factor = broadcast(0.5f);
  keep(factor);
  multiply_in_registers(rounds, [=](v16 sum) { return fma(factor, factor, sum); });
  return rounds * kPeakSums * kLanes * 2;
}

// Reads num_bytes (whole kibibytes are read, what remains is not) in four streams at once, which is faster than one.
static void read_peak(const std::byte* data, int64_t num_bytes) {
  constexpr int kStreams = 4, kVectors = 4;
  constexpr int64_t kStep = kLanes * kVectors;
  const int64_t stream = num_bytes / (kStreams * kStep * 4) * kStep;  // floats
  const float* at = reinterpret_cast<const float*>(data);
  v16 sums[kStreams];
  for (v16& sum : sums) sum = zero();
  for (int64_t i = 0; i < stream; i += kStep) {
#pragma GCC unroll 4
    for (int index = 0; index < kStreams; ++index) {
      const float* values = at + index * stream + i;
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector) sums[index] = add(sums[index], load(values + vector * kLanes));
    }
  }
  for (v16& sum : sums) keep(sum);
}

}  // namespace giveway::GW_SET
