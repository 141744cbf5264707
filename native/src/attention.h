// Attention over the paged KV cache. Included by kernels_*.cpp only.
//
// What defines a row (one query head of one token): positions are taken in pieces of kPieceTokens from position 0 on. In a
// piece the scores are a product over the head in block order (kernels.h), times the scale, capped if asked; what the query
// does not see is masked by selection, never by arithmetic, since stale memory may hold NaN. Softmax is the online form in
// float32: per piece one correction of what is there, then the values of the piece's panels of 16 positions are added, each
// panel as one sum of even and one of odd positions. A piece or a panel that a row does not see changes nothing of it, so it
// is of no matter which rows share a tile.
// Source: online softmax (Milakov and Gimelshein, 2018); tiles as in FlashAttention (Dao et al., 2022).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "activations.h"
#include "kernels.h"

namespace giveway::GW_SET {

inline constexpr int64_t kQueryTileRows = 48;       // query rows that share what is loaded of keys and values
inline constexpr int kPiecePanels = kPieceTokens / kKvPanel;
inline constexpr float kUnseen = -3.0e38f;     // a score that no position has

// Rows of one tile: token by token, the heads of the group within a token.
struct AttentionTile {
  int64_t num_rows, group_size, head_size;
  int64_t first_token;  // position of its first token
  float* queries;       // [rows][head size]
  float* scores;        // [rows][kPieceTokens], later the weights of the values
  float* out;           // [rows][head size], not yet divided
  float* largest;       // [rows] score so far
  float* sums;          // [rows] of the weights so far

  int64_t position(int64_t row) const { return first_token + row / group_size; }
  int64_t num_tokens() const { return num_rows / group_size; }
};

constexpr int64_t tile_tokens(int64_t group_size) { return group_size >= kQueryTileRows ? 1 : kQueryTileRows / group_size; }

static int64_t attention_scratch_bytes(const KvLayout& layout, int64_t group_size) {
  const int64_t num_rows = tile_tokens(group_size) * group_size;
  const int64_t floats = num_rows * (2 * layout.head_size + kPieceTokens) + 2 * (num_rows + kLanes);
  return floats * static_cast<int64_t>(sizeof(float));
}

// Walks through the pairs of inputs of a panel of keys (inputs: dimensions, lanes: positions) or of values (positions,
// dimensions).
template <Compute compute>
struct PairsOfPanel {
  const std::byte* at;
  int64_t pair_bytes, odd_bytes;  // to the next pair; float32 only: from the even to the odd input

  GW_INLINE PairsOfPanel keys(const std::byte* panel) {
    constexpr int64_t row = kKvPanel * 4;  // one dimension as float32, or a pair as bfloat16
    return {panel, compute == Compute::f32 ? 2 * row : row, row};
  }
  GW_INLINE PairsOfPanel values(const std::byte* panel, int64_t head_size, int64_t first_dimension) {
    const int64_t row = head_size * 4;
    return {panel + first_dimension * 4, compute == Compute::f32 ? 2 * row : row, row};
  }
  [[gnu::always_inline]] inline v16 even() const {
    if constexpr (compute == Compute::bf16) return load_bf16_pairs(reinterpret_cast<const uint16_t*>(at)).even;
    return load(reinterpret_cast<const float*>(at));
  }
  [[gnu::always_inline]] inline v16 odd() const {
    if constexpr (compute == Compute::bf16) return load_bf16_pairs(reinterpret_cast<const uint16_t*>(at)).odd;
    return load(reinterpret_cast<const float*>(at + odd_bytes));
  }
};

// Keeps the compiler from loading what comes after before what comes before is done: with the lanes of both halves of a
// pair at once, AVX2 has too few registers for the sums of three rows.
GW_INLINE void loads_stay_here() { __asm__ volatile("" ::: "memory"); }

// One block of products of `rows` rows: total + (even + odd).
template <int rows, int num_pairs, Compute compute>
GW_INLINE void add_block(const float* x, int64_t x_stride, PairsOfPanel<compute> panel, v16 (&totals)[rows]) {
  v16 even[rows], odd[rows];
  for (int row = 0; row < rows; ++row) even[row] = odd[row] = zero();
  for (int pair = 0; pair < num_pairs; ++pair) {
    v16 lanes = panel.even();
    for (int row = 0; row < rows; ++row) even[row] = fma(broadcast(x[row * x_stride + 2 * pair]), lanes, even[row]);
    loads_stay_here();
    lanes = panel.odd();
    for (int row = 0; row < rows; ++row) odd[row] = fma(broadcast(x[row * x_stride + 2 * pair + 1]), lanes, odd[row]);
    loads_stay_here();
    panel.at += panel.pair_bytes;
  }
  for (int row = 0; row < rows; ++row) totals[row] = add(totals[row], add(even[row], odd[row]));
}

// Scores, not yet scaled, of `rows` rows and the 16 positions of a panel of keys.
template <int rows, Compute compute>
GW_INLINE void score_panel(const AttentionTile& tile, int64_t row, const std::byte* keys, float* scores) {
  v16 totals[rows];
  for (v16& total : totals) total = zero();
  auto panel = PairsOfPanel<compute>::keys(keys);
  const float* queries = tile.queries + row * tile.head_size;
  int64_t d = 0;
  for (; d + kBlockK <= tile.head_size; d += kBlockK, panel.at += kBlockK / 2 * panel.pair_bytes)
    add_block<rows, kBlockK / 2>(queries + d, tile.head_size, panel, totals);
  if (d < tile.head_size) add_block<rows, kBlockK / 4>(queries + d, tile.head_size, panel, totals);
  for (int i = 0; i < rows; ++i) store(scores + (row + i) * kPieceTokens, totals[i]);
}

// Adds the values of the 16 positions of a panel, weighted, to `rows` rows.
template <int rows, Compute compute>
GW_INLINE void add_values(const AttentionTile& tile, int64_t row, const float* weights, const std::byte* values) {
  float* out = tile.out + row * tile.head_size;
  for (int64_t d = 0; d < tile.head_size; d += kLanes) {
    v16 totals[rows];
    for (int i = 0; i < rows; ++i) totals[i] = load(out + i * tile.head_size + d);
    const auto panel = PairsOfPanel<compute>::values(values, tile.head_size, d);
    add_block<rows, kKvPanel / 2>(weights + row * kPieceTokens, kPieceTokens, panel, totals);
    for (int i = 0; i < rows; ++i) store(out + i * tile.head_size + d, totals[i]);
  }
}

struct RowRange {
  int64_t begin, end;
};

// Rows of the tile that see any of the positions from `first` to `last`.
static RowRange rows_that_see(const AttentionTile& tile, int64_t window, int64_t first, int64_t last) {
  const int64_t earliest = first - tile.first_token;  // token, counted from the tile's first
  const int64_t begin = earliest > 0 ? earliest : 0;
  int64_t end = tile.num_tokens();
  if (window > 0 && last + window - tile.first_token < end) end = last + window - tile.first_token;
  return {begin * tile.group_size, (end > begin ? end : begin) * tile.group_size};
}

// Calls `few` for threes of rows, then for what is left: three fill the registers of AVX2 with chains of additions.
template <typename Three, typename Two, typename One>
GW_INLINE void in_threes(RowRange rows, Three three, Two two, One one) {
  int64_t row = rows.begin;
  for (; row + 3 <= rows.end; row += 3) three(row);
  if (row + 2 == rows.end) two(row);
  if (row + 1 == rows.end) one(row);
}

template <Compute compute>
static void score_rows(const AttentionTile& tile, RowRange rows, const std::byte* keys, float* scores) {
  in_threes(
      rows, [&](int64_t row) { score_panel<3, compute>(tile, row, keys, scores); },
      [&](int64_t row) { score_panel<2, compute>(tile, row, keys, scores); },
      [&](int64_t row) { score_panel<1, compute>(tile, row, keys, scores); });
}

template <Compute compute>
static void add_values_of_rows(const AttentionTile& tile, RowRange rows, const float* weights, const std::byte* values) {
  in_threes(
      rows, [&](int64_t row) { add_values<3, compute>(tile, row, weights, values); },
      [&](int64_t row) { add_values<2, compute>(tile, row, weights, values); },
      [&](int64_t row) { add_values<1, compute>(tile, row, weights, values); });
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

// Turns a row's scores of a piece into the weights of its values and corrects what the row has gathered. Positions of the
// piece that the row sees: [first, last).
static void weigh_row(const AttentionTile& tile, const AttentionArgs& args, int64_t row, int64_t first, int64_t last) {
  float* scores = tile.scores + row * kPieceTokens;
  const bool sees_all = first <= 0 && last >= kPieceTokens;
  v16 piece[kPiecePanels];
  v16 largest = broadcast(kUnseen);
  for (int panel = 0; panel < kPiecePanels; ++panel) {
    v16 score = mul(load(scores + panel * kLanes), broadcast(args.scale));
    if (args.soft_cap > 0.0f) score = capped(score, broadcast(args.soft_cap));
    if (!sees_all) score = seen_lanes(first, last, panel, score, broadcast(kUnseen));
    largest = max(largest, score);
    piece[panel] = score;
  }
  const float before = tile.largest[row], of_piece = largest_lane(largest);
  const float now = of_piece > before ? of_piece : before;
  v16 sum = zero();
  for (int panel = 0; panel < kPiecePanels; ++panel) {
    v16 weight = exp(sub(piece[panel], broadcast(now)));
    if (!sees_all) weight = seen_lanes(first, last, panel, weight, zero());
    sum = add(sum, weight);
    store(scores + panel * kLanes, args.layout.compute == Compute::bf16 ? round_bf16(weight) : weight);
  }
  float corrections[kLanes];
  const v16 correction = exp(broadcast(before - now));
  store(corrections, correction);
  tile.largest[row] = now;
  tile.sums[row] = tile.sums[row] * corrections[0] + sum_of_lanes(sum);
  if (before == now) return;  // the correction is 1
  float* out = tile.out + row * tile.head_size;
  for (int64_t d = 0; d < tile.head_size; d += kLanes) store(out + d, mul(load(out + d), correction));
}

// Start of layer's and head's keys of the panel that holds a position; its values lie half_bytes() further.
static const std::byte* panel_at(const AttentionArgs& args, int64_t position) {
  const KvLayout& layout = args.layout;
  const int64_t block = args.table[position / layout.block_size];
#if defined(GIVEWAY_CHECK_BLOCKS)
  if (block < 0 || block >= args.num_pool_blocks) {
    std::fprintf(stderr, "attention: block id %lld of position %lld is not within a pool of %lld blocks\n",
                 static_cast<long long>(block), static_cast<long long>(position), static_cast<long long>(args.num_pool_blocks));
    std::abort();
  }
#endif
  return args.pool + block * layout.block_bytes() + layout.key_offset(args.layer, args.kv_head) +
         position % layout.block_size / kKvPanel * layout.panel_bytes();
}

template <Compute compute>
static void attend_piece(const AttentionTile& tile, const AttentionArgs& args, int64_t piece) {
  const int64_t start = piece * kPieceTokens;
  const std::byte* panels[kPiecePanels];
  RowRange rows[kPiecePanels];
  for (int panel = 0; panel < kPiecePanels; ++panel) {
    const int64_t first = start + panel * kKvPanel;
    rows[panel] = rows_that_see(tile, args.window, first, first + kKvPanel - 1);
    if (rows[panel].begin == rows[panel].end) continue;
    panels[panel] = panel_at(args, first);
    score_rows<compute>(tile, rows[panel], panels[panel], tile.scores + panel * kKvPanel);
  }
  const RowRange any = rows_that_see(tile, args.window, start, start + kPieceTokens - 1);
  for (int64_t row = any.begin; row < any.end; ++row) {
    const int64_t position = tile.position(row) - start;
    weigh_row(tile, args, row, args.window > 0 ? position - args.window + 1 : 0, position + 1);
  }
  for (int panel = 0; panel < kPiecePanels; ++panel) {
    if (rows[panel].begin == rows[panel].end) continue;
    const std::byte* values = panels[panel] + args.layout.half_bytes();
    add_values_of_rows<compute>(tile, rows[panel], tile.scores + panel * kKvPanel, values);
  }
}

// The tile's part of a row of queries or of the result: elements from the first head of the group on.
template <typename Args, typename Row>
static auto activations_of(const Args& args, Row* rows, int64_t row, int64_t stride) {
  using Bytes = std::conditional_t<std::is_const_v<Row>, const std::byte, std::byte>;
  return static_cast<Bytes*>(rows) + row * stride * activation_bytes(args.layout.compute);
}

// Tile of the rows from `first_row` (of the call) on, with its memory in scratch.
static AttentionTile open_tile(const AttentionArgs& args, int64_t first_row, int64_t num_tokens) {
  const int64_t size = args.layout.head_size, group = args.group_size, num_rows = num_tokens * group;
  AttentionTile tile{num_rows, group, size, args.start + first_row, nullptr, nullptr, nullptr, nullptr, nullptr};
  float* scratch = reinterpret_cast<float*>(args.scratch);
  const auto take = [&](int64_t count) {
    float* taken = scratch;
    scratch += (count + kLanes - 1) / kLanes * kLanes;
    return taken;
  };
  tile.queries = take(num_rows * size);
  tile.out = take(num_rows * size);
  tile.scores = take(num_rows * kPieceTokens);
  tile.largest = take(num_rows);
  tile.sums = take(num_rows);
  for (int64_t token = 0; token < num_tokens; ++token) {
    const auto* row = activations_of(args, args.queries, args.first_row + first_row + token, args.query_stride);
    for (int64_t i = 0; i < group * size; i += kLanes) {
      store(tile.queries + token * group * size + i, load_activations(row, args.kv_head * group * size + i, args.layout.compute));
      store(tile.out + token * group * size + i, zero());
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) tile.largest[row] = kUnseen, tile.sums[row] = 0.0f;
  return tile;
}

// Divides by the sums and writes the result. Adding zero makes -0, which a piece that is not seen can turn into +0, always +0.
static void close_tile(const AttentionTile& tile, const AttentionArgs& args, int64_t first_row) {
  const int64_t size = tile.head_size, group = tile.group_size;
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    auto* target = activations_of(args, args.out, args.first_row + first_row + row / group, args.out_stride);
    const int64_t first = (args.kv_head * group + row % group) * size;
    const v16 sum = broadcast(tile.sums[row]);
    for (int64_t d = 0; d < size; d += kLanes)
      store_activations(target, first + d, args.layout.compute, add(div(load(tile.out + row * size + d), sum), zero()));
    const bool is_last = args.kv_head + 1 == args.layout.num_kv_heads && row % group + 1 == group;
    if (is_last) pad_activations(target, first + size, args.layout.compute);
  }
}

template <Compute compute>
static void attend(const AttentionArgs& args) {
  const int64_t step = tile_tokens(args.group_size);
  for (int64_t row = 0; row < args.num_rows; row += step) {
    const int64_t num_tokens = args.num_rows - row < step ? args.num_rows - row : step;
    const AttentionTile tile = open_tile(args, row, num_tokens);
    const int64_t earliest = args.window > 0 ? tile.first_token - args.window + 1 : 0;
    const int64_t last = tile.first_token + num_tokens - 1;
    for (int64_t piece = earliest > 0 ? earliest / kPieceTokens : 0; piece <= last / kPieceTokens; ++piece)
      attend_piece<compute>(tile, args, piece);
    close_tile(tile, args, row);
  }
}

static void attention(const AttentionArgs& args) {
  if (args.layout.compute == Compute::bf16) return attend<Compute::bf16>(args);
  attend<Compute::f32>(args);
}

}  // namespace giveway::GW_SET
