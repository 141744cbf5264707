// Panel blocks that list outputs first, as rows of 32 bfloat16, one for each of the sixteen outputs: the left operand
// of an AMX product. Included by kernels_amx.cpp only.
#pragma once

#include "decode.h"

#if defined(__AMX_BF16__)

namespace giveway::GW_SET {

// Sixteen by sixteen values of four bytes: element [i][j] goes to [j][i]. A part: four j, from 4 * part on.
GW_INLINE void transpose_part(int64_t part, const void* from, int64_t row_bytes, void* to, int64_t to_row_bytes) {
  const auto* at = static_cast<const std::byte*>(from) + part * 16;
  auto* out = static_cast<std::byte*>(to) + part * 4 * to_row_bytes;
  __m512i rows[4];  // four values each of rows i, i + 4, i + 8 and i + 12
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto four = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + row * row_bytes)); };
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

GW_INLINE void transpose_sixteen(const void* from, int64_t row_bytes, void* to, int64_t to_row_bytes) {
  for (int64_t part = 0; part < 4; ++part) transpose_part(part, from, row_bytes, to, to_row_bytes);
}

// Thirty-two float32, rounded. Values that come from float16 scales are multiples of 2^-24, so no denormal number is
// among them and the instruction gives what round_bf16 does.
GW_INLINE __m512i rounded_row(v16 first, v16 second) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.lanes, first.lanes));
}

// A block on its way to rows, four outputs at a time: between them tiles are multiplied.
template <Encoding encoding>
struct BlockRows {
  static_assert(encoding != Encoding::f32, "weights for products of bfloat16 are never kept as float32");
  static constexpr bool kDecodes = encoding != Encoding::bf16;
  float* scales;  // [16], and after them as many minima: memory of the thread's own
  float* minima = scales + 16;
  const std::byte* block = nullptr;

  // Scales go through memory, from where a float is broadcast at no cost. Seeing the registers, the compiler would
  // shuffle them instead, in the unit that has most to do.
  [[gnu::always_inline]] inline void open(const std::byte* data) {
    block = data;
    if constexpr (!kDecodes) return;
    prefetch_ahead<encoding>(block);
    const auto halves = [&](int64_t offset) { return load_f16(reinterpret_cast<const uint16_t*>(block + offset)); };
    const v16 scale = halves(encoding == Encoding::q8_0 ? 512 : 256);
    store(scales, scale);
    if constexpr (encoding == Encoding::q4_0) store(minima, mul(scale, broadcast(-8.0f)));
    if constexpr (encoding == Encoding::q4_1) store(minima, halves(288));
    keep_order();
  }

  // Outputs 4 * group to 4 * group + 3; rows: [16 outputs][32 inputs], of the whole block.
  [[gnu::always_inline]] inline void decode(int64_t group, uint16_t* rows) const {
    rows += 4 * group * kBlockK;
    if constexpr (encoding == Encoding::q8_0) {
      decode_bytes(group, rows);
    } else if constexpr (kDecodes) {
      decode_nibbles(group, rows);
    }
  }

 private:
  [[gnu::always_inline]] inline void decode_bytes(int64_t group, uint16_t* rows) const {
#pragma GCC unroll 4
    for (int64_t output = 4 * group; output < 4 * group + 4; ++output, rows += kBlockK) {
      const auto* quants = reinterpret_cast<const int8_t*>(block) + output * kBlockK;
      const v16 scale = broadcast(scales[output]);
      _mm512_store_si512(rows, rounded_row(mul(scale, load_i8(quants)), mul(scale, load_i8(quants + kLanes))));
    }
  }

  // Each output has sixteen different weights only: those of two outputs are computed together, as a table, and the
  // quants look them up. That takes half as long as to convert and to round every weight.
  [[gnu::always_inline]] inline void decode_nibbles(int64_t group, uint16_t* rows) const {
    alignas(64) static constexpr float kQuants[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const v16 quants = load(kQuants);
    const auto weights = [&](int64_t output) {
      return fma(quants, broadcast(scales[output]), broadcast(minima[output]));
    };
    const __m512i nibble = _mm512_set1_epi16(15), of_second = _mm512_set1_epi16(16);
    constexpr int kAndThenOr = 0xea;  // (a & b) | c
    __m512i words = _mm512_loadu_si512(block + 64 * group);
#pragma GCC unroll 2
    for (int64_t output = 4 * group; output < 4 * group + 4; output += 2, rows += 2 * kBlockK) {
      const __m512i table = rounded_row(weights(output), weights(output + 1));
      const __m512i first = _mm512_and_si512(words, nibble);
      const __m512i second = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 4), nibble, of_second, kAndThenOr);
      _mm512_store_si512(rows, _mm512_permutexvar_epi16(first, table));
      _mm512_store_si512(rows + kBlockK, _mm512_permutexvar_epi16(second, table));
      words = _mm512_srli_epi16(words, 8);
    }
  }
};

}  // namespace giveway::GW_SET

#endif
