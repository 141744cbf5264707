// Weights from numpy arrays of stored bytes.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <memory>
#include <tuple>
#include <vector>

#include "bind_rows.h"

namespace nb = nanobind;

namespace giveway {
namespace {

using Rows = InArray<uint8_t, 2>;
using Part = std::tuple<std::string, Rows>;

Source source_named(const std::string& name) {
  constexpr const char* kNames[] = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"};
  for (int index = 0; index < 6; ++index)
    if (name == kNames[index]) return static_cast<Source>(index);
  throw std::invalid_argument("weights stored as '" + name + "' cannot be packed");
}

const char* encoding_name(Encoding encoding) {
  constexpr const char* kNames[] = {"f32", "bf16", "q8_0", "q4_0", "q4_1"};
  return kNames[static_cast<int>(encoding)];
}

// Output of row `row` of part `part`: one part below the other, or, interleaved, panel by panel in turn.
int64_t output_of(size_t part, int64_t row, int64_t first_output, size_t num_parts, bool is_interleaved) {
  if (!is_interleaved) return first_output + row;
  return (row / kPanelColumns * static_cast<int64_t>(num_parts) + static_cast<int64_t>(part)) * kPanelColumns +
         row % kPanelColumns;
}

std::shared_ptr<Matrix> pack(const std::vector<Part>& parts, int64_t num_inputs, const std::string& compute,
                             bool is_interleaved, int64_t num_threads, const std::string& isa) {
  require(!parts.empty(), "nothing to pack");
  check_sizes("a row of weights", {num_inputs, sizeof(float)});
  const int num_used = checked_threads(num_threads);
  std::vector<Source> sources;
  int64_t num_outputs = 0;
  bool is_mixed = false;
  for (const auto& [name, rows] : parts) {
    sources.push_back(source_named(name));
    const int64_t row_bytes = source_row_bytes(sources.back(), num_inputs);
    require(row_bytes == static_cast<int64_t>(rows.shape(1)),
            "a stored row of " + std::to_string(num_inputs) + " inputs as " + name + " has " +
                std::to_string(row_bytes) + " bytes, not " + std::to_string(rows.shape(1)));
    require(!is_interleaved || (rows.shape(0) % kPanelColumns == 0 && rows.shape(0) == std::get<1>(parts[0]).shape(0)),
            "parts that are interleaved need equal numbers of outputs, a multiple of 16");
    num_outputs += static_cast<int64_t>(rows.shape(0));
    is_mixed = is_mixed || sources.back() != sources.front();
  }
  require(num_outputs > 0, "nothing to pack");
  const Compute type = compute_named(compute);
  // Parts stored in different ways are widened to what is multiplied.
  const Encoding encoding =
      is_mixed ? (type == Compute::bf16 ? Encoding::bf16 : Encoding::f32) : encoding_of(sources[0], type);
  const PanelOrder order = kernels_or_chosen(isa).panel_order(type);
  nb::gil_scoped_release released;
  auto matrix = std::make_shared<Matrix>(encoding, order, num_outputs, num_inputs);
  int64_t first_output = 0;
  for (size_t part = 0; part < parts.size(); ++part) {
    const Rows& rows = std::get<1>(parts[part]);
    const auto num_rows = static_cast<int64_t>(rows.shape(0)), row_bytes = static_cast<int64_t>(rows.shape(1));
    // A panel is one thread's: its rows lie side by side in memory.
#pragma omp parallel for num_threads(num_used) schedule(static)
    for (int64_t panel = 0; panel < (num_rows + kPanelColumns - 1) / kPanelColumns; ++panel)
      for (int64_t row = panel * kPanelColumns; row < std::min((panel + 1) * kPanelColumns, num_rows); ++row)
        matrix->pack_row(output_of(part, row, first_output, parts.size(), is_interleaved), sources[part],
                         rows.data() + row * row_bytes);
    first_output += num_rows;
  }
  return matrix;
}

}  // namespace

void bind_matrix(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix", "A weight matrix [num_outputs, num_inputs], packed for the products of this library.")
      .def_static("pack", &pack, array_arg("parts"), nb::kw_only(), nb::arg("num_inputs"), nb::arg("compute"),
                  nb::arg("is_interleaved") = false, nb::arg("num_threads") = 1, nb::arg("isa") = "",
                  "Pack stored rows. parts: (encoding as in the file, uint8 [rows, bytes of a row]); one below the "
                  "other, or panels\n"
                  "of 16 outputs in turn. compute: 'f32' or 'bf16'. isa: the instruction set that is to multiply it "
                  "(empty: the "
                  "chosen one);\n"
                  "some lay weights out in their own order. Raises ValueError.")
      .def_prop_ro("num_outputs", [](const Matrix& matrix) { return matrix.panels().num_outputs; })
      .def_prop_ro("num_inputs", [](const Matrix& matrix) { return matrix.panels().num_inputs; })
      .def_prop_ro("num_bytes", [](const Matrix& matrix) { return matrix.panels().bytes(); })
      .def_prop_ro("encoding",
                   [](const Matrix& matrix) { return std::string(encoding_name(matrix.panels().encoding)); });
}

}  // namespace giveway
