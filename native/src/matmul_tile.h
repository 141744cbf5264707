// Products of a few rows with one or two panels whose weights lie there as float32. Included by kernels_*.cpp only.
//
// The order of adding is that of docs/decisions/0010-native-kernels.md. Within a block the chain of the even inputs and
// that of the odd ones are independent, so a tile may run them side by side or one after the other, as its registers
// allow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include "register_tile.h"

namespace giveway::GW_SET {

// Accumulators of a tile must stay in registers, and there must be enough of them to hide the latency of multiply-add:
// eight to ten chains on every processor so far.
#if defined(__AVX512F__)
inline constexpr int kTilePanels = 2;  // panels that a tile takes at once
inline constexpr int kTileRows = 8;    // rows of the largest tile
inline constexpr int kAccumulators = 24;
#elif defined(__AVX2__)
inline constexpr int kTilePanels = 1;
inline constexpr int kTileRows = 6;
inline constexpr int kAccumulators = 6;
#else
inline constexpr int kTilePanels = 1;
inline constexpr int kTileRows = 4;
inline constexpr int kAccumulators = 4;
#endif

// A strip of inputs: some rows of activations, the weights of these inputs, and where the products are added.
struct Strip {
  const float* x;  // [rows][x_stride], from the strip's first input on
  int64_t x_stride;
  const float* weights;  // [panels, panel_stride apart][blocks][32 inputs][16 columns]
  int64_t panel_stride;
  int64_t num_blocks;
  float* totals;           // [rows][2 panels][16 columns]
  float* parked;           // kParkedSums, for sums of even inputs until the odd ones are there
  const std::byte* ahead;  // memory that will be wanted soon, fetched while there is work to do
  int64_t ahead_bytes;     // of it, with every block
};
inline constexpr int64_t kParkedSums = kTileRows * kTilePanels * kPanelColumns;
inline constexpr int64_t kBlockWeights = kBlockK * kPanelColumns;

// sums[row][panel] += products of one input.
template <int rows, int panels>
GW_INLINE void add_products(const float* x, int64_t x_stride, const float* weights, int64_t panel_stride,
                            v16 (&sums)[rows][panels]) {
  v16 column[panels];
#pragma GCC unroll 2
  for (int panel = 0; panel < panels; ++panel) column[panel] = load(weights + panel * panel_stride);
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) {
    const v16 value = broadcast(x[row * x_stride]);
#pragma GCC unroll 2
    for (int panel = 0; panel < panels; ++panel) sums[row][panel] = fma(value, column[panel], sums[row][panel]);
  }
}

GW_INLINE void fetch_ahead(const Strip& strip, int64_t block) {
  constexpr int64_t kLineBytes = 64;
  const std::byte* from = strip.ahead + block * strip.ahead_bytes;
  for (const std::byte* line = from; line < from + strip.ahead_bytes; line += kLineBytes)
    __builtin_prefetch(line, 0, 2);
}

// Chains of even and odd inputs side by side.
template <int rows, int panels>
GW_INLINE void multiply_side_by_side(const Strip& strip) {
  const float* x = strip.x;
  const float* weights = strip.weights;
  for (int64_t block = 0; block < strip.num_blocks; ++block, x += kBlockK, weights += kBlockWeights) {
    v16 even[rows][panels], odd[rows][panels];
    fetch_ahead(strip, block);
    clear(even), clear(odd);
#pragma GCC unroll 4
    for (int64_t k = 0; k < kBlockK; k += 2) {
      add_products(x + k, strip.x_stride, weights + k * kPanelColumns, strip.panel_stride, even);
      add_products(x + k + 1, strip.x_stride, weights + (k + 1) * kPanelColumns, strip.panel_stride, odd);
    }
    for_each_sum<rows, panels>([&](int row, int panel) {
      float* total = strip.totals + row * kTotalsStride + panel * kPanelColumns;
      store(total, add(load(total), add(even[row][panel], odd[row][panel])));
    });
  }
}

// The chain of even inputs, then that of odd ones, when there are not enough registers for both. (Letting the sums of a
// block join the totals one block late is 10 % faster on Zen 2 and 5 to 10 % slower on Zen 3, where stores are dear.)
template <int rows, int panels>
GW_INLINE void multiply_in_turn(const Strip& strip) {
  const float* x = strip.x;
  const float* weights = strip.weights;
  const auto parked = [&](int row, int panel) { return strip.parked + (row * panels + panel) * kPanelColumns; };
  for (int64_t block = 0; block < strip.num_blocks; ++block, x += kBlockK, weights += kBlockWeights) {
    v16 sums[rows][panels];
    fetch_ahead(strip, block);
    clear(sums);
    for (int64_t k = 0; k < kBlockK; k += 2)
      add_products(x + k, strip.x_stride, weights + k * kPanelColumns, strip.panel_stride, sums);
    for_each_sum<rows, panels>([&](int row, int panel) { store(parked(row, panel), sums[row][panel]); });
    clear(sums);
    for (int64_t k = 1; k < kBlockK; k += 2)
      add_products(x + k, strip.x_stride, weights + k * kPanelColumns, strip.panel_stride, sums);
    for_each_sum<rows, panels>([&](int row, int panel) {
      float* total = strip.totals + row * kTotalsStride + panel * kPanelColumns;
      store(total, add(load(total), add(load(parked(row, panel)), sums[row][panel])));
    });
  }
}

template <int rows, int panels>
static void multiply_strip(const Strip& shared) {
  const Strip strip = shared;  // a copy that nobody else can point to, so that it stays in registers
  if constexpr (2 * rows * panels <= kAccumulators) {
    multiply_side_by_side<rows, panels>(strip);
  } else {
    multiply_in_turn<rows, panels>(strip);
  }
}

// How many of `left` rows the next tile takes: as many as it can, but so that no tile at the end is too small to keep
// the processor busy. On AVX2 those are the tiles of 1, 2 and 4 rows: 3 rows have both chains of a block at once.
GW_INLINE int64_t choose_tile_rows(int64_t left) {
  if (left <= kTileRows) return left;
  if (left >= 2 * kTileRows)
    return left % kTileRows == 0 || 2 * (left % kTileRows) >= kTileRows ? kTileRows : kTileRows - 1;
  if (kTileRows == 6 && (left == 8 || left == 9)) return left - 3;
  return (left + 1) / 2;
}

using StripFunction = void (*)(const Strip&);

template <int panels, int... rows_less_one>
constexpr StripFunction strip_function(int64_t rows, std::integer_sequence<int, rows_less_one...>) {
  constexpr StripFunction functions[] = {multiply_strip<rows_less_one + 1, panels>...};
  return functions[rows - 1];
}

// All rows of a strip with `num_panels` panels (one or two), while `ahead_bytes` from strip.ahead on are fetched.
static void multiply_rows(Strip strip, int64_t num_rows, int64_t num_panels, int64_t ahead_bytes) {
  constexpr auto sizes = std::make_integer_sequence<int, kTileRows>();
  const int64_t panels_at_once = std::min<int64_t>(kTilePanels, num_panels);
  int64_t num_tiles = 0;
  for (int64_t left = num_rows; left > 0; left -= choose_tile_rows(left)) num_tiles += num_panels / panels_at_once;
  constexpr int64_t kLineBytes = 64;
  const int64_t num_steps = num_tiles * strip.num_blocks;
  strip.ahead_bytes = (ahead_bytes / kLineBytes + num_steps - 1) / num_steps * kLineBytes;
  while (num_rows > 0) {
    const int64_t rows = choose_tile_rows(num_rows);
    Strip tile = strip;
    for (int64_t panel = 0; panel < num_panels; panel += panels_at_once) {
      (panels_at_once == 2 ? strip_function<kTilePanels>(rows, sizes) : strip_function<1>(rows, sizes))(tile);
      tile.weights += strip.panel_stride, tile.totals += kPanelColumns;
      tile.ahead += strip.num_blocks * strip.ahead_bytes;
    }
    num_rows -= rows, strip.x += rows * strip.x_stride, strip.totals += rows * kTotalsStride, strip.ahead = tile.ahead;
  }
}

}  // namespace giveway::GW_SET
