// How rows of activations lie in memory. Included by kernels_*.cpp only.
#pragma once

#include "vec16.h"

namespace giveway::GW_SET {

// Stores elements `index` to `index + 15` of a row of activations. None is denormal: computing flushes what would be.
GW_INLINE void store_activations(void* row, int64_t index, Compute compute, v16 values) {
  if (compute == Compute::f32) {
    store(static_cast<float*>(row) + index, values);
  } else if constexpr (kPacksBf16) {
    store_rounded(static_cast<uint16_t*>(row) + index, values);
  } else {
    store(static_cast<float*>(row) + index, round_bf16(values));
  }
}

// Elements `index` to `index + 15` of a row of activations, as float32.
GW_INLINE v16 load_activations(const void* row, int64_t index, Compute compute) {
  if (kPacksBf16 && compute == Compute::bf16) return load_bf16(static_cast<const uint16_t*>(row) + index);
  return load(static_cast<const float*>(row) + index);
}

// Zeros from the end of a row, `size` (a multiple of 16), to where the next one may begin.
GW_INLINE void pad_activations(void* row, int64_t size, Compute compute) {
  for (int64_t index = size; index < activation_stride(size); index += kLanes)
    store_activations(row, index, compute, zero());
}

// The first `count` (at most 16) floats at an address, then zeros; reads no further.
GW_INLINE v16 load_up_to(const float* at, int64_t count) {
  if (count >= kLanes) return load(at);
  float lanes[kLanes] = {};
  std::memcpy(lanes, at, static_cast<size_t>(count) * sizeof(float));
  return load(lanes);
}

}  // namespace giveway::GW_SET
