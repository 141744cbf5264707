// Weights as pairs of bfloat16, for sets whose instructions multiply such pairs: a panel block becomes [16 pairs of
// inputs][16 columns][2]. Included by kernels_avx512_bf16.cpp only.
#pragma once

#include "decode.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace giveway::GW_SET {

inline constexpr int64_t kPairWords = kBlockK * kPanelColumns;  // 16-bit values of a panel block

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

}  // namespace giveway::GW_SET

#endif
