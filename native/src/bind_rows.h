// Rows of numbers that single kernels take and give.
#pragma once

#include <algorithm>
#include <string>

#include "bind.h"
#include "formats.h"
#include "isa.h"

namespace giveway {

using OwnedFloats = nanobind::ndarray<nanobind::numpy, float, nanobind::ndim<2>>;

inline OwnedFloats floats(int64_t num_rows, int64_t num_columns) {
  auto* values = new float[static_cast<size_t>(num_rows * num_columns)]();
  nanobind::capsule owner(values, [](void* at) noexcept { delete[] static_cast<float*>(at); });
  return OwnedFloats(values, {static_cast<size_t>(num_rows), static_cast<size_t>(num_columns)}, owner);
}

// Activations of a set, in a buffer of their own.
struct Activations : RowBuffer {
  Activations(const Kernels& kernels, Compute compute, int64_t num_rows, int64_t num_columns)
      : RowBuffer(rounded_up(std::max<int64_t>(num_rows, 1), kernels.row_multiple), activation_stride(num_columns),
                  kernels.activation_bytes(compute)) {}

  float value(int64_t index, int64_t column) const {
    if (element_bytes == 4) return reinterpret_cast<const float*>(row(index))[column];
    return bf16_to_float(reinterpret_cast<const uint16_t*>(row(index))[column]);
  }
};

inline const Kernels& kernels_or_chosen(const std::string& isa) {
  return isa.empty() ? chosen_kernels() : kernels_named(isa);
}

}  // namespace giveway
