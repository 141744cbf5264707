// Panel blocks as float32, on the way to a product. Included by kernels_*.cpp only.
#pragma once

#include <type_traits>

#include "vec16.h"

namespace giveway::GW_SET {

constexpr bool is_read_plainly(Encoding encoding) { return encoding == Encoding::f32 || encoding == Encoding::bf16; }

// Calls function(encoding) with the encoding as a constant.
template <typename Function>
GW_INLINE void with_encoding(Encoding encoding, Function function) {
  switch (encoding) {
    case Encoding::f32:
      return function(std::integral_constant<Encoding, Encoding::f32>());
    case Encoding::bf16:
      return function(std::integral_constant<Encoding, Encoding::bf16>());
    case Encoding::q8_0:
      return function(std::integral_constant<Encoding, Encoding::q8_0>());
    case Encoding::q4_0:
      return function(std::integral_constant<Encoding, Encoding::q4_0>());
    case Encoding::q4_1:
      return function(std::integral_constant<Encoding, Encoding::q4_1>());
  }
}

// Asks for the memory of a block some blocks ahead (panels follow each other). Decoding takes so long per byte that the
// processor does not look far enough ahead by itself; where weights are not decoded it does, and is only disturbed.
template <Encoding encoding>
GW_INLINE void prefetch_ahead(const std::byte* block, int64_t bytes_ahead = 4096) {
  constexpr int64_t kLineBytes = 64;
  if constexpr (is_read_plainly(encoding)) return;
  for (int64_t at = 0; at < panel_block_bytes(encoding); at += kLineBytes) __builtin_prefetch(block + bytes_ahead + at);
}

// The weights of one panel block that belong to inputs 2 * pair and 2 * pair + 1, rounded if the compute type asks for
// it. Products d * q are exact in float32 (11 bits by at most 8), so fusing d * q + m rounds as the two operations
// would.
template <Encoding encoding, Compute compute>
struct PanelBlock {
  const std::byte* data;
  v16 scale, minimum;

  GW_INLINE PanelBlock open(const std::byte* block) {
    PanelBlock opened{block, zero(), zero()};
    const auto halves = [&](int64_t offset) {
      const v16 loaded = load_f16(reinterpret_cast<const uint16_t*>(block + offset));
      return compute == Compute::bf16 ? plain_nan(loaded) : loaded;
    };
    if constexpr (encoding == Encoding::q8_0) opened.scale = halves(512);
    if constexpr (encoding == Encoding::q4_0 || encoding == Encoding::q4_1) opened.scale = halves(256);
    if constexpr (encoding == Encoding::q4_0) opened.minimum = mul(opened.scale, broadcast(-8.0f));
    if constexpr (encoding == Encoding::q4_1) opened.minimum = halves(288);
    return opened;
  }

  [[gnu::always_inline]] inline v16_pair pair(int64_t index) const {
    const v16_pair weights = stored(index);
    if constexpr (compute == Compute::f32 || encoding == Encoding::bf16) {
      return weights;
    } else if constexpr (encoding == Encoding::f32) {
      return {round_bf16(weights.even), round_bf16(weights.odd)};
    } else {
      return {round_bf16_plain(weights.even), round_bf16_plain(weights.odd)};
    }
  }

 private:
  [[gnu::always_inline]] inline v16_pair stored(int64_t index) const {
    if constexpr (encoding == Encoding::f32) {
      const float* at = reinterpret_cast<const float*>(data) + index * 2 * kPanelColumns;
      return {load(at), load(at + kPanelColumns)};
    } else if constexpr (encoding == Encoding::bf16) {
      return load_bf16_pairs(reinterpret_cast<const uint16_t*>(data) + index * 2 * kPanelColumns);
    } else if constexpr (encoding == Encoding::q8_0) {
      const int8_t* at = reinterpret_cast<const int8_t*>(data) + index * 2 * kPanelColumns;
      return {mul(scale, load_i8(at)), mul(scale, load_i8(at + kPanelColumns))};
    } else {
      const v16_pair nibbles = load_nibbles(reinterpret_cast<const uint8_t*>(data) + index * kPanelColumns);
      return {fma(scale, nibbles.even, minimum), fma(scale, nibbles.odd, minimum)};
    }
  }
};

}  // namespace giveway::GW_SET
