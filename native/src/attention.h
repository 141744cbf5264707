// Attention over the paged KV cache. Included by kernels_*.cpp only.
//
// What defines a row (one query head of one token): positions are taken in pieces of kPieceTokens from position 0 on.
// In a piece the scores are a product over the head in block order (kernels.h), times the scale, capped if asked; what
// the query does not see is masked by selection, never by arithmetic, since stale memory may hold NaN. Softmax is the
// online form in float32: per piece one correction of what is there, then the values of the piece's panels of 16
// positions are added, each panel as one sum of even and one of odd positions. A piece or a panel that a row does not
// see changes nothing of it (unless its values are no finite numbers: they are multiplied by zero), so it is of no
// matter which rows share a tile. Source: online softmax (Milakov and
// Gimelshein, 2018); tiles as in FlashAttention (Dao et al., 2022).
#pragma once

#include <algorithm>

#include "attention_rows.h"
#if defined(__AMX_BF16__)
#include "attention_amx.h"
#endif

namespace giveway::GW_SET {

template <Compute compute>
static void attend_piece(const QueryTile<compute>& tile, const AttentionArgs& args, const Piece& piece) {
  score_piece(tile, piece);
  weigh_rows(tile, args, piece, piece.rows.begin, piece.rows.end);
  add_piece(tile, piece);
}

// Copies the tile's queries and clears what its rows gather. first_row: of the tile, among the rows of the call.
template <Compute compute>
static QueryTile<compute> open_tile(const AttentionArgs& args, int64_t kv_head, int64_t first_row, int64_t num_tokens,
                                    Scratch& scratch) {
  QueryTile<compute> tile = lay_out<compute>(scratch, num_tokens, args.group_size, args.layout.head_size);
  tile.first_token = args.start + first_row;
  tile.kv_head = kv_head;
  const int64_t width = args.group_size * args.layout.head_size;  // of the group's heads in one row
  const auto* queries =
      static_cast<const Operand<compute>*>(args.queries) + (args.first_row + first_row) * args.query_stride;
  for (int64_t token = 0; token < num_tokens; ++token)
    std::memcpy(tile.queries + token * width, queries + token * args.query_stride + kv_head * width,
                static_cast<size_t>(width) * sizeof(Operand<compute>));
  std::memset(tile.out, 0, static_cast<size_t>(tile.num_rows * tile.out_stride()) * sizeof(float));
  for (int64_t row = 0; row < tile.num_rows; ++row) tile.largest[row] = kUnseen;
  std::memset(tile.sums, 0, static_cast<size_t>(tile.num_rows * kLanes) * sizeof(float));
  return tile;
}

// Divides by the sums and writes the result. Adding zero makes -0, which a panel that is not seen can turn into +0,
// always +0.
template <Compute compute>
static void close_tile(const QueryTile<compute>& tile, const AttentionArgs& args, int64_t first_row) {
  const int64_t size = tile.head_size, group = tile.group_size;
  auto* rows = static_cast<Operand<compute>*>(args.out) + (args.first_row + first_row) * args.out_stride;
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    auto* target = rows + row / group * args.out_stride;
    const int64_t first = (tile.kv_head * group + row % group) * size;
    const v16 sum = broadcast(sum_of_lanes(load(tile.sums + row * kLanes)));
    for (int64_t d = 0; d < size; d += kLanes)
      store_activations(target, first + d, compute,
                        add(div(load(tile.out + row * tile.out_stride() + d), sum), zero()));
    const bool is_last = tile.kv_head + 1 == args.layout.num_kv_heads && row % group + 1 == group;
    if (is_last) pad_activations(target, first + size, compute);
  }
}

template <Compute compute>
static void attend(const AttentionArgs& args) {
  const int64_t step = tile_tokens(args.group_size);
  for (int64_t row = 0; row < args.num_rows; row += step) {
    const int64_t num_tokens = std::min(step, args.num_rows - row);
    QueryTile<compute> tiles[kMostHeadsTogether];
    Scratch scratch{args.scratch};
    for (int64_t head = 0; head < args.num_kv_heads; ++head)
      tiles[head] = open_tile<compute>(args, args.kv_head + head, row, num_tokens, scratch);
#if defined(__AMX_BF16__)
    if constexpr (compute == Compute::bf16) shape_tiles(tiles[0].num_rows);
#endif
    const int64_t first_token = args.start + row, last_token = first_token + num_tokens - 1;
    for (int64_t number = first_piece(first_token, args.window); number <= last_token / kPieceTokens; ++number)
      for (int64_t head = 0; head < args.num_kv_heads; ++head)
        attend_piece(tiles[head], args, find_piece(tiles[head], args, number));
    for (int64_t head = 0; head < args.num_kv_heads; ++head) close_tile(tiles[head], args, row);
  }
}

static void attention(const AttentionArgs& args) {
  if (args.layout.compute == Compute::f32) return attend<Compute::f32>(args);
  attend<Compute::bf16>(args);
#if defined(__AMX_BF16__)
  _tile_release();  // tiles in use make every change of threads dearer
#endif
}

}  // namespace giveway::GW_SET
