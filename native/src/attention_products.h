// What attention multiplies: queries with panels of keys, weights with panels of values. Included by kernels_*.cpp
// only.
#pragma once

#include <type_traits>

#include "activations.h"
#include "kernels.h"
#include "register_tile.h"

namespace giveway::GW_SET {

inline constexpr int kPiecePanels = kPieceTokens / kKvPanel;

// How queries and weights lie ready for the product: as its instructions take them.
template <Compute compute>
using Operand = std::conditional_t<kPacksBf16 && compute == Compute::bf16, uint16_t, float>;

// From a row of scores, or of weights, to the next; rows that are gathered have as much between them. Without, sixteen
// rows fill 4 KiB, and a load from one group of rows would wait for the stores to the same place of another: the
// processor compares the last twelve bits of addresses only.
inline constexpr int64_t kScoreStride = kPieceTokens + kLanes;

// Query rows that go through the cache together: token by token, the heads of the group within a token.
template <Compute compute>
struct QueryTile {
  int64_t num_rows, group_size, head_size;
  int64_t kv_head;
  int64_t first_token;        // position of its first token
  int64_t rows_before;        // from that token's first head on, that are not in this tile
  Operand<compute>* queries;  // [rows][head size]
  float* scores;              // [rows][kScoreStride], not yet scaled
  Operand<compute>* weights;  // [rows][kScoreStride]
  float* out;                 // [rows][out_stride()], not yet divided
  float* largest;             // [rows] score so far, not yet scaled unless it was capped
  float* sums;                // [rows][kLanes] of the weights so far, lane by lane

  int64_t position(int64_t row) const { return first_token + (rows_before + row) / group_size; }
  int64_t num_tokens() const { return num_rows / group_size; }
  int64_t out_stride() const { return head_size + kLanes; }
};

struct RowRange {
  int64_t begin, end;
};

// One piece of positions as a tile sees it.
struct Piece {
  int64_t start;                        // its first position
  int begin, end;                       // panels that any row of the tile sees
  const std::byte* keys[kPiecePanels];  // null: none sees it
  const std::byte* values[kPiecePanels];
  const std::byte* next[kPiecePanels];  // keys that are attended to after these; where there are none, some of these
  int64_t to_values;                    // bytes, from the keys of a panel
  RowRange rows;                        // that see any position of the piece
};

// Room for so many rows after the last of a tile: products of whole AMX tiles reach beyond it.
#if defined(__AMX_BF16__)
inline constexpr int64_t kRowsBeyond = 16;
#else
inline constexpr int64_t kRowsBeyond = 0;
#endif

// Panels of keys (inputs: dimensions, lanes: positions) or of values (positions, dimensions) that are multiplied side
// by side, pair of inputs by pair of inputs.
template <Compute compute, int count>
struct PanelsAbreast {
  const std::byte* at[count];
  int64_t ahead[count];           // to the same panel of the next piece
  int64_t pair_bytes, odd_bytes;  // to the next pair; float32 only: from the even to the odd input

  GW_INLINE PanelsAbreast keys(const Piece& piece, int first_panel) {
    constexpr int64_t row = kKvPanel * 4;  // one dimension as float32, or a pair as bfloat16
    PanelsAbreast panels{{}, {}, compute == Compute::f32 ? 2 * row : row, row};
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i)
      panels.at[i] = piece.keys[first_panel + i], panels.ahead[i] = piece.next[first_panel + i] - panels.at[i];
    return panels;
  }
  // Vectors of dimensions of one panel, from `first_dimension` on.
  GW_INLINE PanelsAbreast values(const Piece& piece, int panel, int64_t head_size, int64_t first_dimension) {
    const int64_t row = head_size * 4;
    PanelsAbreast panels{{}, {}, compute == Compute::f32 ? 2 * row : row, row};
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i)
      panels.at[i] = piece.values[panel] + (first_dimension + i * kLanes) * 4,
      panels.ahead[i] = piece.next[panel] - piece.keys[panel];
    return panels;
  }
  [[gnu::always_inline]] inline v16 even(int panel, int64_t offset) const {
    const std::byte* pair = at[panel] + offset;
    if constexpr (compute == Compute::bf16) return load_bf16_pairs(reinterpret_cast<const uint16_t*>(pair)).even;
    return load(reinterpret_cast<const float*>(pair));
  }
  [[gnu::always_inline]] inline v16 odd(int panel, int64_t offset) const {
    const std::byte* pair = at[panel] + offset;
    if constexpr (compute == Compute::bf16) return load_bf16_pairs(reinterpret_cast<const uint16_t*>(pair)).odd;
    return load(reinterpret_cast<const float*>(pair + odd_bytes));
  }
  // Asks for the pair that lies there in the next piece, into the second cache: a piece fills the first. Left to itself
  // the processor sees too late where the next block is.
  [[gnu::always_inline]] inline void fetch_ahead(int64_t offset) const {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) {
      __builtin_prefetch(at[i] + ahead[i] + offset, 0, 2);
      if constexpr (compute == Compute::f32) __builtin_prefetch(at[i] + ahead[i] + offset + odd_bytes, 0, 2);
    }
  }
};

// Rows and panels whose products are made at once. Their sums must stay in registers, and there must be enough of them
// to hide the latency of multiply-add: sums of float32 products are two each, those of pairs one.
#if defined(__AVX512F__)
inline constexpr int kPanelsAbreast = 4;
template <Compute compute>
inline constexpr int kProductRows = std::is_same_v<Operand<compute>, float> ? 3 : 6;
#elif defined(__AVX2__)
inline constexpr int kPanelsAbreast = 1;
template <Compute compute>
inline constexpr int kProductRows = 3;
#else
inline constexpr int kPanelsAbreast = 1;
template <Compute compute>
inline constexpr int kProductRows = 1;
#endif

// One block of products, of which `offset` is the first pair: totals + (even + odd).
template <int rows, int count, int num_pairs, bool fetches, Compute compute>
GW_INLINE void add_block(const float* x, int64_t x_stride, const PanelsAbreast<compute, count>& panels, int64_t offset,
                         v16 (&totals)[rows][count]) {
  v16 even[rows][count], odd[rows][count];
  clear(even), clear(odd);
  const auto add_input = [&](int64_t input, v16(&sums)[rows][count], auto lanes_of) {
    v16 lanes[count];
#pragma GCC unroll 4
    for (int panel = 0; panel < count; ++panel) lanes[panel] = lanes_of(panel);
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
      const v16 value = broadcast(x[row * x_stride + input]);
#pragma GCC unroll 4
      for (int panel = 0; panel < count; ++panel) sums[row][panel] = fma(value, lanes[panel], sums[row][panel]);
    }
    keep_order();  // one half of the pair after the other: with the lanes of both there are too few registers
  };
  for (int pair = 0; pair < num_pairs; ++pair, offset += panels.pair_bytes) {
    add_input(2 * pair, even, [&](int panel) { return panels.even(panel, offset); });
    add_input(2 * pair + 1, odd, [&](int panel) { return panels.odd(panel, offset); });
    if constexpr (fetches) panels.fetch_ahead(offset);
  }
  for_each_sum<rows, count>([&](int row, int panel) {
    totals[row][panel] = add(totals[row][panel], add(even[row][panel], odd[row][panel]));
  });
}

#if defined(__AVX512BF16__)
// The same by an instruction that multiplies pairs; it adds them in an order of its own, one chain through all blocks.
template <int rows, int count, int num_pairs, bool fetches, Compute compute>
GW_INLINE void add_block(const uint16_t* x, int64_t x_stride, const PanelsAbreast<compute, count>& panels,
                         int64_t offset, v16 (&totals)[rows][count]) {
  for (int pair = 0; pair < num_pairs; ++pair, offset += panels.pair_bytes) {
    __m512i lanes[count];
#pragma GCC unroll 4
    for (int panel = 0; panel < count; ++panel) lanes[panel] = load_pairs(panels.at[panel] + offset);
    add_pair(x + 2 * pair, x_stride, lanes, totals);
    if constexpr (fetches) panels.fetch_ahead(offset);
  }
}
#endif

// Scores of `rows` rows and the positions of `count` panels of keys.
template <int rows, int count, bool fetches, Compute compute>
static void score_rows(const QueryTile<compute>& tile, const Piece& piece, int64_t row, int first_panel) {
  const auto panels = PanelsAbreast<compute, count>::keys(piece, first_panel);
  v16 totals[rows][count];
  clear(totals);
  const auto* queries = tile.queries + row * tile.head_size;
  int64_t d = 0, offset = 0;
  for (; d + kBlockK <= tile.head_size; d += kBlockK, offset += kBlockK / 2 * panels.pair_bytes)
    add_block<rows, count, kBlockK / 2, fetches>(queries + d, tile.head_size, panels, offset, totals);
  if (d < tile.head_size)
    add_block<rows, count, kBlockK / 4, fetches>(queries + d, tile.head_size, panels, offset, totals);
  float* scores = tile.scores + row * kScoreStride + first_panel * kKvPanel;
  for_each_sum<rows, count>(
      [&](int i, int panel) { store(scores + i * kScoreStride + panel * kKvPanel, totals[i][panel]); });
}

// Adds the values of the piece, weighted, to `rows` rows: `count` vectors of dimensions from `d` on.
template <int rows, int count, bool fetches, Compute compute>
static void add_rows(const QueryTile<compute>& tile, const Piece& piece, int64_t row, int64_t d) {
  float* out = tile.out + row * tile.out_stride() + d;
  v16 totals[rows][count];
  for_each_sum<rows, count>(
      [&](int i, int part) { totals[i][part] = load(out + i * tile.out_stride() + part * kLanes); });
  for (int panel = piece.begin; panel < piece.end; ++panel) {
    const auto panels = PanelsAbreast<compute, count>::values(piece, panel, tile.head_size, d);
    add_block<rows, count, kKvPanel / 2, fetches>(tile.weights + row * kScoreStride + panel * kKvPanel, kScoreStride,
                                                  panels, 0, totals);
  }
  for_each_sum<rows, count>(
      [&](int i, int part) { store(out + i * tile.out_stride() + part * kLanes, totals[i][part]); });
}

// Calls function(count, is_first, first row), count and is_first constants, count at most `most`, for all rows.
template <int most, bool is_first, typename Function>
GW_INLINE void in_groups(RowRange rows, Function function) {
  if (rows.begin + most <= rows.end) {
    function(std::integral_constant<int, most>(), std::bool_constant<is_first>(), rows.begin);
    for (rows.begin += most; rows.begin + most <= rows.end; rows.begin += most)
      function(std::integral_constant<int, most>(), std::false_type(), rows.begin);
    if constexpr (most > 1) in_groups<most - 1, false>(rows, function);
  } else {
    if constexpr (most > 1) in_groups<most - 1, is_first>(rows, function);
  }
}

// Calls function(count, first), count a constant of at most `most`, for parts of [first, last).
template <int most, typename Function>
GW_INLINE void in_parts(int first, int last, Function function) {
  for (; first + most <= last; first += most) function(std::integral_constant<int, most>(), first);
  if constexpr (most > 1) in_parts<most - 1>(first, last, function);
}

// Some panels with all rows, then the next: they and all rows of the tile fit into the first cache. The first rows
// fetch what comes next.
template <Compute compute>
static void score_piece(const QueryTile<compute>& tile, const Piece& piece) {
  in_parts<kPanelsAbreast>(piece.begin, piece.end, [&](auto count, int first_panel) {
    in_groups<kProductRows<compute>, true>(piece.rows, [&](auto rows, auto is_first, int64_t row) {
      score_rows<rows, count, is_first, compute>(tile, piece, row, first_panel);
    });
  });
}

template <Compute compute>
static void add_piece(const QueryTile<compute>& tile, const Piece& piece) {
  in_parts<kPanelsAbreast>(0, static_cast<int>(tile.head_size / kLanes), [&](auto count, int first_vector) {
    in_groups<kProductRows<compute>, true>(piece.rows, [&](auto rows, auto is_first, int64_t row) {
      add_rows<rows, count, is_first, compute>(tile, piece, row, first_vector * kLanes);
    });
  });
}

}  // namespace giveway::GW_SET
