// What attention multiplies: queries with panels of keys, weights with panels of values. Included by kernels_*.cpp
// only.
#pragma once

#include <type_traits>

#include "activations.h"
#include "kernels.h"

namespace giveway::GW_SET {

inline constexpr int kPiecePanels = kPieceTokens / kKvPanel;

// How queries and weights lie ready for the product: as its instructions take them.
template <Compute compute>
using Operand = std::conditional_t<kPacksBf16 && compute == Compute::bf16, uint16_t, float>;

// Query rows that go through the cache together: token by token, the heads of the group within a token.
template <Compute compute>
struct QueryTile {
  int64_t num_rows, group_size, head_size;
  int64_t first_token;        // position of its first token
  Operand<compute>* queries;  // [rows][head size]
  float* scores;              // [rows][kPieceTokens], not yet scaled
  Operand<compute>* weights;  // [rows][kPieceTokens]
  float* out;                 // [rows][head size], not yet divided
  float* largest;             // [rows] score so far
  float* sums;                // [rows] of the weights so far

  int64_t position(int64_t row) const { return first_token + row / group_size; }
  int64_t num_tokens() const { return num_rows / group_size; }
};

struct RowRange {
  int64_t begin, end;
};

// One piece of positions as a tile sees it.
struct Piece {
  int64_t start;                        // its first position
  const std::byte* keys[kPiecePanels];  // null: no row of the tile sees the panel
  const std::byte* values[kPiecePanels];
  int64_t ahead[kPiecePanels];  // bytes to the same panel of the next piece; 0: there is none yet
  RowRange rows[kPiecePanels];  // that see any position of the panel
  RowRange any;                 // that see any position of the piece
};

// Rows whose products are made together, those that do not see the piece too: then their weights must be zero.
#if defined(__AMX_BF16__)
inline constexpr int64_t kRowsTogether = 16;
#else
inline constexpr int64_t kRowsTogether = 1;
#endif

// All rows that products of these rows touch; they may run beyond the last row of the tile.
constexpr RowRange rows_touched(RowRange rows) {
  return {rows.begin, rows.begin + (rows.end - rows.begin + kRowsTogether - 1) / kRowsTogether * kRowsTogether};
}

// Walks through the pairs of inputs of a panel of keys (inputs: dimensions, lanes: positions) or of values (positions,
// dimensions).
template <Compute compute>
struct PairsOfPanel {
  const std::byte* at;
  int64_t pair_bytes, odd_bytes;  // to the next pair; float32 only: from the even to the odd input
  int64_t ahead;                  // to the same panel of the next piece

  GW_INLINE PairsOfPanel keys(const std::byte* panel, int64_t ahead) {
    constexpr int64_t row = kKvPanel * 4;  // one dimension as float32, or a pair as bfloat16
    return {panel, compute == Compute::f32 ? 2 * row : row, row, ahead};
  }
  GW_INLINE PairsOfPanel values(const std::byte* panel, int64_t ahead, int64_t head_size, int64_t first_dimension) {
    const int64_t row = head_size * 4;
    return {panel + first_dimension * 4, compute == Compute::f32 ? 2 * row : row, row, ahead};
  }
  [[gnu::always_inline]] inline v16 even() const {
    if constexpr (compute == Compute::bf16) return load_bf16_pairs(reinterpret_cast<const uint16_t*>(at)).even;
    return load(reinterpret_cast<const float*>(at));
  }
  [[gnu::always_inline]] inline v16 odd() const {
    if constexpr (compute == Compute::bf16) return load_bf16_pairs(reinterpret_cast<const uint16_t*>(at)).odd;
    return load(reinterpret_cast<const float*>(at + odd_bytes));
  }
  // Asks for the pair that lies there in the next piece, into the second cache: a piece fills the first. Left to itself
  // the processor sees too late where the next block is.
  [[gnu::always_inline]] inline void fetch_ahead() const {
    __builtin_prefetch(at + ahead, 0, 2);
    if constexpr (compute == Compute::f32) __builtin_prefetch(at + odd_bytes + ahead, 0, 2);
  }
};

// The compiler moves no load or store past this place.
GW_INLINE void keep_order() { __asm__ volatile("" ::: "memory"); }

// Rows whose products are made at once. Their sums must stay in registers, and there must be enough of them to hide the
// latency of multiply-add.
#if defined(__AVX512F__)
inline constexpr int kProductRows = 8;
#elif defined(__AVX2__)
inline constexpr int kProductRows = 3;
#else
inline constexpr int kProductRows = 1;
#endif

// One block of products of `rows` rows: total + (even + odd).
template <int rows, int num_pairs, bool fetches, Compute compute>
GW_INLINE void add_block(const float* x, int64_t x_stride, PairsOfPanel<compute> panel, v16 (&totals)[rows]) {
  v16 even[rows], odd[rows];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) even[row] = odd[row] = zero();
  for (int pair = 0; pair < num_pairs; ++pair) {
    // One half of the pair after the other: with the lanes of both, AVX2 would have too few registers for the sums.
    v16 lanes = panel.even();
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) even[row] = fma(broadcast(x[row * x_stride + 2 * pair]), lanes, even[row]);
    keep_order();
    lanes = panel.odd();
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) odd[row] = fma(broadcast(x[row * x_stride + 2 * pair + 1]), lanes, odd[row]);
    keep_order();
    if constexpr (fetches) panel.fetch_ahead();
    panel.at += panel.pair_bytes;
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) totals[row] = add(totals[row], add(even[row], odd[row]));
}

#if defined(__AVX512BF16__)
// The same by an instruction that multiplies pairs; it adds them in an order of its own, one chain through all blocks.
template <int rows, int num_pairs, bool fetches, Compute compute>
GW_INLINE void add_block(const uint16_t* x, int64_t x_stride, PairsOfPanel<compute> panel, v16 (&totals)[rows]) {
  for (int pair = 0; pair < num_pairs; ++pair) {
    const __m512i lanes = _mm512_loadu_si512(panel.at);
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
      int32_t both;
      std::memcpy(&both, x + row * x_stride + 2 * pair, sizeof both);
      totals[row].lanes = _mm512_dpbf16_ps(totals[row].lanes, reinterpret_cast<__m512bh>(lanes),
                                           reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)));
    }
    if constexpr (fetches) panel.fetch_ahead();
    panel.at += panel.pair_bytes;
  }
}
#endif

// Scores of `rows` rows and the 16 positions of a panel of keys.
template <int rows, bool fetches, Compute compute>
static void score_panel(const QueryTile<compute>& tile, int64_t row, PairsOfPanel<compute> panel, float* scores) {
  v16 totals[rows];
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) totals[i] = zero();
  const auto* queries = tile.queries + row * tile.head_size;
  int64_t d = 0;
  for (; d + kBlockK <= tile.head_size; d += kBlockK, panel.at += kBlockK / 2 * panel.pair_bytes)
    add_block<rows, kBlockK / 2, fetches>(queries + d, tile.head_size, panel, totals);
  if (d < tile.head_size) add_block<rows, kBlockK / 4, fetches>(queries + d, tile.head_size, panel, totals);
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) store(scores + (row + i) * kPieceTokens, totals[i]);
}

// Adds the values of the 16 positions of a panel, weighted, to `rows` rows.
template <int rows, bool fetches, Compute compute>
static void add_panel(const QueryTile<compute>& tile, int64_t row, const Operand<compute>* weights,
                      const std::byte* values, int64_t ahead) {
  float* out = tile.out + row * tile.head_size;
  for (int64_t d = 0; d < tile.head_size; d += kLanes) {
    v16 totals[rows];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) totals[i] = load(out + i * tile.head_size + d);
    const auto panel = PairsOfPanel<compute>::values(values, ahead, tile.head_size, d);
    add_block<rows, kKvPanel / 2, fetches>(weights + row * kPieceTokens, kPieceTokens, panel, totals);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) store(out + i * tile.head_size + d, totals[i]);
  }
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

// Panel by panel, not row by row: one panel and all rows of the tile fit into the first cache. The first rows of a
// panel fetch what comes next.
template <Compute compute>
static void score_piece(const QueryTile<compute>& tile, const Piece& piece) {
  for (int panel = 0; panel < kPiecePanels; ++panel) {
    if (piece.keys[panel] == nullptr) continue;
    in_groups<kProductRows, true>(piece.rows[panel], [&](auto count, auto is_first, int64_t row) {
      const auto keys = PairsOfPanel<compute>::keys(piece.keys[panel], piece.ahead[panel]);
      score_panel<count, is_first, compute>(tile, row, keys, tile.scores + panel * kKvPanel);
    });
  }
}

template <Compute compute>
static void add_piece(const QueryTile<compute>& tile, const Piece& piece) {
  for (int panel = 0; panel < kPiecePanels; ++panel) {
    if (piece.keys[panel] == nullptr) continue;
    in_groups<kProductRows, true>(piece.rows[panel], [&](auto count, auto is_first, int64_t row) {
      add_panel<count, is_first, compute>(tile, row, tile.weights + panel * kKvPanel, piece.values[panel],
                                          piece.ahead[panel]);
    });
  }
}

}  // namespace giveway::GW_SET
