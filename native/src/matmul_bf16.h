// Products of bfloat16 activations with weights as pairs of bfloat16, for sets whose instructions multiply such pairs.
// Included by kernels_avx512_bf16.cpp and kernels_amx.cpp only.
#pragma once

#include <algorithm>

#include "decode.h"
#include "kernels.h"
#include "matmul_epilogue.h"

#if defined(__AVX512BF16__)

namespace giveway::GW_SET {

inline constexpr int64_t kPairWords = kBlockK * kPanelColumns;  // 16-bit values of a panel block
inline constexpr int64_t kBf16ChunkBytes =
    int64_t{1} << 20;  // activations that share what was decoded; they stay in the second cache
#if defined(__AMX_BF16__)
inline constexpr int64_t kPartRows = 32;  // rows of a part, at most: what is multiplied at a time
GW_INLINE int64_t choose_part_rows(int64_t) { return kPartRows; }  // whole tiles
#else
inline constexpr int64_t kPartRows = 48;
GW_INLINE int64_t
choose_part_rows(int64_t num_rows) {  // parts of nearly equal size: a small one keeps a core less busy
  return equal_part(num_rows, kPartRows);
}
#endif

// Two panels by all rows of a chunk; weights as [blocks][16 pairs][16 columns][2].
struct PairStrip {
  const uint16_t* x;  // [rows (buffer: padded to row_multiple)][x_stride]
  int64_t x_stride;
  const uint16_t* weights[2];
  int64_t num_panels, num_blocks;
  float* totals;  // [kPartRows][2 panels][16 columns]
};

// Thirty-two weights as 16-bit pairs. Values that come from float16 scales are multiples of 2^-24, so no denormal
// number is among them and the instruction that rounds gives what round_bf16 does; stored float32 weights may be
// denormal.
template <Encoding encoding>
GW_INLINE __m512i as_pairs(v16_pair weights) {
  if constexpr (encoding == Encoding::f32) {
    const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(round_bf16(weights.even).lanes), 16);
    return _mm512_or_si512(even, _mm512_castps_si512(round_bf16(weights.odd).lanes));
  } else {
    const __m512i rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weights.odd.lanes, weights.even.lanes));
    const __m512i first = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(first, rounded);
  }
}

template <Encoding encoding>
static void decode_pairs(const std::byte* data, int64_t num_blocks, uint16_t* pairs) {
  for (int64_t index = 0; index < num_blocks; ++index, data += panel_block_bytes(encoding)) {
    prefetch_ahead<encoding>(data);
    const auto block = PanelBlock<encoding, Compute::f32>::open(data);
    for (int64_t pair = 0; pair < kBlockK / 2; ++pair, pairs += 2 * kPanelColumns)
      _mm512_store_si512(pairs, as_pairs<encoding>(block.pair(pair)));
  }
}

// The panel's weights as pairs: where they lie if they are stored so, else decoded into scratch.
static const uint16_t* panel_pairs(const Panels& panels, int64_t panel, uint16_t* scratch) {
  const std::byte* data = panels.panel(panel);
  switch (panels.encoding) {
    case Encoding::bf16:
      return reinterpret_cast<const uint16_t*>(data);
    case Encoding::f32:
      decode_pairs<Encoding::f32>(data, panels.num_blocks(), scratch);
      break;
    case Encoding::q8_0:
      decode_pairs<Encoding::q8_0>(data, panels.num_blocks(), scratch);
      break;
    case Encoding::q4_0:
      decode_pairs<Encoding::q4_0>(data, panels.num_blocks(), scratch);
      break;
    case Encoding::q4_1:
      decode_pairs<Encoding::q4_1>(data, panels.num_blocks(), scratch);
      break;
  }
  return scratch;
}

// Scratch: the totals of a part, then two decoded panels.
static int64_t bf16_scratch_bytes(int64_t num_inputs) {
  const int64_t num_blocks = (num_inputs + kBlockK - 1) / kBlockK;
  return kPartRows * kTotalsStride * static_cast<int64_t>(sizeof(float)) + 2 * num_blocks * kPairWords * 2;
}

// multiply(strip, num_rows) fills the totals of up to kPartRows rows.
template <typename Multiply>
GW_INLINE void multiply_bf16(const MatmulArgs& args, Multiply multiply) {
  const Panels& panels = *args.weights;
  float* totals = reinterpret_cast<float*>(args.scratch);
  uint16_t* decoded = reinterpret_cast<uint16_t*>(totals + kPartRows * kTotalsStride);
  const int64_t fitting = kBf16ChunkBytes / (args.x_stride * 2) / kPartRows * kPartRows;
  const int64_t chunk_rows = std::max(fitting, kPartRows);
  for (int64_t first = 0; first < args.num_rows; first += chunk_rows) {
    const int64_t last = std::min(first + chunk_rows, args.num_rows);
    const int64_t part_rows = choose_part_rows(last - first);
    for (int64_t panel = args.first_panel; panel < args.last_panel; panel += 2) {
      PairStrip strip{nullptr,
                      args.x_stride,
                      {nullptr, nullptr},
                      std::min<int64_t>(2, args.last_panel - panel),
                      panels.num_blocks(),
                      totals};
      for (int64_t index = 0; index < strip.num_panels; ++index)
        strip.weights[index] = panel_pairs(panels, panel + index, decoded + index * strip.num_blocks * kPairWords);
      for (int64_t row = first; row < last; row += part_rows) {
        const int64_t num_rows = std::min(part_rows, last - row);
        strip.x = static_cast<const uint16_t*>(args.x) + row * args.x_stride;
        multiply(strip, num_rows);
        finish(args, row, num_rows, panel, strip.num_panels, totals);
      }
    }
  }
}

}  // namespace giveway::GW_SET

#endif
