// A tile of query rows and what is done to them one by one: where they lie, which positions they see, softmax. Included
// by kernels_*.cpp only.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "attention_products.h"

namespace giveway::GW_SET {

inline constexpr int64_t kQueryTileRows = 48;  // query rows that share what is loaded of keys and values
inline constexpr float kUnseen = -3.0e38f;     // a score that no position has

constexpr int64_t tile_tokens(int64_t group_size) {
  return group_size >= kQueryTileRows ? 1 : kQueryTileRows / group_size;
}

// Hands out scratch memory in whole cache lines; without memory it only counts.
struct Scratch {
  std::byte* memory;
  int64_t used = 0;

  template <typename T>
  T* take(int64_t count) {
    const int64_t at = used;
    used += rounded_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + at);
  }
};

// A tile of `num_tokens` tokens without contents.
template <Compute compute>
static QueryTile<compute> lay_out(Scratch& scratch, int64_t num_tokens, int64_t group_size, int64_t head_size) {
  QueryTile<compute> tile{};
  tile.num_rows = num_tokens * group_size;
  tile.group_size = group_size;
  tile.head_size = head_size;
  const int64_t num_rows = tile.num_rows + kRowsBeyond;
  tile.queries = scratch.take<Operand<compute>>(num_rows * head_size);
  tile.scores = scratch.take<float>(num_rows * kScoreStride);
  tile.weights = scratch.take<Operand<compute>>(num_rows * kScoreStride);
  tile.out = scratch.take<float>(num_rows * tile.out_stride());
  tile.largest = scratch.take<float>(tile.num_rows + kLanes);
  tile.sums = scratch.take<float>(tile.num_rows * kLanes);
  return tile;
}

// Room for one large tile, or for small ones of several heads.
static int64_t attention_scratch_bytes(const KvLayout& layout, int64_t group_size) {
  Scratch large{nullptr}, small{nullptr};
  lay_out<Compute::f32>(large, tile_tokens(group_size), group_size, layout.head_size);  // bf16 takes no more
  for (int64_t num_tokens = 1; heads_together(num_tokens, group_size, layout.num_kv_heads) > 1; ++num_tokens) {
    small.used = 0;
    for (int64_t head = 0; head < heads_together(num_tokens, group_size, layout.num_kv_heads); ++head)
      lay_out<Compute::f32>(small, num_tokens, group_size, layout.head_size);
    large.used = std::max(large.used, small.used);
  }
  return large.used;
}

// soft_cap * tanh(score / soft_cap), by tanh x = 1 - 2 / (e^2x + 1).
GW_INLINE v16 capped(v16 score, v16 soft_cap) {
  const v16 x = div(score, soft_cap), two = broadcast(2.0f), one = broadcast(1.0f);
  return mul(soft_cap, sub(one, div(two, add(exp(mul(two, x)), one))));
}

// `values` in lanes [first, last) of the panel that begins at lane `panel * 16`, `others` elsewhere.
GW_INLINE v16 seen_lanes(int64_t first, int64_t last, int panel, v16 values, v16 others) {
  const auto within = [&](int64_t lane) {
    const int64_t count = lane - panel * kLanes;
    return static_cast<int>(count < 0 ? 0 : count > kLanes ? kLanes : count);
  };
  return first_lanes(within(first), others, first_lanes(within(last), values, others));
}

// Weights of values of two panels, as the product takes them.
template <Compute compute>
GW_INLINE void store_weights(Operand<compute>* at, v16 first, v16 second) {
  if constexpr (std::is_same_v<Operand<compute>, uint16_t>) {
    store_rounded(at, first, second);
  } else {
    store(at, compute == Compute::bf16 ? round_bf16(first) : first);
    store(at + kLanes, compute == Compute::bf16 ? round_bf16(second) : second);
  }
}

// Turns scores of a piece into weights of its values and corrects what the rows have gathered: `count` rows, up to
// sixteen, from `begin` on. Together, because a row by itself would wait for its largest score. sees_all: every row
// sees every position of the piece.
template <Compute compute, bool sees_all>
static void weigh_sixteen(const QueryTile<compute>& tile, const AttentionArgs& args, const Piece& piece, int64_t begin,
                          int64_t count) {
  const auto with_seen = [&](int64_t row, int panel, v16 values, float others) {
    const int64_t last = tile.position(row) - piece.start + 1;
    return seen_lanes(args.window > 0 ? last - args.window : 0, last, panel, values, broadcast(others));
  };
  v16 largest_lanes[kLanes];
  for (int64_t index = 0; index < count; ++index) {
    float* scores = tile.scores + (begin + index) * kScoreStride;
    v16 largest = broadcast(kUnseen);
#pragma GCC unroll 4
    for (int panel = 0; panel < kPiecePanels; ++panel) {
      v16 score = load(scores + panel * kLanes);
      if (args.soft_cap > 0.0f) score = capped(mul(score, broadcast(args.scale)), broadcast(args.soft_cap));
      if (!sees_all) score = with_seen(begin + index, panel, score, kUnseen);
      if (!sees_all || args.soft_cap > 0.0f) store(scores + panel * kLanes, score);
      largest = max(largest, score);
    }
    largest_lanes[index] = largest;
  }
  for (int64_t index = count; index < kLanes; ++index) largest_lanes[index] = broadcast(kUnseen);
  // Weights are powers of 2, not of e; the largest score is taken away first, so that its weight is exactly 1.
  constexpr int kTerms = compute == Compute::bf16 ? 3 : 5;  // weights that are rounded to 8 bits need no more
  const float scale = (args.soft_cap > 0.0f ? 1.0f : args.scale) * 1.44269504f;
  const v16 exponent = broadcast(scale), least = broadcast(kLeastPower / scale);
  const v16 before = load(tile.largest + begin), now = max(largest_of_sixteen(largest_lanes), before);
  if (uint32_t rows = greater(now, before); rows != 0) {
    float corrections[kLanes];
    store(corrections, power_of_2<kTerms>(sub(before, now), exponent, least));
    store(tile.largest + begin, now);
    for (; rows != 0; rows &= rows - 1) {
      const int index = __builtin_ctz(rows);
      const v16 correction = broadcast(corrections[index]);
      float* sums = tile.sums + (begin + index) * kLanes;
      store(sums, mul(load(sums), correction));
      float* out = tile.out + (begin + index) * tile.out_stride();
      for (int64_t d = 0; d < tile.head_size; d += kLanes) store(out + d, mul(load(out + d), correction));
    }
  }
  for (int64_t row = begin; row < begin + count; ++row) {
    const float* scores = tile.scores + row * kScoreStride;
    const v16 largest = broadcast(tile.largest[row]);
    v16 sums = load(tile.sums + row * kLanes);
    const auto weight_of = [&](int panel) {
      const v16 weight = power_of_2<kTerms>(sub(load(scores + panel * kLanes), largest), exponent, least);
      return sees_all ? weight : with_seen(row, panel, weight, 0.0f);
    };
#pragma GCC unroll 2
    for (int panel = 0; panel < kPiecePanels; panel += 2) {
      const v16 first = weight_of(panel), second = weight_of(panel + 1);
      sums = add(add(sums, first), second);
      store_weights<compute>(tile.weights + row * kScoreStride + panel * kLanes, first, second);
    }
    store(tile.sums + row * kLanes, sums);
  }
}

// Start of a head's keys of the panel that holds a position; its values lie half_bytes() further.
static const std::byte* panel_at(const AttentionArgs& args, const int32_t* table, int64_t kv_head, int64_t position) {
  const KvLayout& layout = args.layout;
  const int64_t block = table[position / layout.block_size];
#if defined(GIVEWAY_CHECK_BLOCKS)
  if (block < 0 || block >= args.num_pool_blocks) {
    std::fprintf(stderr, "attention: block id %lld of position %lld is not within a pool of %lld blocks\n",
                 static_cast<long long>(block), static_cast<long long>(position),
                 static_cast<long long>(args.num_pool_blocks));
    std::abort();
  }
#endif
  return args.pool + block * layout.block_bytes() + layout.key_offset(args.layer, kv_head) +
         position % layout.block_size / kKvPanel * layout.panel_bytes();
}

// Rows of the tile that see any of the positions from `first` to `last`.
template <Compute compute>
static RowRange rows_that_see(const QueryTile<compute>& tile, int64_t window, int64_t first, int64_t last) {
  const int64_t earliest = first - tile.first_token;  // token, counted from the tile's first
  const int64_t begin = earliest > 0 ? earliest : 0;
  int64_t end = tile.num_tokens();
  if (window > 0 && last + window - tile.first_token < end) end = last + window - tile.first_token;
  return {begin * tile.group_size, (end > begin ? end : begin) * tile.group_size};
}

// Where the keys lie that are attended to after a panel that begins at position `first`: those of the call's next head,
// of its next piece, or of the call after it. Null: there are none, or nobody knows. last: position of the tile.
template <Compute compute>
static const std::byte* next_keys(const QueryTile<compute>& tile, const AttentionArgs& args, int64_t first,
                                  int64_t last) {
  const int64_t next_piece = first - first % kPieceTokens + kPieceTokens;
  if (tile.kv_head + 1 < args.kv_head + args.num_kv_heads)
    return first <= last ? panel_at(args, args.table, tile.kv_head + 1, first) : nullptr;
  if (next_piece <= last)
    return first + kPieceTokens <= last ? panel_at(args, args.table, args.kv_head, first + kPieceTokens) : nullptr;
  const int64_t of_next_call = args.next.first + first % kPieceTokens;
  if (args.next.table == nullptr || of_next_call > args.next.last) return nullptr;
  return panel_at(args, args.next.table, args.next.kv_head, of_next_call);
}

template <Compute compute>
static Piece find_piece(const QueryTile<compute>& tile, const AttentionArgs& args, int64_t number) {
  Piece piece{};
  piece.start = number * kPieceTokens;
  piece.to_values = args.layout.half_bytes();
  const int64_t last = tile.first_token + tile.num_tokens() - 1;
  piece.rows = rows_that_see(tile, args.window, piece.start, piece.start + kPieceTokens - 1);
  for (int panel = 0; panel < kPiecePanels; ++panel) {
    const int64_t first = piece.start + panel * kKvPanel;
    piece.next[panel] = next_keys(tile, args, first, last);
    const RowRange rows = rows_that_see(tile, args.window, first, first + kKvPanel - 1);
    if (rows.begin == rows.end) continue;
    if (piece.end == 0) piece.begin = panel;
    piece.end = panel + 1;
    piece.keys[panel] = panel_at(args, args.table, tile.kv_head, first);
    piece.values[panel] = piece.keys[panel] + piece.to_values;
  }
  for (int panel = 0; panel < kPiecePanels; ++panel)
    if (piece.next[panel] == nullptr)
      piece.next[panel] = piece.keys[std::max(piece.begin, std::min(panel, piece.end - 1))];
  return piece;
}

// Weighs the positions of a piece for rows [begin, end) of the tile.
template <Compute compute>
static void weigh_rows(const QueryTile<compute>& tile, const AttentionArgs& args, const Piece& piece, int64_t begin,
                       int64_t end) {
  for (; begin < end; begin += kLanes) {
    const int64_t count = std::min<int64_t>(end - begin, kLanes);
    const int64_t last = piece.start + kPieceTokens - 1;
    const bool sees_all = tile.position(begin) >= last &&
                          (args.window == 0 || tile.position(begin + count - 1) - args.window < piece.start);
    if (sees_all) {
      weigh_sixteen<compute, true>(tile, args, piece, begin, count);
    } else {
      weigh_sixteen<compute, false>(tile, args, piece, begin, count);
    }
  }
}

}  // namespace giveway::GW_SET
