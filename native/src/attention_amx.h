// Attention in AMX tiles: one instruction makes a block of products in the very order that attention's other products
// keep. Included by kernels_amx.cpp only.
//
// Scoring, weighing and adding follow each other, sixteen rows at a time. While tiles multiply, only one of the two
// units for floating point is free, so that softmax in between would take twice as long.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_rows.h"
#include "matmul_amx.h"

namespace giveway::GW_SET {

inline constexpr int64_t kGroupRows = 16;

// Shapes of the tile registers for groups of up to 16 query rows: 0 to 3 are sums of 16 lanes; 4 and 5 are rows and
// panel of a block of 32 inputs, 6 and 7 of one of 16.
GW_INLINE void shape_tiles(int64_t num_rows) {
  TileConfiguration configuration;
  const auto height = static_cast<uint8_t>(std::min(num_rows, kGroupRows));
  for (int tile : {0, 1, 2, 3, 4, 6}) configuration.rows[tile] = height;
  configuration.row_bytes[6] = 32;
  configuration.rows[7] = 8;
  load_configuration(configuration);
}

// Asks for `count` lines of each panel that comes next: where the next block is, the processor cannot guess. A line of
// each panel in turn, since memory gives several blocks at once faster than one after the other. A single group needs
// them soon; several share what is in the second cache.
template <bool soon, int count>
GW_INLINE void fetch_lines(const Piece& piece, int64_t offset, int64_t stride) {
#pragma GCC unroll 4
  for (int line = 0; line < count; ++line)
#pragma GCC unroll 4
    for (int panel = 0; panel < kPiecePanels; ++panel)
      __builtin_prefetch(piece.next[panel] + offset + line * stride, 0, soon ? 3 : 2);
}

// The four tiles of sums by number: intrinsics take literals only.
#define GW_FOR_TILE(number, operation) \
  if constexpr (number == 0) {         \
    operation(0);                      \
  } else if constexpr (number == 1) {  \
    operation(1);                      \
  } else if constexpr (number == 2) {  \
    operation(2);                      \
  } else {                             \
    operation(3);                      \
  }
template <int number>
GW_INLINE void clear_tile() {
#define GW_CLEAR(tile) _tile_zero(tile)
  GW_FOR_TILE(number, GW_CLEAR)
}
template <int number>
GW_INLINE void load_tile(const float* at, int64_t row_bytes) {
#define GW_LOAD(tile) _tile_loadd(tile, at, row_bytes)
  GW_FOR_TILE(number, GW_LOAD)
}
template <int number>
GW_INLINE void store_tile(float* at, int64_t row_bytes) {
#define GW_STORE(tile) _tile_stored(tile, at, row_bytes)
  GW_FOR_TILE(number, GW_STORE)
}
template <int number>
GW_INLINE void add_block_of_32() {  // tile 4 by tile 5
#define GW_MULTIPLY(tile) _tile_dpbf16ps(tile, 4, 5)
  GW_FOR_TILE(number, GW_MULTIPLY)
}
template <int number>
GW_INLINE void add_block_of_16() {  // tile 6 by tile 7
#define GW_MULTIPLY_HALF(tile) _tile_dpbf16ps(tile, 6, 7)
  GW_FOR_TILE(number, GW_MULTIPLY_HALF)
}

// Scores of a group of rows. Those of a panel that nobody sees are never read.
template <bool fetches, bool soon>
static void score_group(const QueryTile<Compute::bf16>& group, const Piece& piece) {
  const int64_t query_bytes = group.head_size * 2;
  const auto* queries = reinterpret_cast<const std::byte*>(group.queries);
  for_four([](auto panel) { clear_tile<panel>(); });
  for (int64_t d = 0; d < group.head_size; d += kBlockK) {
    const int64_t at = d * kKvPanel * 2;
    const bool is_whole = d + kBlockK <= group.head_size;
    if (is_whole) {
      _tile_loadd(4, queries + d * 2, query_bytes);
    } else {
      _tile_loadd(6, queries + d * 2, query_bytes);
    }
    for_four([&](auto panel) {
      if (fetches && is_whole) fetch_lines<soon, 4>(piece, at + panel * 256, 64);
      if (fetches && !is_whole) fetch_lines<soon, 2>(piece, at + panel * 128, 64);
      const std::byte* keys = piece.keys[panel];
      if (keys == nullptr) return;
      if (is_whole) {
        _tile_loadd(5, keys + at, 64);
        add_block_of_32<panel>();
      } else {
        _tile_loadd(7, keys + at, 64);
        add_block_of_16<panel>();
      }
    });
  }
  for_four([&](auto panel) { store_tile<panel>(group.scores + panel * kKvPanel, kScoreStride * 4); });
}

// Adds the weighted values of up to 64 dimensions, from `d` on, for a group of rows.
template <bool fetches, bool soon>
static void add_group(const QueryTile<Compute::bf16>& group, const Piece& piece, int64_t d) {
  const int64_t values_bytes = group.head_size * 4, out_bytes = group.out_stride() * 4;
  const int64_t count = (group.head_size - d) / kLanes;
  float* out = group.out + d;
  for_four([&](auto part) {
    if (part < count) load_tile<part>(out + part * kLanes, out_bytes);
  });
  for (int panel = 0; panel < kPiecePanels; ++panel) {
    const bool is_seen = panel >= piece.begin && panel < piece.end;
    const std::byte* values = piece.values[panel] + d * 4;
    if (is_seen) _tile_loadd(6, group.weights + panel * kKvPanel, kScoreStride * 2);
    for_four([&](auto part) {
      if (part >= count) return;
      if (fetches)  // two of the eight pairs of positions
        fetch_lines<soon, 2>(piece, piece.to_values + 2 * panel * values_bytes + d * 4 + part * 64, values_bytes);
      if (!is_seen) return;
      _tile_loadd(7, values + part * 64, values_bytes);
      add_block_of_16<part>();
    });
  }
  for_four([&](auto part) {
    if (part < count) store_tile<part>(out + part * kLanes, out_bytes);
  });
}

// Rows `first` to `first + 15` of a tile, or what there is of them. Scores and weights are in use only for one group at
// a time, and all groups share their place: it stays in the first cache.
GW_INLINE QueryTile<Compute::bf16> group_of(const QueryTile<Compute::bf16>& tile, int64_t first) {
  QueryTile<Compute::bf16> group = tile;
  group.num_rows = std::min(kGroupRows, tile.num_rows - first);
  group.rows_before = first;
  group.queries += first * tile.head_size;
  group.out += first * tile.out_stride();
  group.largest += first;
  group.sums += first * kLanes;
  return group;
}

template <bool fetches, bool soon>
static void attend_group(const QueryTile<Compute::bf16>& group, const AttentionArgs& args, const Piece& piece) {
  keep_order();
  score_group<fetches, soon>(group, piece);
  weigh_rows(group, args, piece, 0, group.num_rows);
  keep_order();
  for (int64_t d = 0; d < group.head_size; d += 4 * kLanes) add_group<fetches, soon>(group, piece, d);
}

static void attend_piece(const QueryTile<Compute::bf16>& tile, const AttentionArgs& args, const Piece& piece) {
  if (tile.num_rows <= kGroupRows) return attend_group<true, true>(tile, args, piece);
  attend_group<true, false>(group_of(tile, 0), args, piece);
  for (int64_t row = kGroupRows; row < tile.num_rows; row += kGroupRows)
    attend_group<false, false>(group_of(tile, row), args, piece);
}

}  // namespace giveway::GW_SET
