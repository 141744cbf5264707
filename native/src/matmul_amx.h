// Products by AMX tiles. Included by kernels_amx.cpp only.
//
// TDPBF16PS adds in just the order that all sets keep: over a block of 32 inputs the even ones by one chain from +0,
// the odd ones by another, then total + (even + odd), denormal numbers flushed. Source: Intel SDM, TDPBF16PS.
//
// Tiles multiply in a unit of their own. What the vector units have to do, decoding weights and finishing products, is
// therefore done between the tile instructions, a little with every block, so that both are busy.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "matmul_epilogue.h"
#include "pairs.h"

#if defined(__AMX_BF16__)

namespace giveway::GW_SET {

inline constexpr int64_t kTileHeight = 16;                   // rows of a tile
inline constexpr int64_t kFewRows = 4 * kTileHeight;         // up to so many rows, each panel is decoded as it is used
inline constexpr int64_t kPartRows = 2 * kTileHeight;        // more: rows that are multiplied with two panels at a time
inline constexpr int64_t kAmxChunkBytes = int64_t{3} << 19;  // their activations that share what was decoded

// What LDTILECFG reads. Tiles 0 to 3: totals; 4 and 5: activations; 6 and 7: weights.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfiguration) == 64);

// Fewer rows than a tile has are not worth computing; where there are more, the last tile may hold rows of the buffer's
// padding, whose results nobody reads.
GW_INLINE void configure_tiles(int64_t num_rows) {
  const auto rows = static_cast<uint8_t>(std::min(num_rows, kTileHeight));
  const TileConfiguration configuration{
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {rows, rows, rows, rows, rows, rows, 16, 16}};
  __asm__ volatile("" : : "r"(&configuration) : "memory");  // the intrinsic tells the compiler of 8 bytes only
  _tile_loadconfig(&configuration);
}

// Products that wait for their epilogue.
struct Unfinished {
  const float* totals = nullptr;  // of the next row
  int64_t row = 0, num_rows = 0, panel = 0, num_panels = 0;

  [[gnu::always_inline]] inline void finish_some(const MatmulArgs& args, int64_t most) {
    const int64_t count = std::min(most, num_rows);
    finish(args, row, count, panel, num_panels, totals);
    row += count, num_rows -= count, totals += count * kTotalsStride;
  }
};

inline constexpr int64_t kRingBlocks = 4;  // decoded a block before the tile is loaded: a store needs its time

struct FewScratch {
  alignas(64) float totals[2][kFewRows * kTotalsStride];
  alignas(64) uint16_t ring[kRingBlocks * kPairWords];
};

// One panel by up to 4 tiles of rows; totals [rows][kTotalsStride].
template <Encoding encoding, int tiles>
static void multiply_few(const MatmulArgs& args, const std::byte* data, float* totals, uint16_t* ring,
                         Unfinished& before) {
  const int64_t num_blocks = args.weights->num_blocks(), x_bytes = args.x_stride * 2;
  const int64_t rows_a_block = equal_part(std::max<int64_t>(2 * before.num_rows, 1), 2 * num_blocks);
  const auto* x = static_cast<const uint16_t*>(args.x);
  const auto multiply = [&](const uint16_t* weights) {
    _tile_loadd(6, weights, 64);
    _tile_loadd(4, x, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (tiles > 1) {
      _tile_loadd(5, x + 1 * kTileHeight * args.x_stride, x_bytes);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (tiles > 2) {
      _tile_loadd(4, x + 2 * kTileHeight * args.x_stride, x_bytes);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (tiles > 3) {
      _tile_loadd(5, x + 3 * kTileHeight * args.x_stride, x_bytes);
      _tile_dpbf16ps(3, 5, 6);
    }
    x += kBlockK;
  };
  keep_order();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < num_blocks; ++block, data += panel_block_bytes(encoding)) {
    if constexpr (encoding == Encoding::bf16) {
      multiply(reinterpret_cast<const uint16_t*>(data));
    } else {
      decode_pairs<encoding>(data, 1, ring + block % kRingBlocks * kPairWords);
      keep_order();
      if (block > 0) multiply(ring + (block - 1) % kRingBlocks * kPairWords);
    }
    before.finish_some(args, rows_a_block);
  }
  if constexpr (encoding != Encoding::bf16) multiply(ring + (num_blocks - 1) % kRingBlocks * kPairWords);
  constexpr int64_t kRowBytes = kTotalsStride * sizeof(float);
  _tile_stored(0, totals, kRowBytes);
  if constexpr (tiles > 1) _tile_stored(1, totals + 1 * kTileHeight * kTotalsStride, kRowBytes);
  if constexpr (tiles > 2) _tile_stored(2, totals + 2 * kTileHeight * kTotalsStride, kRowBytes);
  if constexpr (tiles > 3) _tile_stored(3, totals + 3 * kTileHeight * kTotalsStride, kRowBytes);
}

template <Encoding encoding, int tiles>
static void multiply_few(const MatmulArgs& args) {
  auto& scratch = *reinterpret_cast<FewScratch*>(args.scratch);
  Unfinished before;
  int turn = 0;
  for (int64_t panel = args.first_panel; panel < args.last_panel; panel += 2, turn ^= 1) {
    float* totals = scratch.totals[turn];
    const int64_t num_panels = std::min<int64_t>(2, args.last_panel - panel);
    for (int64_t index = 0; index < num_panels; ++index)
      multiply_few<encoding, tiles>(args, args.weights->panel(panel + index), totals + index * kPanelColumns,
                                    scratch.ring, before);
    before.finish_some(args, before.num_rows);
    before = {totals, 0, args.num_rows, panel, num_panels};
  }
  before.finish_some(args, before.num_rows);
}

// Weights of the next two panels, decoded block by block while the present ones are multiplied.
template <Encoding encoding>
struct Decoding {
  const std::byte* data = nullptr;
  uint16_t* pairs = nullptr;
  int64_t num_blocks = 0;  // still to decode

  [[gnu::always_inline]] inline void decode_some(int64_t most) {
    const int64_t count = std::min(most, num_blocks);
    decode_pairs<encoding>(data, count, pairs);
    data += count * panel_block_bytes(encoding), pairs += count * kPairWords, num_blocks -= count;
  }
};

// A part of the rows by two panels of pairs.
struct PairStrip {
  const uint16_t* x;  // [rows, up to whole tiles][x_stride]
  int64_t x_stride;
  const uint16_t* weights[2];
  int64_t num_panels, num_blocks;
  float* totals;  // [kPartRows][2 panels][16 columns]
};

// Calls between() with every block.
template <bool has_lower, bool has_second, typename Between>
GW_INLINE void multiply_part(const PairStrip& strip, Between between) {
  const int64_t x_bytes = strip.x_stride * 2;
  constexpr int64_t kTileRowBytes = 64, kTotalsBytes = kTotalsStride * sizeof(float);
  const uint16_t* upper = strip.x;
  const uint16_t* lower = strip.x + kTileHeight * strip.x_stride;
  keep_order();
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
    between();
  }
  _tile_stored(0, strip.totals, kTotalsBytes);
  if constexpr (has_second) _tile_stored(1, strip.totals + kPanelColumns, kTotalsBytes);
  if constexpr (has_lower) {
    _tile_stored(2, strip.totals + kTileHeight * kTotalsStride, kTotalsBytes);
    if constexpr (has_second) _tile_stored(3, strip.totals + kTileHeight * kTotalsStride + kPanelColumns, kTotalsBytes);
  }
}

template <Encoding encoding>
static void multiply_many(const MatmulArgs& args) {
  const Panels& panels = *args.weights;
  const int64_t num_blocks = panels.num_blocks();
  float* totals = reinterpret_cast<float*>(args.scratch);  // [2 turns][kPartRows][kTotalsStride]
  auto* decoded = reinterpret_cast<uint16_t*>(totals + 2 * kPartRows * kTotalsStride);  // [2 turns][2][blocks]
  constexpr bool decodes = encoding != Encoding::bf16;
  const auto pairs_of = [&](int64_t panel, int64_t index) {
    if constexpr (!decodes) return reinterpret_cast<const uint16_t*>(panels.panel(panel + index));
    return static_cast<const uint16_t*>(decoded +
                                        ((panel - args.first_panel) / 2 % 2 * 2 + index) * num_blocks * kPairWords);
  };
  const auto decoding_of = [&](int64_t panel) {
    const int64_t count = decodes ? std::clamp<int64_t>(args.last_panel - panel, 0, 2) : 0;
    return Decoding<encoding>{count == 0 ? nullptr : panels.panel(panel), const_cast<uint16_t*>(pairs_of(panel, 0)),
                              count * num_blocks};
  };
  const int64_t most = std::max(kAmxChunkBytes / (args.x_stride * 2) / kPartRows, int64_t{1}) * kPartRows;
  const int64_t chunk_rows = rounded_up(equal_part(args.num_rows, most), kPartRows);
  const int64_t rows_a_block = (kPartRows + num_blocks - 1) / num_blocks;
  Unfinished before;
  int turn = 0;
  for (int64_t first = 0; first < args.num_rows; first += chunk_rows) {
    const int64_t last = std::min(first + chunk_rows, args.num_rows);
    const int64_t num_parts = (last - first + kPartRows - 1) / kPartRows;
    Decoding<encoding> next = decoding_of(args.first_panel);
    next.decode_some(next.num_blocks);
    for (int64_t panel = args.first_panel; panel < args.last_panel; panel += 2) {
      next = decoding_of(panel + 2);
      const int64_t steps_a_block = std::max<int64_t>(num_parts / 2, 1), blocks_a_step = num_parts == 1 ? 2 : 1;
      int64_t step = 0;
      PairStrip strip{nullptr,
                      args.x_stride,
                      {pairs_of(panel, 0), pairs_of(panel, 1)},
                      std::min<int64_t>(2, args.last_panel - panel),
                      num_blocks,
                      nullptr};
      for (int64_t row = first; row < last; row += kPartRows, turn ^= 1) {
        const int64_t num_rows = std::min(kPartRows, last - row);
        strip.x = static_cast<const uint16_t*>(args.x) + row * args.x_stride;
        strip.totals = totals + turn * kPartRows * kTotalsStride;
        const auto between = [&] {
          before.finish_some(args, rows_a_block);
          if (decodes && ++step == steps_a_block) next.decode_some(blocks_a_step), step = 0;
        };
        if (strip.num_panels == 2) {
          num_rows > kTileHeight ? multiply_part<true, true>(strip, between)
                                 : multiply_part<false, true>(strip, between);
        } else {
          num_rows > kTileHeight ? multiply_part<true, false>(strip, between)
                                 : multiply_part<false, false>(strip, between);
        }
        before.finish_some(args, before.num_rows);
        before = {strip.totals, row, num_rows, panel, strip.num_panels};
      }
      next.decode_some(next.num_blocks);
    }
  }
  before.finish_some(args, before.num_rows);
}

static int64_t bf16_scratch_bytes(int64_t num_inputs) {
  const int64_t num_blocks = (num_inputs + kBlockK - 1) / kBlockK;
  const int64_t of_many =
      2 * kPartRows * kTotalsStride * static_cast<int64_t>(sizeof(float)) + 4 * num_blocks * kPairWords * 2;
  return std::max(of_many, static_cast<int64_t>(sizeof(FewScratch)));
}

template <Encoding encoding>
static void multiply_tiles(const MatmulArgs& args) {
  if (args.num_rows > kFewRows) return multiply_many<encoding>(args);
  if (args.num_rows > 3 * kTileHeight) return multiply_few<encoding, 4>(args);
  if (args.num_rows > 2 * kTileHeight) return multiply_few<encoding, 3>(args);
  if (args.num_rows > kTileHeight) return multiply_few<encoding, 2>(args);
  return multiply_few<encoding, 1>(args);
}

// The configuration is loaded by every call, since what a thread's tiles hold may be gone; and released, since tiles in
// use make every change of threads dearer.
static void multiply_bf16(const MatmulArgs& args) {
  configure_tiles(args.num_rows);
  with_encoding(args.weights->encoding, [&](auto encoding) { multiply_tiles<encoding>(args); });
  _tile_release();
}

}  // namespace giveway::GW_SET

#endif
