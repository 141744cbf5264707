// Products by VDPBF16PS. Included by kernels_avx512_bf16.cpp only.
//
// Order of adding, the same for every number of rows but not that of the other sets: k is cut into blocks of 32; in a
// block one chain starts from +0 and takes pair after pair, of each pair the odd input first and then the even one,
// each a fused multiply-add; then the block's sum joins the total. Source: Intel SDM, VDPBF16PS (denormal numbers are
// taken and given as zero).
#pragma once

#include <cstring>
#include <utility>

#include "matmul_bf16.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace giveway::GW_SET {

GW_INLINE __m512 dot_pairs(__m512 sums, __m512i weights, const uint16_t* pair) {
  int both;
  std::memcpy(&both, pair, sizeof both);
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(weights),
                          reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)));
}

inline constexpr int kDotRows = 8;  // rows that a panel pair is multiplied with at once: 16 chains

template <int rows, int panels>
static void multiply_dots(const PairStrip& strip, int64_t first_row) {
  const uint16_t* x = strip.x + first_row * strip.x_stride;
  __m512 totals[rows][panels];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 2
    for (int panel = 0; panel < panels; ++panel) totals[row][panel] = _mm512_setzero_ps();
  for (int64_t block = 0; block < strip.num_blocks; ++block, x += kBlockK) {
    __m512 sums[rows][panels];
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row)
#pragma GCC unroll 2
      for (int panel = 0; panel < panels; ++panel) sums[row][panel] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < kBlockK / 2; ++pair) {
#pragma GCC unroll 2
      for (int panel = 0; panel < panels; ++panel) {
        const __m512i weights =
            _mm512_loadu_si512(strip.weights[panel] + (block * (kBlockK / 2) + pair) * 2 * kPanelColumns);
#pragma GCC unroll 8
        for (int row = 0; row < rows; ++row)
          sums[row][panel] = dot_pairs(sums[row][panel], weights, x + row * strip.x_stride + 2 * pair);
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row)
#pragma GCC unroll 2
      for (int panel = 0; panel < panels; ++panel)
        totals[row][panel] = _mm512_add_ps(totals[row][panel], sums[row][panel]);
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 2
    for (int panel = 0; panel < panels; ++panel)
      _mm512_storeu_ps(strip.totals + ((first_row + row) * 2 + panel) * kPanelColumns, totals[row][panel]);
}

using DotFunction = void (*)(const PairStrip&, int64_t);

template <int panels, int... rows_less_one>
constexpr DotFunction dot_function(int64_t rows, std::integer_sequence<int, rows_less_one...>) {
  constexpr DotFunction functions[] = {multiply_dots<rows_less_one + 1, panels>...};
  return functions[rows - 1];
}

static void multiply_bf16(const MatmulArgs& args) {
  multiply_bf16(args, [](const PairStrip& strip, int64_t num_rows) {
    constexpr auto sizes = std::make_integer_sequence<int, kDotRows>();
    for (int64_t first = 0; first < num_rows; first += kDotRows) {
      const int64_t rows = std::min<int64_t>(kDotRows, num_rows - first);
      (strip.num_panels == 2 ? dot_function<2>(rows, sizes) : dot_function<1>(rows, sizes))(strip, first);
    }
  });
}

}  // namespace giveway::GW_SET

#endif
