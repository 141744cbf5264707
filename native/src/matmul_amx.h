// Products by AMX tiles. Included by kernels_amx.cpp only.
//
// TDPBF16PS adds in just the order that all sets keep: over a block of 32 inputs the even ones by one chain from +0,
// the odd ones by another, then total + (even + odd), denormal numbers flushed. Source: Intel SDM, TDPBF16PS. Which
// operand holds the weights is all the same: up to kFewRows rows it is the left one, as weights are decoded to rows;
// more rows are the left operand themselves, and the weights are transposed.
//
// Tiles multiply in a unit of their own. What the vector units have to do, decoding weights and finishing products, is
// therefore done between the tile instructions, a little with every block, so that both are busy.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "matmul_epilogue.h"
#include "weight_rows.h"

#if defined(__AMX_BF16__)

namespace giveway::GW_SET {

inline constexpr int64_t kTileRows16 = 16;             // rows of a tile
inline constexpr int64_t kTileWords = 16 * 2 * 16;     // bfloat16 values of a tile
inline constexpr int64_t kFewRows = 4 * kTileRows16;   // up to so many, a panel is multiplied with all rows at once
inline constexpr int64_t kPartRows = 2 * kTileRows16;  // more: rows that two panels are multiplied with at a time
inline constexpr int64_t kAmxChunkBytes = int64_t{3} << 19;  // of activations that share what was decoded

// What LDTILECFG reads.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);

// Tiles 0 to 3: totals; 4 and 5: activations; 6 and 7: weights. columns: of totals and activations, up to 16.
GW_INLINE void configure_tiles(int64_t columns) {
  TileConfiguration configuration;
  for (int tile = 0; tile < 6; ++tile) configuration.row_bytes[tile] = static_cast<uint16_t>(4 * columns);
  __asm__ volatile("" : : "r"(&configuration) : "memory");  // the intrinsic tells the compiler of 8 bytes only
  _tile_loadconfig(&configuration);
}

// ---- up to kFewRows rows: totals = weights [16 outputs][inputs] times activations [inputs][rows]

struct FewScratch {
  alignas(64) float totals[2][2 * kFewRows * kPanelColumns];  // [turn][panels][tiles of rows][16 outputs][16 rows]
  alignas(64) float transposed[kTileRows16 * kTotalsStride];
  alignas(64) uint16_t rows[2][kTileWords];  // decoded a block before they are multiplied: storing takes its time
  alignas(64) uint16_t x[];                  // [tiles of rows][blocks][16 pairs of inputs][16 rows][2]
};

// Products of two panels that wait for their epilogue, row by row.
struct FewUnfinished {
  const float* totals = nullptr;
  int64_t row = 0, num_rows = 0, panel = 0, num_panels = 0;

  [[gnu::always_inline]] inline void finish_some(const MatmulArgs& args, FewScratch& scratch, int64_t most) {
    if (row == num_rows) return;
    if (num_rows == 1) {  // sixteen outputs of a single row are a row already
      for (int64_t index = 0; index < num_panels; ++index)
        store(scratch.transposed + index * kPanelColumns, load(totals + index * kFewRows * kPanelColumns));
    } else if (row % kTileRows16 == 0) {
      for (int64_t index = 0; index < num_panels; ++index)
        transpose_sixteen(totals + (index * kFewRows + row) * kPanelColumns, 64,
                          scratch.transposed + index * kPanelColumns, kTotalsStride * sizeof(float));
    }
    const int64_t count = std::min(most, std::min(num_rows, (row / kTileRows16 + 1) * kTileRows16) - row);
    finish(args, row, count, panel, num_panels, scratch.transposed + row % kTileRows16 * kTotalsStride);
    row += count;
  }
  [[gnu::always_inline]] inline void finish_all(const MatmulArgs& args, FewScratch& scratch) {
    while (row < num_rows) finish_some(args, scratch, kTileRows16);
  }
};

// One panel by up to 4 tiles of rows. x_row_bytes: from a pair of inputs to the next.
template <Encoding encoding, int tiles>
static void multiply_few(const MatmulArgs& args, const std::byte* data, const uint16_t* x, int64_t x_row_bytes,
                         FewScratch& scratch, float* totals, FewUnfinished& before) {
  const int64_t num_blocks = args.weights->num_blocks();
  const int64_t x_block = 8 * x_row_bytes, x_tile = num_blocks * kTileWords;  // words to the next block, tile of rows
  const int64_t rows_a_block = (before.num_rows + 2 * num_blocks - 1) / (2 * num_blocks);
  const auto multiply = [&](const uint16_t* rows) {
    _tile_loadd(6, rows, 64);
    _tile_loadd(4, x, x_row_bytes);
    _tile_dpbf16ps(0, 6, 4);
    if constexpr (tiles > 1) {
      _tile_loadd(5, x + x_tile, x_row_bytes);
      _tile_dpbf16ps(1, 6, 5);
    }
    if constexpr (tiles > 2) {
      _tile_loadd(4, x + 2 * x_tile, x_row_bytes);
      _tile_dpbf16ps(2, 6, 4);
    }
    if constexpr (tiles > 3) {
      _tile_loadd(5, x + 3 * x_tile, x_row_bytes);
      _tile_dpbf16ps(3, 6, 5);
    }
    x += x_block;
  };
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const uint16_t* rows = decode_rows<encoding>(data, scratch.rows[0]);
  for (int64_t block = 1; block < num_blocks; ++block) {
    data += panel_block_bytes(encoding);
    const uint16_t* next = decode_rows<encoding>(data, scratch.rows[block % 2]);
    keep_order();
    multiply(rows);
    rows = next;
    before.finish_some(args, scratch, rows_a_block);
  }
  keep_order();
  multiply(rows);
  constexpr int64_t kTile = kTileRows16 * kPanelColumns;
  const int64_t row_bytes = args.num_rows == 1 ? 4 : 64;
  _tile_stored(0, totals, row_bytes);
  if constexpr (tiles > 1) _tile_stored(1, totals + kTile, row_bytes);
  if constexpr (tiles > 2) _tile_stored(2, totals + 2 * kTile, row_bytes);
  if constexpr (tiles > 3) _tile_stored(3, totals + 3 * kTile, row_bytes);
}

// Activations as right operands. (A single row is one as it lies.)
static void interleave_rows(const MatmulArgs& args, uint16_t* out) {
  const int64_t num_blocks = args.weights->num_blocks();
  for (int64_t row = 0; row < args.num_rows; row += kTileRows16)
    for (int64_t block = 0; block < num_blocks; ++block, out += kTileWords)
      transpose_sixteen(static_cast<const uint16_t*>(args.x) + row * args.x_stride + block * kBlockK, args.x_stride * 2,
                        out, 64);
}

template <Encoding encoding, int tiles>
static void multiply_few(const MatmulArgs& args) {
  auto& scratch = *reinterpret_cast<FewScratch*>(args.scratch);
  const bool is_single = args.num_rows == 1;
  const uint16_t* x = is_single ? static_cast<const uint16_t*>(args.x) : scratch.x;
  if (!is_single && !args.same_x) interleave_rows(args, scratch.x);
  configure_tiles(std::min(args.num_rows, kTileRows16));
  FewUnfinished before;
  int turn = 0;
  for (int64_t panel = args.first_panel; panel < args.last_panel; panel += 2, turn ^= 1) {
    float* totals = scratch.totals[turn];
    const int64_t num_panels = std::min<int64_t>(2, args.last_panel - panel);
    for (int64_t index = 0; index < num_panels; ++index)
      multiply_few<encoding, tiles>(args, args.weights->panel(panel + index), x, is_single ? 4 : 64, scratch,
                                    totals + index * kFewRows * kPanelColumns, before);
    before.finish_all(args, scratch);
    before = {totals, 0, args.num_rows, panel, num_panels};
  }
  before.finish_all(args, scratch);
}

// ---- more rows: totals = activations [rows][inputs] times weights [inputs][16 outputs]

// Products of a part that wait for their epilogue.
struct Unfinished {
  const float* totals = nullptr;  // of the next row
  int64_t row = 0, num_rows = 0, panel = 0, num_panels = 0;

  [[gnu::always_inline]] inline void finish_some(const MatmulArgs& args, int64_t most) {
    const int64_t count = std::min(most, num_rows);
    finish(args, row, count, panel, num_panels, totals);
    row += count, num_rows -= count, totals += count * kTotalsStride;
  }
};

// Weights of two panels that are decoded block by block, [16 pairs of inputs][16 outputs][2] each.
template <Encoding encoding>
struct Decoding {
  const std::byte* data = nullptr;
  uint16_t* pairs = nullptr;
  int64_t num_blocks = 0;  // still to decode

  [[gnu::always_inline]] inline void decode_some(int64_t most) {
    for (most = std::min(most, num_blocks); most > 0; --most) {
      alignas(64) uint16_t rows[kTileWords];
      transpose_sixteen(decode_rows<encoding>(data, rows), 64, pairs, 64);
      data += panel_block_bytes(encoding), pairs += kTileWords, --num_blocks;
    }
  }
};

// A part of the rows by two panels.
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
  constexpr int64_t kTotalsBytes = kTotalsStride * sizeof(float);
  const uint16_t* upper = strip.x;
  const uint16_t* lower = strip.x + kTileRows16 * strip.x_stride;
  keep_order();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < strip.num_blocks; ++block) {
    _tile_loadd(4, upper + block * kBlockK, x_bytes);
    _tile_loadd(6, strip.weights[0] + block * kTileWords, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (has_second) {
      _tile_loadd(7, strip.weights[1] + block * kTileWords, 64);
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
    _tile_stored(2, strip.totals + kTileRows16 * kTotalsStride, kTotalsBytes);
    if constexpr (has_second) _tile_stored(3, strip.totals + kTileRows16 * kTotalsStride + kPanelColumns, kTotalsBytes);
  }
}

template <Encoding encoding>
static void multiply_many(const MatmulArgs& args) {
  const Panels& panels = *args.weights;
  const int64_t num_blocks = panels.num_blocks();
  float* totals = reinterpret_cast<float*>(args.scratch);  // [2 turns][kPartRows][kTotalsStride]
  auto* decoded = reinterpret_cast<uint16_t*>(totals + 2 * kPartRows * kTotalsStride);  // [2 turns][2][blocks]
  const auto pairs_of = [&](int64_t panel) {
    return decoded + (panel - args.first_panel) / 2 % 2 * 2 * num_blocks * kTileWords;
  };
  const auto decoding_of = [&](int64_t panel) {
    const int64_t num_panels = std::clamp<int64_t>(args.last_panel - panel, 0, 2);
    return num_panels == 0 ? Decoding<encoding>()
                           : Decoding<encoding>{panels.panel(panel), pairs_of(panel), num_panels * num_blocks};
  };
  configure_tiles(kTileRows16);
  const int64_t most = std::max(kAmxChunkBytes / (args.x_stride * 2) / kPartRows, int64_t{1}) * kPartRows;
  const int64_t chunk_rows = rounded_up(equal_part(args.num_rows, most), kPartRows);
  const int64_t rows_a_block = equal_part(kPartRows, num_blocks);
  Unfinished before;
  int turn = 0;
  for (int64_t first = 0; first < args.num_rows; first += chunk_rows) {
    const int64_t last = std::min(first + chunk_rows, args.num_rows);
    // Two panels have two blocks for each step of a part: so often one of the next panels' is decoded.
    const int64_t steps_a_block = std::max<int64_t>((last - first + kPartRows - 1) / kPartRows / 2, 1);
    Decoding<encoding> next = decoding_of(args.first_panel);
    next.decode_some(next.num_blocks);
    for (int64_t panel = args.first_panel; panel < args.last_panel; panel += 2) {
      next = decoding_of(panel + 2);
      int64_t step = 0;
      const uint16_t* pairs = pairs_of(panel);
      PairStrip strip{nullptr,
                      args.x_stride,
                      {pairs, pairs + num_blocks * kTileWords},
                      std::min<int64_t>(2, args.last_panel - panel),
                      num_blocks,
                      nullptr};
      for (int64_t row = first; row < last; row += kPartRows, turn ^= 1) {
        const int64_t num_rows = std::min(kPartRows, last - row);
        strip.x = static_cast<const uint16_t*>(args.x) + row * args.x_stride;
        strip.totals = totals + turn * kPartRows * kTotalsStride;
        const auto between = [&] {
          before.finish_some(args, rows_a_block);
          if (++step == steps_a_block) next.decode_some(1), step = 0;
        };
        const bool has_lower = num_rows > kTileRows16;
        if (strip.num_panels == 2) {
          has_lower ? multiply_part<true, true>(strip, between) : multiply_part<false, true>(strip, between);
        } else {
          has_lower ? multiply_part<true, false>(strip, between) : multiply_part<false, false>(strip, between);
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
  const int64_t of_few = static_cast<int64_t>(sizeof(FewScratch)) + kFewRows * num_blocks * kBlockK * 2;
  const int64_t of_many =
      2 * kPartRows * kTotalsStride * static_cast<int64_t>(sizeof(float)) + 4 * num_blocks * kTileWords * 2;
  return std::max(of_few, of_many);
}

template <Encoding encoding>
static void multiply_tiles(const MatmulArgs& args) {
  if (args.num_rows > kFewRows) return multiply_many<encoding>(args);
  if (args.num_rows > 3 * kTileRows16) return multiply_few<encoding, 4>(args);
  if (args.num_rows > 2 * kTileRows16) return multiply_few<encoding, 3>(args);
  if (args.num_rows > kTileRows16) return multiply_few<encoding, 2>(args);
  return multiply_few<encoding, 1>(args);
}

// Every call loads the configuration, since what a thread's tiles hold may be gone; and releases the tiles, since tiles
// in use make every change of threads dearer.
static void multiply_bf16(const MatmulArgs& args) {
  with_encoding(args.weights->encoding, [&](auto encoding) {
    if constexpr (encoding != Encoding::f32) multiply_tiles<encoding>(args);
  });
  _tile_release();
}

}  // namespace giveway::GW_SET

#endif
