// Products by AMX tiles. Included by kernels_amx.cpp only.
//
// TDPBF16PS adds in just the order that all sets keep: over a block of 32 inputs the even ones by one chain from +0,
// the odd ones by another, then total + (even + odd), denormal numbers flushed. Source: Intel SDM, TDPBF16PS. Which
// operand holds the weights is all the same: up to kFewRows rows it is the left one, as weights are decoded to rows;
// more rows are the left operand themselves, and the weights are transposed.
//
// Tiles multiply in a unit of their own (next to which one of the two units for floating point is idle). What vector
// instructions have to do, decoding weights and finishing products, is therefore done between the tile instructions, a
// little with every block: what takes longer than the tiles of a block holds up those of the next.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "matmul_epilogue.h"
#include "weight_rows.h"

#if defined(__AMX_BF16__)

namespace giveway::GW_SET {

inline constexpr int64_t kTileHeight = 16;
inline constexpr int64_t kTileWords = kTileHeight * kBlockK;  // bfloat16 values of a tile
inline constexpr int64_t kFewRows = 4 * kTileHeight;   // up to so many, a panel is multiplied with all rows at once
inline constexpr int64_t kPartRows = 2 * kTileHeight;  // more: rows that two panels are multiplied with at a time
inline constexpr int64_t kChunkBytesOfMany = int64_t{3} << 19;  // activations that share what was decoded
// Blocks that pass before stored tiles are read: until they are in memory, whoever wants them holds up all behind.
inline constexpr int64_t kBlocksOfRest = 4;

// What LDTILECFG reads.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);

GW_INLINE void load_configuration(const TileConfiguration& configuration) {
  __asm__ volatile("" : : "r"(&configuration) : "memory");  // the intrinsic tells the compiler of 8 bytes only
  _tile_loadconfig(&configuration);
}

// Tiles 0 to 3: totals; 4 and 5: activations; 6 and 7: weights. columns: of totals and activations, up to 16.
GW_INLINE void configure_tiles(int64_t columns) {
  TileConfiguration configuration;
  for (int tile = 0; tile < 6; ++tile) configuration.row_bytes[tile] = static_cast<uint16_t>(4 * columns);
  load_configuration(configuration);
}

// Calls function(number) for 0 to 3, constants.
template <typename Function>
GW_INLINE void for_four(Function function) {
  function(std::integral_constant<int, 0>());
  function(std::integral_constant<int, 1>());
  function(std::integral_constant<int, 2>());
  function(std::integral_constant<int, 3>());
}

// ---- up to kFewRows rows: totals = weights [16 outputs][inputs] times activations [inputs][rows]

struct FewScratch {
  alignas(64) float totals[2][2 * kFewRows * kPanelColumns];  // [turn][panels][tiles of rows][16 outputs][16 rows]
  alignas(64) float transposed[kTileHeight * kTotalsStride];
  alignas(64) uint16_t rows[2][kTileWords];  // decoded a block before they are multiplied: storing takes its time
  alignas(64) float scales[32];
  alignas(64) uint16_t x[];  // [tiles of rows][blocks][16 pairs of inputs][16 rows][2]
};

// Products of two panels that wait for their epilogue, row by row.
template <Epilogue epilogue>
struct FewUnfinished {
  const float* totals = nullptr;
  int64_t row = 0, num_rows = 0, panel = 0, num_panels = 0;

  [[gnu::always_inline]] inline void finish_some(const MatmulArgs& args, FewScratch& scratch, int64_t most) {
    if (row == num_rows) return;
    if (num_rows == 1) {  // sixteen outputs of a single row are a row already
      for (int64_t index = 0; index < num_panels; ++index)
        store(scratch.transposed + index * kPanelColumns, load(totals + index * kFewRows * kPanelColumns));
    } else if (row % kTileHeight == 0) {
      for (int64_t index = 0; index < num_panels; ++index)
        transpose_sixteen(totals + (index * kFewRows + row) * kPanelColumns, 64,
                          scratch.transposed + index * kPanelColumns, kTotalsStride * sizeof(float));
    }
    const int64_t count = std::min(most, std::min(num_rows, (row / kTileHeight + 1) * kTileHeight) - row);
    finish<epilogue>(args, row, count, panel, num_panels, scratch.transposed + row % kTileHeight * kTotalsStride);
    row += count;
  }
  [[gnu::always_inline]] inline void finish_all(const MatmulArgs& args, FewScratch& scratch) {
    while (row < num_rows) finish_some(args, scratch, kTileHeight);
  }
};

// One panel by up to 4 tiles of rows. x_row_bytes: from a pair of inputs to the next.
template <Encoding encoding, int tiles, Epilogue epilogue>
static void multiply_few(const MatmulArgs& args, const std::byte* data, const uint16_t* x, int64_t x_row_bytes,
                         FewScratch& scratch, float* totals, FewUnfinished<epilogue>& before) {
  const int64_t num_blocks = args.weights->num_blocks();
  const int64_t x_block = 8 * x_row_bytes, x_tile = num_blocks * kTileWords;  // words to the next block, tile of rows
  const int64_t rows_a_block = before.num_rows / (2 * std::max<int64_t>(num_blocks - kBlocksOfRest, 1)) + 1;
  BlockRows<encoding> block{scratch.scales};
  const auto rows_of = [&](int64_t index) -> const uint16_t* {
    if constexpr (!BlockRows<encoding>::kDecodes)
      return reinterpret_cast<const uint16_t*>(data + index * panel_block_bytes(encoding));
    return scratch.rows[index % 2];
  };
  // Tile of rows `number` by block `index`.
  const auto multiply = [&](auto number, int64_t index) {
    const uint16_t* at = x + index * x_block + number * x_tile;
    if constexpr (number == 0) {
      _tile_loadd(6, rows_of(index), 64);
      _tile_loadd(4, at, x_row_bytes);
      _tile_dpbf16ps(0, 6, 4);
    } else if constexpr (number == 1) {
      _tile_loadd(5, at, x_row_bytes);
      _tile_dpbf16ps(1, 6, 5);
    } else if constexpr (number == 2) {
      _tile_loadd(4, at, x_row_bytes);
      _tile_dpbf16ps(2, 6, 4);
    } else {
      _tile_loadd(5, at, x_row_bytes);
      _tile_dpbf16ps(3, 6, 5);
    }
  };
  const auto multiply_all = [&](int64_t index) {
    for_four([&](auto number) {
      if constexpr (number < tiles) multiply(number, index);
    });
  };
  // A quarter of a block fits between two of many tiles. Few tiles end before it does, and what it gives would be late.
  constexpr bool kDecodesBetween = tiles > 2;
  const auto decode = [&](int64_t index) {
    block.open(data + index * panel_block_bytes(encoding));
    for_four([&](auto group) {
      block.decode(group, scratch.rows[index % 2]);
      if constexpr (kDecodesBetween && group < tiles) {
        if (index > 0) multiply(group, index - 1);
      }
    });
    keep_order();
  };
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  decode(0);
  for (int64_t index = 1; index < num_blocks; ++index) {
    decode(index);
    if constexpr (!kDecodesBetween) multiply_all(index - 1);
    if (index >= kBlocksOfRest) before.finish_some(args, scratch, rows_a_block);
  }
  multiply_all(num_blocks - 1);
  constexpr int64_t kTile = kTileHeight * kPanelColumns;
  _tile_stored(0, totals, x_row_bytes);  // sums lie as activations do: a single row side by side
  if constexpr (tiles > 1) _tile_stored(1, totals + kTile, x_row_bytes);
  if constexpr (tiles > 2) _tile_stored(2, totals + 2 * kTile, x_row_bytes);
  if constexpr (tiles > 3) _tile_stored(3, totals + 3 * kTile, x_row_bytes);
}

// Two panels that need no decoding by one tile of rows: one core reads two streams faster than one.
static void multiply_stored(const uint16_t* first, const uint16_t* second, int64_t num_blocks, const uint16_t* x,
                            int64_t x_row_bytes, float* totals) {
  keep_order();
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t block = 0; block < num_blocks; ++block) {
    _tile_loadd(4, x + block * 8 * x_row_bytes, x_row_bytes);
    _tile_loadd(6, first + block * kTileWords, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(7, second + block * kTileWords, 64);
    _tile_dpbf16ps(1, 7, 4);
  }
  _tile_stored(0, totals, x_row_bytes);
  _tile_stored(1, totals + kFewRows * kPanelColumns, x_row_bytes);
}

// Activations as right operands. (A single row is one as it lies.)
static void interleave_rows(const MatmulArgs& args, uint16_t* out) {
  const int64_t num_blocks = args.weights->num_blocks();
  for (int64_t row = 0; row < args.num_rows; row += kTileHeight)
    for (int64_t block = 0; block < num_blocks; ++block, out += kTileWords)
      transpose_sixteen(static_cast<const uint16_t*>(args.x) + row * args.x_stride + block * kBlockK, args.x_stride * 2,
                        out, 64);
}

template <Encoding encoding, Epilogue epilogue, int tiles>
static void multiply_few(const MatmulArgs& args) {
  auto& scratch = *reinterpret_cast<FewScratch*>(args.scratch);
  const bool is_single = args.num_rows == 1;
  const int64_t x_row_bytes = is_single ? 4 : 64;
  const uint16_t* x = is_single ? static_cast<const uint16_t*>(args.x) : scratch.x;
  if (!is_single && !args.same_x) interleave_rows(args, scratch.x);
  configure_tiles(std::min(args.num_rows, kTileHeight));
  FewUnfinished<epilogue> before;
  int turn = 0;
  for (int64_t panel = args.first_panel; panel < args.last_panel; panel += 2, turn ^= 1) {
    float* totals = scratch.totals[turn];
    const int64_t num_panels = std::min<int64_t>(2, args.last_panel - panel);
    if (tiles == 1 && encoding == Encoding::bf16 && num_panels == 2) {
      const auto stored = [&](int64_t index) { return reinterpret_cast<const uint16_t*>(args.weights->panel(index)); };
      multiply_stored(stored(panel), stored(panel + 1), args.weights->num_blocks(), x, x_row_bytes, totals);
    } else {
      for (int64_t index = 0; index < num_panels; ++index)
        multiply_few<encoding, tiles, epilogue>(args, args.weights->panel(panel + index), x, x_row_bytes, scratch,
                                                totals + index * kFewRows * kPanelColumns, before);
    }
    before.finish_all(args, scratch);
    before = {totals, 0, args.num_rows, panel, num_panels};
  }
  before.finish_all(args, scratch);
}

// ---- more rows: totals = activations [rows][inputs] times weights [inputs][16 outputs]

struct ManyScratch {
  alignas(64) float totals[2][kPartRows * kTotalsStride];  // [turn]
  alignas(64) float powers[kPartRows * kPanelColumns];
  alignas(64) uint16_t rows[kTileWords];
  alignas(64) float scales[32];
  alignas(64) uint16_t pairs[];  // [turn][2 panels][blocks][16 pairs of inputs][16 outputs][2]
};

// Products of a part that wait for their epilogue. Gates take two steps, one call after the other.
template <Epilogue epilogue>
struct Unfinished {
  const float* totals = nullptr;
  int64_t row = 0, num_rows = 0, panel = 0, num_panels = 0;  // row: of the matrix, the first
  int64_t num_begun = 0, num_done = 0;

  [[gnu::always_inline]] inline void finish_some(const MatmulArgs& args, float* powers, int64_t most) {
    if constexpr (epilogue != Epilogue::gate) {
      const int64_t count = std::min(most, num_rows - num_done);
      finish<epilogue>(args, row + num_done, count, panel, num_panels, totals + num_done * kTotalsStride);
      num_done += count;
      return;
    }
    for (; num_done < num_begun; ++num_done)
      store_gated(args, row + num_done, panel, totals + num_done * kTotalsStride,
                  load(powers + num_done * kPanelColumns));
    for (most = std::min(most, num_rows - num_begun); most > 0; --most, ++num_begun)
      store(powers + num_begun * kPanelColumns, power_of_gate(args.gate, load(totals + num_begun * kTotalsStride)));
  }
  [[gnu::always_inline]] inline void finish_all(const MatmulArgs& args, float* powers) {
    while (num_done < num_rows) finish_some(args, powers, num_rows);
  }
};

// Weights of two panels on their way to pairs, in small steps: four outputs of a block decoded, or four pairs of inputs
// transposed.
template <Encoding encoding>
struct Decoding {
  static constexpr int kStepsOfBlock = 8;
  BlockRows<encoding> block;
  uint16_t* rows;
  const std::byte* data = nullptr;
  uint16_t* pairs = nullptr;
  int64_t num_steps = 0;  // to do
  int step = 0;           // of the block

  [[gnu::always_inline]] inline void decode_some(int64_t most) {
    for (most = std::min(most, num_steps); most > 0; --most, --num_steps) {
      if (step < 4) {
        if (step == 0) block.open(data);
        block.decode(step, rows);
      } else {
        const void* from = BlockRows<encoding>::kDecodes ? static_cast<const void*>(rows) : data;
        transpose_part(step - 4, from, 64, pairs, 64);
      }
      if (++step == kStepsOfBlock) step = 0, data += panel_block_bytes(encoding), pairs += kTileWords;
    }
  }
};

// A part of the rows by two panels.
struct PairStrip {
  const uint16_t* x;  // [kPartRows][x_stride]
  int64_t x_stride;
  const uint16_t* weights[2];
  int64_t num_blocks;
  float* totals;  // [kPartRows][2 panels][16 columns]
};

// Calls between(block) with every block.
template <typename Between>
GW_INLINE void multiply_part(const PairStrip& strip, Between between) {
  const int64_t x_bytes = strip.x_stride * 2;
  constexpr int64_t kTotalsBytes = kTotalsStride * sizeof(float);
  const uint16_t* upper = strip.x;
  const uint16_t* lower = strip.x + kTileHeight * strip.x_stride;
  keep_order();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < strip.num_blocks; ++block) {
    _tile_loadd(4, upper + block * kBlockK, x_bytes);
    _tile_loadd(6, strip.weights[0] + block * kTileWords, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, strip.weights[1] + block * kTileWords, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + block * kBlockK, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    between(block);
  }
  _tile_stored(0, strip.totals, kTotalsBytes);
  _tile_stored(1, strip.totals + kPanelColumns, kTotalsBytes);
  _tile_stored(2, strip.totals + kTileHeight * kTotalsStride, kTotalsBytes);
  _tile_stored(3, strip.totals + kTileHeight * kTotalsStride + kPanelColumns, kTotalsBytes);
}

template <Encoding encoding, Epilogue epilogue>
static void multiply_many(const MatmulArgs& args) {
  const Panels& panels = *args.weights;
  auto& scratch = *reinterpret_cast<ManyScratch*>(args.scratch);
  const int64_t num_blocks = panels.num_blocks();
  const auto pairs_of = [&](int64_t panel) {
    return scratch.pairs + (panel - args.first_panel) / 2 % 2 * 2 * num_blocks * kTileWords;
  };
  const auto decoding_of = [&](int64_t panel) {
    Decoding<encoding> decoding{{scratch.scales}, scratch.rows};
    const int64_t num_panels = std::clamp<int64_t>(args.last_panel - panel, 0, 2);
    if (num_panels > 0) decoding.data = panels.panel(panel), decoding.pairs = pairs_of(panel);
    decoding.num_steps = num_panels * num_blocks * Decoding<encoding>::kStepsOfBlock;
    return decoding;
  };
  configure_tiles(kTileHeight);
  const int64_t most = std::max(kChunkBytesOfMany / (args.x_stride * 2) / kPartRows, int64_t{1}) * kPartRows;
  const int64_t chunk_rows = rounded_up(equal_part(args.num_rows, most), kPartRows);
  const int64_t rows_a_block = kPartRows / std::max<int64_t>(num_blocks - kBlocksOfRest - 1, 1) + 1;
  Unfinished<epilogue> before;
  int turn = 0;
  for (int64_t first = 0; first < args.num_rows; first += chunk_rows) {
    const int64_t last = std::min(first + chunk_rows, args.num_rows);
    const int64_t num_parts = (last - first + kPartRows - 1) / kPartRows;
    // The next two panels are decoded while these are multiplied with all parts.
    const int64_t steps_a_block = (2 * Decoding<encoding>::kStepsOfBlock + num_parts - 1) / num_parts;
    Decoding<encoding> next = decoding_of(args.first_panel);
    next.decode_some(next.num_steps);
    for (int64_t panel = args.first_panel; panel < args.last_panel; panel += 2) {
      next = decoding_of(panel + 2);
      const int64_t num_panels = std::min<int64_t>(2, args.last_panel - panel);
      const uint16_t* pairs = pairs_of(panel);
      PairStrip strip{
          nullptr, args.x_stride, {pairs, pairs + (num_panels - 1) * num_blocks * kTileWords}, num_blocks, nullptr};
      for (int64_t row = first; row < last; row += kPartRows, turn ^= 1) {
        strip.x = static_cast<const uint16_t*>(args.x) + row * args.x_stride;
        strip.totals = scratch.totals[turn];
        multiply_part(strip, [&](int64_t block) {
          if (block >= kBlocksOfRest) before.finish_some(args, scratch.powers, rows_a_block);
          next.decode_some(steps_a_block);
        });
        before.finish_all(args, scratch.powers);
        before = {strip.totals, row, std::min(kPartRows, last - row), panel, num_panels};
      }
      next.decode_some(next.num_steps);
    }
  }
  before.finish_all(args, scratch.powers);
}

static int64_t bf16_scratch_bytes(int64_t num_inputs) {
  const int64_t num_blocks = (num_inputs + kBlockK - 1) / kBlockK;
  const int64_t of_few = static_cast<int64_t>(sizeof(FewScratch)) + kFewRows * num_blocks * kBlockK * 2;
  const int64_t of_many = static_cast<int64_t>(sizeof(ManyScratch)) + 4 * num_blocks * kTileWords * 2;
  return std::max(of_few, of_many);
}

template <Encoding encoding, Epilogue epilogue>
static void multiply_tiles(const MatmulArgs& args) {
  if (args.num_rows > kFewRows) return multiply_many<encoding, epilogue>(args);
  if (args.num_rows > 3 * kTileHeight) return multiply_few<encoding, epilogue, 4>(args);
  if (args.num_rows > 2 * kTileHeight) return multiply_few<encoding, epilogue, 3>(args);
  if (args.num_rows > kTileHeight) return multiply_few<encoding, epilogue, 2>(args);
  return multiply_few<encoding, epilogue, 1>(args);
}

// Every call loads the configuration, since what a thread's tiles hold may be gone; and releases the tiles, since tiles
// in use make every change of threads dearer.
static void multiply_bf16(const MatmulArgs& args) {
  with_encoding(args.weights->encoding, [&](auto encoding) {
    if constexpr (encoding != Encoding::f32)
      with_epilogue(args.epilogue, [&](auto epilogue) { multiply_tiles<encoding, epilogue>(args); });
  });
  _tile_release();
}

}  // namespace giveway::GW_SET

#endif
