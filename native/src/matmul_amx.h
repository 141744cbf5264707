// Products by AMX tiles. Included by kernels_amx.cpp only.
//
// TDPBF16PS adds in just the order that all sets keep: over a block of 32 inputs the even ones by one chain from +0,
// the odd ones by another, then total + (even + odd), denormal numbers flushed. Source: Intel SDM, TDPBF16PS.
#pragma once

#include "matmul_bf16.h"

#if defined(__AMX_BF16__)

namespace giveway::GW_SET {

// What LDTILECFG reads. Tiles 0 to 3: totals of 32 rows by two panels; 4 and 5: activations; 6 and 7: weights.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfiguration) == 64);

// Fewer rows than a tile has are not worth computing; where there are more than two tiles of them, the last may hold
// rows of the buffer's padding, whose results nobody reads.
GW_INLINE void configure_tiles(int64_t num_rows) {
  const auto upper = static_cast<uint8_t>(std::min<int64_t>(num_rows, 16));
  const auto lower = static_cast<uint8_t>(std::clamp<int64_t>(num_rows - 16, 1, 16));
  const TileConfiguration configuration{
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {upper, upper, lower, lower, upper, lower, 16, 16}};
  __asm__ volatile("" : : "r"(&configuration) : "memory");  // the intrinsic tells the compiler of 8 bytes only
  _tile_loadconfig(&configuration);
}

template <bool has_lower, bool has_second>
GW_INLINE void multiply_tiles(const PairStrip& strip) {
  const int64_t x_bytes = strip.x_stride * 2;
  constexpr int64_t kTileRowBytes = 64, kTotalsBytes = 2 * kPanelColumns * sizeof(float);
  const uint16_t* upper = strip.x;
  const uint16_t* lower = strip.x + 16 * strip.x_stride;
  __asm__ volatile("" : : : "memory");  // nor does the one that loads a tile tell which memory it reads
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < strip.num_blocks; ++block) {
    _tile_loadd(4, upper + block * kBlockK, x_bytes);
    _tile_loadd(6, strip.weights[0] + block * kPairWords, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (has_second) {
      _tile_loadd(7, strip.weights[1] + block * kPairWords, kTileRowBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (has_lower) {
      _tile_loadd(5, lower + block * kBlockK, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (has_second) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, strip.totals, kTotalsBytes);
  if constexpr (has_second) _tile_stored(1, strip.totals + kPanelColumns, kTotalsBytes);
  if constexpr (has_lower) {
    _tile_stored(2, strip.totals + 16 * 2 * kPanelColumns, kTotalsBytes);
    if constexpr (has_second) _tile_stored(3, strip.totals + (16 * 2 + 1) * kPanelColumns, kTotalsBytes);
  }
}

// The configuration is loaded by every call, since what a thread's tiles hold may be gone; and released, since tiles in
// use make every change of threads dearer.
static void multiply_bf16(const MatmulArgs& args) {
  configure_tiles(args.num_rows);
  multiply_bf16(args, [](const PairStrip& strip, int64_t num_rows) {
    const bool has_lower = num_rows > 16;
    if (strip.num_panels == 2) {
      has_lower ? multiply_tiles<true, true>(strip) : multiply_tiles<false, true>(strip);
    } else {
      has_lower ? multiply_tiles<true, false>(strip) : multiply_tiles<false, false>(strip);
    }
  });
  _tile_release();
}

}  // namespace giveway::GW_SET

#endif
