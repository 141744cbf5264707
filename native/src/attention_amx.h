// The products of attention in AMX tiles: one instruction makes a block of products in the very order that attention's
// other products keep. Included by kernels_amx.cpp only.
#pragma once

#include <algorithm>

#include "attention_products.h"
#include "matmul_amx.h"

namespace giveway::GW_SET {

// Shapes of the tile registers for up to 16 query rows: 0 to 3 are sums of 16 lanes; 4 and 5 are rows and panel of a
// block of 32 inputs, 6 and 7 of one of 16.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
  uint8_t rows[16] = {};

  constexpr explicit TileShapes(uint8_t n) : rows{n, n, n, n, n, 16, n, 8} {}
};

static void shape_tiles(int64_t num_rows) {
  // In read-only memory: the compiler takes it that the instruction reads 8 bytes of the 64, and might not store the
  // others.
  static constexpr TileShapes shapes[kRowsTogether] = {TileShapes(1),  TileShapes(2),  TileShapes(3),  TileShapes(4),
                                                       TileShapes(5),  TileShapes(6),  TileShapes(7),  TileShapes(8),
                                                       TileShapes(9),  TileShapes(10), TileShapes(11), TileShapes(12),
                                                       TileShapes(13), TileShapes(14), TileShapes(15), TileShapes(16)};
  _tile_loadconfig(&shapes[std::min(num_rows, kRowsTogether) - 1]);
}

// Asks for lines of the next piece: where the next block is, the processor cannot guess.
GW_INLINE void fetch_lines(const std::byte* at, int64_t stride, int count) {
#pragma GCC unroll 16
  for (int line = 0; line < count; ++line) __builtin_prefetch(at + line * stride, 0, 3);
}

template <bool fetches>
static void score_sixteen(const QueryTile<Compute::bf16>& tile, int64_t row, const Piece& piece) {
  const int64_t query_bytes = tile.head_size * 2;
  const auto* queries = reinterpret_cast<const std::byte*>(tile.queries) + row * query_bytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int64_t block = 0;
  for (; (block + 1) * kBlockK <= tile.head_size; ++block) {
    const int64_t at = block * panel_block_bytes(Encoding::bf16);
    _tile_loadd(4, queries + block * 64, query_bytes);
    if (piece.keys[0] != nullptr) {
      _tile_loadd(5, piece.keys[0] + at, 64);
      _tile_dpbf16ps(0, 4, 5);
      if (fetches) fetch_lines(piece.keys[0] + piece.ahead[0] + at, 64, 16);
    }
    if (piece.keys[1] != nullptr) {
      _tile_loadd(5, piece.keys[1] + at, 64);
      _tile_dpbf16ps(1, 4, 5);
      if (fetches) fetch_lines(piece.keys[1] + piece.ahead[1] + at, 64, 16);
    }
    if (piece.keys[2] != nullptr) {
      _tile_loadd(5, piece.keys[2] + at, 64);
      _tile_dpbf16ps(2, 4, 5);
      if (fetches) fetch_lines(piece.keys[2] + piece.ahead[2] + at, 64, 16);
    }
    if (piece.keys[3] != nullptr) {
      _tile_loadd(5, piece.keys[3] + at, 64);
      _tile_dpbf16ps(3, 4, 5);
      if (fetches) fetch_lines(piece.keys[3] + piece.ahead[3] + at, 64, 16);
    }
  }
  if (block * kBlockK < tile.head_size) {
    const int64_t at = block * panel_block_bytes(Encoding::bf16);
    _tile_loadd(6, queries + block * 64, query_bytes);
    if (piece.keys[0] != nullptr) {
      _tile_loadd(7, piece.keys[0] + at, 64);
      _tile_dpbf16ps(0, 6, 7);
    }
    if (piece.keys[1] != nullptr) {
      _tile_loadd(7, piece.keys[1] + at, 64);
      _tile_dpbf16ps(1, 6, 7);
    }
    if (piece.keys[2] != nullptr) {
      _tile_loadd(7, piece.keys[2] + at, 64);
      _tile_dpbf16ps(2, 6, 7);
    }
    if (piece.keys[3] != nullptr) {
      _tile_loadd(7, piece.keys[3] + at, 64);
      _tile_dpbf16ps(3, 6, 7);
    }
  }
  constexpr int64_t row_bytes = kPieceTokens * sizeof(float);
  float* scores = tile.scores + row * kPieceTokens;
  _tile_stored(0, scores, row_bytes);
  _tile_stored(1, scores + kKvPanel, row_bytes);
  _tile_stored(2, scores + 2 * kKvPanel, row_bytes);
  _tile_stored(3, scores + 3 * kKvPanel, row_bytes);
}

// Adds the weighted values of dimensions `d` to `d + 63`, or to the end of the head, for sixteen rows.
template <bool fetches>
static void add_sixteen(const QueryTile<Compute::bf16>& tile, int64_t row, int64_t d, const Piece& piece) {
  const int64_t row_bytes = tile.head_size * 4, count = (tile.head_size - d) / kLanes;
  float* out = tile.out + row * tile.head_size + d;
  _tile_loadd(0, out, row_bytes);
  if (count > 1) _tile_loadd(1, out + kLanes, row_bytes);
  if (count > 2) _tile_loadd(2, out + 2 * kLanes, row_bytes);
  if (count > 3) _tile_loadd(3, out + 3 * kLanes, row_bytes);
  for (int panel = 0; panel < kPiecePanels; ++panel) {
    if (piece.keys[panel] == nullptr) continue;
    const std::byte* values = piece.values[panel] + d * 4;
    if (fetches) {
      for (int64_t part = 0; part < std::min<int64_t>(count, 4); ++part)
        fetch_lines(values + piece.ahead[panel] + part * 64, row_bytes, 8);
    }
    _tile_loadd(6, tile.weights + row * kPieceTokens + panel * kKvPanel, kPieceTokens * 2);
    _tile_loadd(7, values, row_bytes);
    _tile_dpbf16ps(0, 6, 7);
    if (count > 1) {
      _tile_loadd(7, values + 64, row_bytes);
      _tile_dpbf16ps(1, 6, 7);
    }
    if (count > 2) {
      _tile_loadd(7, values + 128, row_bytes);
      _tile_dpbf16ps(2, 6, 7);
    }
    if (count > 3) {
      _tile_loadd(7, values + 192, row_bytes);
      _tile_dpbf16ps(3, 6, 7);
    }
  }
  _tile_stored(0, out, row_bytes);
  if (count > 1) _tile_stored(1, out + kLanes, row_bytes);
  if (count > 2) _tile_stored(2, out + 2 * kLanes, row_bytes);
  if (count > 3) _tile_stored(3, out + 3 * kLanes, row_bytes);
}

// The compiler does not know that tile loads read memory: whatever was stored must be there before the first.
template <>
void score_piece<Compute::bf16>(const QueryTile<Compute::bf16>& tile, const Piece& piece) {
  keep_order();
  const RowRange rows = rows_touched(piece.rows);
  for (int64_t row = rows.begin; row < rows.end; row += kRowsTogether)
    row == rows.begin ? score_sixteen<true>(tile, row, piece) : score_sixteen<false>(tile, row, piece);
}

template <>
void add_piece<Compute::bf16>(const QueryTile<Compute::bf16>& tile, const Piece& piece) {
  keep_order();
  const RowRange rows = rows_touched(piece.rows);
  for (int64_t row = rows.begin; row < rows.end; row += kRowsTogether)
    for (int64_t d = 0; d < tile.head_size; d += 4 * kLanes)
      row == rows.begin ? add_sixteen<true>(tile, row, d, piece) : add_sixteen<false>(tile, row, d, piece);
}

}  // namespace giveway::GW_SET
