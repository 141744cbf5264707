// Sums of rows by panels that are kept in registers: every loop over them is unrolled. Included by kernels_*.cpp only.
#pragma once

#include <cstring>

#include "vec16.h"

namespace giveway::GW_SET {

// Calls function(row, panel) for all.
template <int rows, int panels, typename Function>
GW_INLINE void for_each_sum(Function function) {
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 4
    for (int panel = 0; panel < panels; ++panel) function(row, panel);
}

template <int rows, int panels>
GW_INLINE void clear(v16 (&sums)[rows][panels]) {
  for_each_sum<rows, panels>([&](int row, int panel) { sums[row][panel] = zero(); });
}

#if defined(__AVX512BF16__)

// A pair of bfloat16 in all lanes.
GW_INLINE __m512i broadcast_pair(const uint16_t* pair) {
  int both;
  std::memcpy(&both, pair, sizeof both);
  return _mm512_set1_epi32(both);
}

// Sixteen pairs, one for each lane of sums. Loaded once, into a register: the compiler would repeat the load for every
// product, and then loads are what products wait for.
GW_INLINE __m512i load_pairs(const void* at) {
  __m512i pairs = _mm512_loadu_si512(at);
  __asm__("" : "+v"(pairs));
  return pairs;
}

// VDPBF16PS: sum + odd product, rounded, + even product, in every lane.
GW_INLINE v16 dot(v16 sum, __m512i x, __m512i weights) {
  return {_mm512_dpbf16_ps(sum.lanes, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(x))};
}

// Adds the products of one pair of inputs to the totals of all rows and panels. x: the pair, of the first row.
template <int rows, int panels>
GW_INLINE void add_pair(const uint16_t* x, int64_t x_stride, const __m512i (&weights)[panels],
                        v16 (&totals)[rows][panels]) {
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) {
    const __m512i both = broadcast_pair(x + row * x_stride);
#pragma GCC unroll 4
    for (int panel = 0; panel < panels; ++panel) totals[row][panel] = dot(totals[row][panel], both, weights[panel]);
  }
}

#endif

}  // namespace giveway::GW_SET
