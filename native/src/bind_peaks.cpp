// What `giveway bench kernels` measures, for Python: the peaks of this machine, and each kernel as a workload.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>

#include "bind_rows.h"
#include "work_counter.h"
#include "workload.h"

namespace nb = nanobind;

namespace giveway {
namespace {

double seconds_since(std::chrono::steady_clock::time_point started) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

// Operations per second of all threads together, which multiply for about so many seconds.
double multiply_peak(const std::string& compute, const std::string& isa, int64_t num_threads, double seconds) {
  constexpr int64_t kRounds = 1000;  // between two looks at the clock: some microseconds
  const int count = checked_threads(num_threads);
  const Kernels& kernels = kernels_or_chosen(isa);
  const Compute type = compute_named(compute);
  const nb::gil_scoped_release released;
  double peak = 0;
#pragma omp parallel num_threads(count) reduction(+ : peak)
  {
    const uint32_t state = kernels.enter();
    int64_t num_operations = 0;
    const auto started = std::chrono::steady_clock::now();
    do num_operations += kernels.multiply_peak(type, kRounds);
    while (seconds_since(started) < seconds);
    peak += static_cast<double>(num_operations) / seconds_since(started);
    kernels.leave(state);
  }
  return peak;
}

// Bytes per second of all threads together. They take pieces, so that a slow one holds up little.
double read_peak(const InArray<uint8_t, 1>& buffer, const std::string& isa, int64_t num_threads) {
  constexpr int64_t kPieceBytes = int64_t{1} << 20;
  const int count = checked_threads(num_threads);
  require(static_cast<int64_t>(buffer.shape(0)) >= kPieceBytes, "the buffer must have at least 1 MiB");
  const Kernels& kernels = kernels_or_chosen(isa);
  const int64_t num_pieces = static_cast<int64_t>(buffer.shape(0)) / kPieceBytes;
  const auto* data = reinterpret_cast<const std::byte*>(buffer.data());
  const nb::gil_scoped_release released;
  WorkCounter pieces;
  const auto started = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(count)
  {
    const uint32_t state = kernels.enter();
    pieces.share({num_pieces, 1, 1}, this_member(), [&](int64_t first, int64_t last) {
      kernels.read_peak(data + first * kPieceBytes, (last - first) * kPieceBytes);
    });
    kernels.leave(state);
  }
  return static_cast<double>(num_pieces * kPieceBytes) / seconds_since(started);
}

std::shared_ptr<Workload> product(std::shared_ptr<Matrix> matrix, int64_t num_rows, int64_t num_outputs,
                                  const std::string& compute, const std::string& epilogue, const std::string& isa) {
  const ProductShape shape{num_rows, num_outputs, compute_named(compute), epilogue_named(epilogue)};
  const int64_t unit = shape.epilogue == Epilogue::gate ? 2 * kPanelColumns : kPanelColumns;
  require(num_outputs > 0 && num_outputs % unit == 0,
          "the outputs of a product must be a multiple of " + std::to_string(unit));
  require(num_outputs <= matrix->panels().num_outputs, "the matrix has fewer outputs than the product");
  check_sizes("rows", {num_rows, activation_stride(std::max(num_outputs, matrix->panels().num_inputs)), sizeof(float)});
  const Kernels& kernels = kernels_or_chosen(isa);
  check_order(matrix->panels(), kernels, shape.compute);
  return std::make_shared<ProductWorkload>(kernels, std::move(matrix), shape);
}

AttentionShape attention_shape(int64_t num_sequences, int64_t num_rows, int64_t context, int64_t num_heads,
                               int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                               const std::string& compute) {
  require(num_sequences > 0 && num_rows > 0 && context >= num_rows,
          "sequences have at least one row, and no more rows than positions");
  check_heads(num_heads, num_kv_heads, head_size);
  const AttentionShape shape{num_sequences, num_rows,  context,    num_heads,
                             num_kv_heads,  head_size, block_size, compute_named(compute)};
  check_layout(shape.layout());
  check_sizes("positions", {num_sequences, context, num_kv_heads, head_size, shape.layout().element_bytes()});
  check_sizes("the rows", {num_sequences, num_rows, num_heads + 2 * num_kv_heads, head_size, sizeof(float)});
  check_sizes("the KV pool", {num_sequences, shape.blocks_of_sequence(), shape.layout().block_bytes()});
  require(num_sequences * shape.blocks_of_sequence() <= std::numeric_limits<int32_t>::max(),
          "the sequences have more KV blocks than block ids there are");
  return shape;
}

std::shared_ptr<Workload> attention(int64_t num_sequences, int64_t num_rows, int64_t context, int64_t num_heads,
                                    int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                                    const std::string& compute, const std::string& isa) {
  const AttentionShape shape =
      attention_shape(num_sequences, num_rows, context, num_heads, num_kv_heads, head_size, block_size, compute);
  return std::make_shared<AttentionWorkload>(kernels_or_chosen(isa), shape);
}

std::shared_ptr<Workload> rotation(int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
                                   int64_t block_size, const std::string& compute, const std::string& isa) {
  const AttentionShape shape =
      attention_shape(1, num_rows, num_rows, num_heads, num_kv_heads, head_size, block_size, compute);
  return std::make_shared<RotationWorkload>(kernels_or_chosen(isa), shape);
}

std::shared_ptr<Workload> norm(int64_t num_rows, int64_t size, const std::string& compute, const std::string& isa) {
  check_sizes("rows", {num_rows, size, sizeof(float)});
  return std::make_shared<NormWorkload>(kernels_or_chosen(isa), num_rows, size, compute_named(compute));
}

double run(Workload& workload, int64_t num_turns, int64_t num_threads) {
  constexpr int64_t kMostTurns = 1'000'000;  // each has a counter
  require(num_turns > 0 && num_turns <= kMostTurns,
          "num_turns is " + std::to_string(num_turns) + "; it must be from 1 to " + std::to_string(kMostTurns));
  const int count = checked_threads(num_threads);
  const nb::gil_scoped_release released;
  return workload.run(num_turns, count);
}

}  // namespace

void bind_peaks(nb::module_& m) {
  m.def("multiply_peak", &multiply_peak, nb::arg("compute"), nb::kw_only(), nb::arg("isa") = "",
        nb::arg("num_threads") = 1, nb::arg("seconds") = 0.005,
        "Operations per second of multiply-adds (two operations each) in registers, of all threads together. Takes "
        "about so many seconds.");
  m.def("read_peak", &read_peak, array_arg("buffer"), nb::kw_only(), nb::arg("isa") = "", nb::arg("num_threads") = 1,
        "Bytes per second at which all threads together read a uint8 buffer once, in whole MiB.");
  nb::class_<Workload>(
      m, "Workload", "One kernel over and over on data of its own, shared out among threads as in a step: for timing.")
      .def_static("product", &product, nb::arg("matrix"), nb::kw_only(), nb::arg("num_rows"), nb::arg("num_outputs"),
                  nb::arg("compute"), nb::arg("epilogue") = "store", nb::arg("isa") = "",
                  "Rows times the next num_outputs of the matrix's outputs; each turn goes on where the last ended.")
      .def_static("attention", &attention, nb::kw_only(), nb::arg("num_sequences"), nb::arg("num_rows"),
                  nb::arg("context"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_size"),
                  nb::arg("block_size"), nb::arg("compute"), nb::arg("isa") = "",
                  "Attention of the last num_rows of `context` positions of every sequence, in one layer.")
      .def_static("rotation", &rotation, nb::kw_only(), nb::arg("num_rows"), nb::arg("num_heads"),
                  nb::arg("num_kv_heads"), nb::arg("head_size"), nb::arg("block_size"), nb::arg("compute"),
                  nb::arg("isa") = "",
                  "Rotation of queries and keys of consecutive positions, and storing of their KV.")
      .def_static("norm", &norm, nb::kw_only(), nb::arg("num_rows"), nb::arg("size"), nb::arg("compute"),
                  nb::arg("isa") = "", "RMSNorm of rows.")
      .def("run", &run, nb::arg("num_turns"), nb::kw_only(), nb::arg("num_threads") = 1,
           "Do so many turns; returns the seconds they took.");
}

}  // namespace giveway
