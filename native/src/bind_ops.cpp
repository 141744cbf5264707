// Single kernels for Python: what tests compare. A step never comes here.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <omp.h>

#include <cstring>
#include <memory>
#include <optional>

#include "bind_rows.h"

namespace nb = nanobind;

namespace giveway {
namespace {

// x @ matrix.T. Panels are shared out among threads; each has scratch of its own.
OwnedFloats multiply(const InArray<float, 2>& x, const std::shared_ptr<Matrix>& matrix, const std::string& compute,
                     const std::string& isa, int64_t num_threads, const std::string& epilogue, const std::string& gate,
                     const std::optional<InArray<float, 1>>& bias, const std::optional<InArray<float, 2>>& onto) {
  const Kernels& kernels = kernels_or_chosen(isa);
  const Panels& panels = matrix->panels();
  require(static_cast<int64_t>(x.shape(1)) == panels.num_inputs, "x has the wrong number of columns");
  const Epilogue kind = epilogue_named(epilogue);
  require(kind != Epilogue::gate || panels.num_outputs % (2 * kPanelColumns) == 0, "a gate needs pairs of panels");
  const auto num_rows = static_cast<int64_t>(x.shape(0));
  const int64_t stride = panels.num_panels() * kPanelColumns;
  const Compute type = compute_named(compute);
  const Gate activation = gate_named(gate);  // here: nothing may be thrown out of a thread
  const int num_used = checked_threads(num_threads);
  check_order(panels, kernels, type);
  require(!bias || (kind != Epilogue::gate && static_cast<int64_t>(bias->shape(0)) == panels.num_outputs),
          "bias must have an element for each output, and goes with no gate");
  require(!onto || (kind == Epilogue::add && onto->shape(0) == x.shape(0) &&
                    static_cast<int64_t>(onto->shape(1)) == panels.num_outputs),
          "onto must be [rows, outputs], and goes with the epilogue 'add'");
  Activations input(kernels, type, num_rows, panels.num_inputs), gated(kernels, type, num_rows, stride / 2);
  AlignedBuffer sums(num_rows * stride * 4), padded_bias(stride * 4);
  if (bias) std::memcpy(padded_bias.data(), bias->data(), bias->size() * 4);
  if (onto)
    for (int64_t row = 0; row < num_rows; ++row)
      std::memcpy(sums.data() + row * stride * 4, onto->data() + row * panels.num_outputs,
                  static_cast<size_t>(panels.num_outputs) * 4);
  const int64_t scratch_bytes = rounded_up(kernels.matmul_scratch_bytes(panels.num_inputs), kAlignment);
  AlignedBuffer scratch(scratch_bytes * num_used);
  {
    nb::gil_scoped_release released;
    const int64_t unit = kind == Epilogue::gate ? 2 : 1, num_units = panels.num_panels() / unit;
#pragma omp parallel num_threads(num_used)
    {
      const uint32_t state = kernels.enter();
      const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; ++row)
        kernels.to_activations(x.data() + row * panels.num_inputs, panels.num_inputs, type, input.row(row));
      MatmulArgs args;
      args.x = input.row(0), args.x_stride = input.stride, args.num_rows = num_rows, args.weights = &panels;
      args.first_panel = num_units * thread / count * unit, args.last_panel = num_units * (thread + 1) / count * unit;
      args.compute = type, args.epilogue = kind, args.gate = activation;
      args.bias = bias ? reinterpret_cast<const float*>(padded_bias.data()) : nullptr;
      args.out = kind == Epilogue::gate ? gated.row(0) : sums.data();
      args.out_stride = kind == Epilogue::gate ? gated.stride : stride;
      args.scratch = scratch.data() + thread * scratch_bytes;
      kernels.matmul(args);
      kernels.leave(state);
    }
  }
  const int64_t num_columns = kind == Epilogue::gate ? stride / 2 : panels.num_outputs;
  OwnedFloats out = floats(num_rows, num_columns);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t column = 0; column < num_columns; ++column)
      out.data()[row * num_columns + column] = kind == Epilogue::gate
                                                   ? gated.value(row, column)
                                                   : reinterpret_cast<const float*>(sums.data())[row * stride + column];
  return out;
}

OwnedFloats rms_norm(const InArray<float, 2>& rows, const InArray<float, 1>& weight, float eps,
                     const std::string& compute, const std::string& isa) {
  const Kernels& kernels = kernels_or_chosen(isa);
  const auto num_rows = static_cast<int64_t>(rows.shape(0)), size = static_cast<int64_t>(rows.shape(1));
  require(size > 0 && static_cast<int64_t>(weight.shape(0)) == size, "weight has the wrong size");
  Activations normed(kernels, compute_named(compute), num_rows, size);
  const uint32_t state = kernels.enter();
  for (int64_t row = 0; row < num_rows; ++row)
    kernels.rms_norm(rows.data() + row * size, weight.data(), size, eps, compute_named(compute), normed.row(row));
  kernels.leave(state);
  OwnedFloats out = floats(num_rows, normed.stride);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t column = 0; column < normed.stride; ++column)
      out.data()[row * normed.stride + column] = normed.value(row, column);
  return out;
}

OwnedFloats embed(const std::shared_ptr<Matrix>& table, const InArray<int64_t, 1>& tokens, const std::string& isa) {
  const Kernels& kernels = kernels_or_chosen(isa);
  const Panels& panels = table->panels();
  OwnedFloats out = floats(static_cast<int64_t>(tokens.shape(0)), panels.num_inputs);
  for (size_t index = 0; index < tokens.shape(0); ++index) {
    const int64_t token = tokens.data()[index];
    if (token < 0 || token >= panels.num_outputs) throw std::out_of_range("token outside the table");
    kernels.embed(panels, token, out.data() + static_cast<int64_t>(index) * panels.num_inputs);
  }
  return out;
}

}  // namespace

void bind_ops(nb::module_& m) {
  m.def("multiply", &multiply, array_arg("x"), nb::arg("matrix"), nb::kw_only(), nb::arg("compute") = "f32",
        nb::arg("isa") = "", nb::arg("num_threads") = 1, nb::arg("epilogue") = "store", nb::arg("gate") = "silu",
        array_arg("bias") = nb::none(), array_arg("onto") = nb::none(),
        "x [rows, inputs] times a packed matrix, float32 [rows, outputs]. epilogue 'add' adds to `onto`.");
  m.def("rms_norm", &rms_norm, array_arg("rows"), array_arg("weight"), nb::kw_only(), nb::arg("eps"),
        nb::arg("compute") = "f32", nb::arg("isa") = "",
        "RMSNorm as activations, widened: float32 [rows, size, and zeros up to an odd number of blocks of 32].");
  m.def("embed", &embed, nb::arg("table"), array_arg("tokens"), nb::kw_only(), nb::arg("isa") = "",
        "Rows of a packed matrix, float32 [tokens, inputs].");
}

}  // namespace giveway
