// Panel blocks that list outputs first, as rows of 32 bfloat16, one for each of the sixteen outputs: the left operand
// of an AMX product. Included by kernels_amx.cpp only.
#pragma once

#include "decode.h"

#if defined(__AMX_BF16__)

namespace giveway::GW_SET {

// Sixteen by sixteen values of four bytes: element [i][j] goes to [j][i].
GW_INLINE void transpose_sixteen(const void* from, int64_t row_bytes, void* to, int64_t to_row_bytes) {
  const auto* at = static_cast<const std::byte*>(from);
  auto* out = static_cast<std::byte*>(to);
#pragma GCC unroll 4
  for (int part = 0; part < 4; ++part, at += 16, out += 4 * to_row_bytes) {
    __m512i rows[4];  // four values each of rows i, i + 4, i + 8 and i + 12
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto four = [&](int row) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + row * row_bytes));
      };
      rows[i] = _mm512_inserti32x4(_mm512_castsi128_si512(four(i)), four(i + 4), 1);
      rows[i] = _mm512_inserti32x4(_mm512_inserti32x4(rows[i], four(i + 8), 2), four(i + 12), 3);
    }
    const __m512i low = _mm512_unpacklo_epi32(rows[0], rows[1]), low_next = _mm512_unpacklo_epi32(rows[2], rows[3]);
    const __m512i high = _mm512_unpackhi_epi32(rows[0], rows[1]), high_next = _mm512_unpackhi_epi32(rows[2], rows[3]);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi64(low, low_next));
    _mm512_storeu_si512(out + to_row_bytes, _mm512_unpackhi_epi64(low, low_next));
    _mm512_storeu_si512(out + 2 * to_row_bytes, _mm512_unpacklo_epi64(high, high_next));
    _mm512_storeu_si512(out + 3 * to_row_bytes, _mm512_unpackhi_epi64(high, high_next));
  }
}

// Thirty-two float32, rounded. Values that come from float16 scales are multiples of 2^-24, so no denormal number is
// among them and the instruction gives what round_bf16 does.
GW_INLINE __m512i rounded_row(v16 first, v16 second) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.lanes, first.lanes));
}

// A block of 4-bit weights. Each output has sixteen different weights only: those of two outputs are computed together
// as a table, and the quants look them up. That takes half as long as to convert and to round every weight.
GW_INLINE void decode_nibbles(const std::byte* block, const float* scales, const float* minima, uint16_t* rows) {
  alignas(64) static constexpr float kQuants[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const v16 quants = load(kQuants);
  const __m512i nibble = _mm512_set1_epi16(15), second_half = _mm512_set1_epi16(16);
#pragma GCC unroll 4
  for (int group = 0; group < 4; ++group) {
    const __m512i words = _mm512_loadu_si512(block + 64 * group);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int output = 4 * group + 2 * half;
      const __m512i table = rounded_row(fma(quants, broadcast(scales[output]), broadcast(minima[output])),
                                        fma(quants, broadcast(scales[output + 1]), broadcast(minima[output + 1])));
      const __m512i first = _mm512_and_si512(half == 0 ? words : _mm512_srli_epi16(words, 8), nibble);
      constexpr int kAndThenOr = 0xea;  // (a & b) | c
      const __m512i second = _mm512_ternarylogic_epi32(
          half == 0 ? _mm512_srli_epi16(words, 4) : _mm512_srli_epi16(words, 12), nibble, second_half, kAndThenOr);
      _mm512_store_si512(rows + output * kBlockK, _mm512_permutexvar_epi16(first, table));
      _mm512_store_si512(rows + (output + 1) * kBlockK, _mm512_permutexvar_epi16(second, table));
    }
  }
}

// The rows of a block, [16 outputs][32 inputs]: where they lie if they are stored so, else decoded to `rows`.
template <Encoding encoding>
GW_INLINE const uint16_t* decode_rows(const std::byte* block, uint16_t* rows) {
  static_assert(encoding != Encoding::f32, "weights for products of bfloat16 are never kept as float32");
  if constexpr (encoding == Encoding::bf16) {
    return reinterpret_cast<const uint16_t*>(block);
  } else {
    prefetch_ahead<encoding>(block);
    const auto halves = [&](int64_t offset) { return load_f16(reinterpret_cast<const uint16_t*>(block + offset)); };
    // From memory a float is broadcast at no cost. Seeing the registers, the compiler would shuffle them instead, in
    // the unit that has most to do.
    alignas(64) float scales[16], minima[16];
    const v16 scale = halves(encoding == Encoding::q8_0 ? 512 : 256);
    store(scales, scale);
    if constexpr (encoding == Encoding::q4_0) store(minima, mul(scale, broadcast(-8.0f)));
    if constexpr (encoding == Encoding::q4_1) store(minima, halves(288));
    keep_order();
    if constexpr (encoding == Encoding::q8_0) {
#pragma GCC unroll 16
      for (int output = 0; output < kPanelColumns; ++output) {
        const auto* quants = reinterpret_cast<const int8_t*>(block) + output * kBlockK;
        const v16 own = broadcast(scales[output]);
        _mm512_store_si512(rows + output * kBlockK,
                           rounded_row(mul(own, load_i8(quants)), mul(own, load_i8(quants + kLanes))));
      }
    } else {
      decode_nibbles(block, scales, minima, rows);
    }
    return rows;
  }
}

}  // namespace giveway::GW_SET

#endif
