// What the parts of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "checks.h"
#include "kernels.h"
#include "panels.h"

namespace giveway {

void bind_matrix(nanobind::module_& m);
void bind_model(nanobind::module_& m);
void bind_ops(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_peaks(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_block_copy(nanobind::module_& m);

template <typename T, size_t dimensions>
using InArray = nanobind::ndarray<const T, nanobind::ndim<dimensions>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T, size_t dimensions>
using OutArray = nanobind::ndarray<T, nanobind::ndim<dimensions>, nanobind::c_contig, nanobind::device::cpu>;

// For arrays. Anything else that is not of just this type and order would be copied into an array that is: what is
// written there is lost, and numbers that do not fit are changed.
inline auto array_arg(const char* name) { return nanobind::arg(name).noconvert(); }

inline Compute compute_named(const std::string& name) {
  if (name == "f32") return Compute::f32;
  if (name == "bf16") return Compute::bf16;
  throw std::invalid_argument("compute is '" + name + "'; it must be 'f32' or 'bf16'");
}

inline Gate gate_named(const std::string& name) {
  if (name == "silu") return Gate::silu;
  if (name == "gelu") return Gate::gelu;
  throw std::invalid_argument("gate is '" + name + "'; it must be 'silu' or 'gelu'");
}

inline Epilogue epilogue_named(const std::string& name) {
  if (name == "store") return Epilogue::store;
  if (name == "add") return Epilogue::add;
  if (name == "gate") return Epilogue::gate;
  throw std::invalid_argument("epilogue is '" + name + "'; it must be 'store', 'add' or 'gate'");
}

}  // namespace giveway
