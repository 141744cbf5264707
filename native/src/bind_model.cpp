// The whole-step model for Python.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "bind.h"
#include "isa.h"
#include "model.h"

namespace nb = nanobind;

namespace giveway {
namespace {

template <typename Array>
Floats floats_of(const Array& array) {
  return Floats(array.data(), array.data() + array.size());
}

// `kind`: what it must be, for the message. may_convert: an integer is a float, too; for arrays see array_arg().
template <typename T>
T converted(nb::handle value, const std::string& name, const char* kind, bool may_convert = true) {
  T result;
  if (nb::try_cast(value, result, may_convert)) return result;
  const std::string type = nb::cast<std::string>(nb::type_name(value.type()));
  throw nb::type_error((name + " is of the type " + type + "; it must be " + kind).c_str());
}

template <typename T>
T item(const nb::dict& values, const char* name, const char* kind, bool may_convert = true) {
  if (!values.contains(name)) throw std::invalid_argument(std::string("'") + name + "' is missing");
  return converted<T>(values[name], std::string("'") + name + "'", kind, may_convert);
}

int64_t size_item(const nb::dict& values, const char* name) {
  return item<int64_t>(values, name, "a whole number below 2**63");
}

float number_item(const nb::dict& values, const char* name) { return item<float>(values, name, "a number"); }

std::string name_item(const nb::dict& values, const char* name) { return item<std::string>(values, name, "a string"); }

Floats vector_item(const nb::dict& values, const char* name) {
  if (!values.contains(name) || values[name].is_none()) return {};
  return floats_of(item<InArray<float, 1>>(values, name, "a contiguous array of float32 with one dimension", false));
}

SharedMatrix matrix_item(const nb::dict& values, const char* name) {
  return item<std::shared_ptr<Matrix>>(values, name, "a Matrix");
}

LayerWeights layer_of(const nb::dict& values) {
  LayerWeights layer;
  layer.input_norm = vector_item(values, "input_norm");
  layer.post_norm = vector_item(values, "post_norm");
  layer.query = matrix_item(values, "query");
  layer.key = matrix_item(values, "key");
  layer.value = matrix_item(values, "value");
  layer.query_bias = vector_item(values, "query_bias");
  layer.key_bias = vector_item(values, "key_bias");
  layer.value_bias = vector_item(values, "value_bias");
  layer.query_norm = vector_item(values, "query_norm");
  layer.key_norm = vector_item(values, "key_norm");
  layer.output = matrix_item(values, "output");
  layer.output_bias = vector_item(values, "output_bias");
  layer.gate_up = matrix_item(values, "gate_up");
  layer.down = matrix_item(values, "down");
  return layer;
}

ModelShape shape_of(const nb::dict& values) {
  ModelShape shape;
  shape.vocab_size = size_item(values, "vocab_size");
  shape.hidden_size = size_item(values, "hidden_size");
  shape.intermediate_size = size_item(values, "intermediate_size");
  shape.num_layers = size_item(values, "num_layers");
  shape.num_heads = size_item(values, "num_heads");
  shape.num_kv_heads = size_item(values, "num_kv_heads");
  shape.head_size = size_item(values, "head_size");
  shape.norm_eps = number_item(values, "norm_eps");
  shape.window = size_item(values, "window");
  shape.soft_cap = number_item(values, "soft_cap");
  shape.gate = gate_named(name_item(values, "gate"));
  shape.compute = compute_named(name_item(values, "compute"));
  return shape;
}

std::shared_ptr<Model> make_model(const nb::dict& shape, const nb::list& layers, std::shared_ptr<Matrix> embedding,
                                  std::shared_ptr<Matrix> head, const InArray<float, 1>& final_norm,
                                  const std::string& isa) {
  ModelWeights weights;
  for (nb::handle layer : layers) weights.layers.push_back(layer_of(converted<nb::dict>(layer, "a layer", "a dict")));
  weights.embedding = std::move(embedding);
  weights.head = std::move(head);
  weights.final_norm = floats_of(final_norm);
  const Kernels& kernels = isa.empty() ? chosen_kernels() : kernels_named(isa);
  return std::make_shared<Model>(shape_of(shape), std::move(weights), kernels);
}

void set_angles(Model& model, const InArray<float, 2>& cosine, const InArray<float, 2>& sine) {
  const int64_t half = model.shape().head_size / 2;
  for (const auto& angles : {cosine, sine})
    require(angles.shape(0) == cosine.shape(0) && static_cast<int64_t>(angles.shape(1)) == half,
            "cosine and sine must both be [positions, head_size / 2 = " + std::to_string(half) + "]");
  Floats cosines = floats_of(cosine), sines = floats_of(sine);
  const nb::gil_scoped_release released;
  model.set_angles(std::move(cosines), std::move(sines));
}

KvLayout layout_of(const Model& model, int64_t block_size) {
  const KvLayout layout = model.kv_layout(block_size);
  check_layout(layout);
  return layout;
}

// tokens [rows]; num_rows, starts [sequences]; tables: all block tables one after another, table_ends [sequences].
void run(Model& model, const InArray<int32_t, 1>& tokens, const InArray<int64_t, 1>& num_rows,
         const InArray<int64_t, 1>& starts, const InArray<int32_t, 1>& tables, const InArray<int64_t, 1>& table_ends,
         const OutArray<uint8_t, 1>& pool, int64_t num_blocks, int64_t block_size, int64_t num_threads) {
  const size_t num_sequences = num_rows.shape(0);
  require(starts.shape(0) == num_sequences && table_ends.shape(0) == num_sequences,
          "the arrays of the sequences differ in length");
  const int num_used = checked_threads(num_threads);
  const int64_t block_bytes = layout_of(model, block_size).block_bytes();
  require(num_blocks >= 0 && static_cast<int64_t>(pool.shape(0)) / block_bytes >= num_blocks,
          "the pool is smaller than its blocks");
  Batch batch;
  batch.tokens = tokens.data();
  batch.num_rows = static_cast<int64_t>(tokens.shape(0));
  int64_t first_row = 0, table_start = 0;
  for (size_t index = 0; index < num_sequences; ++index) {
    const int64_t end = table_ends.data()[index];
    require(table_start <= end && end <= static_cast<int64_t>(tables.shape(0)),
            "the ends of the block tables are out of order");
    const int64_t count = num_rows.data()[index];
    batch.sequences.push_back({first_row, count, starts.data()[index], tables.data() + table_start, end - table_start});
    first_row += std::clamp<int64_t>(count, 0, batch.num_rows);  // too many are found out by the model
    table_start = end;
  }
  const Pool blocks{reinterpret_cast<std::byte*>(pool.data()), num_blocks, block_size};
  const nb::gil_scoped_release released;
  model.run(batch, blocks, num_used);
}

void logits(Model& model, const InArray<int64_t, 1>& rows, const OutArray<float, 2>& out, int64_t num_threads) {
  require(out.shape(0) >= rows.shape(0) && static_cast<int64_t>(out.shape(1)) == model.logits_stride(),
          "the array for the logits has the wrong shape");
  const int num_used = checked_threads(num_threads);
  const std::vector<int64_t> wanted(rows.data(), rows.data() + rows.shape(0));
  const nb::gil_scoped_release released;
  model.logits(wanted, out.data(), num_used);
}

}  // namespace

void bind_model(nb::module_& m) {
  nb::class_<Model>(
      m, "Model",
      "A decoder of the Llama family. One call computes a whole step. Calls of several Python threads wait for each "
      "other;\nwhoever wants the logits of a step keeps others from running one in between.")
      .def_static("make", &make_model, nb::arg("shape"), nb::arg("layers"), nb::kw_only(), nb::arg("embedding"),
                  nb::arg("head"), array_arg("final_norm"), nb::arg("isa") = "",
                  "shape: sizes by name; layers: a dict of matrices and float32 vectors each. isa: empty for the "
                  "chosen one.\n"
                  "Raises TypeError when something is of the wrong type, ValueError when a shape does not fit.")
      .def("set_angles", &set_angles, array_arg("cosine"), array_arg("sine"),
           "Give the angles of rotation of all positions that can be computed from now on; without them there are "
           "none.\n"
           "cosine, sine: float32 [positions, head size / 2]. Raises ValueError.")
      .def("run", &run, nb::kw_only(), array_arg("tokens"), array_arg("num_rows"), array_arg("starts"),
           array_arg("tables"), array_arg("table_ends"), array_arg("pool"), nb::arg("num_blocks"),
           nb::arg("block_size"), nb::arg("num_threads"),
           "Run all layers over a batch and write its KV. Raises IndexError, before anything is written, for an id out "
           "of range.")
      .def("logits", &logits, array_arg("rows"), array_arg("out"), nb::arg("num_threads"),
           "Write the logits after rows of the last step into out, float32 [rows, logits_stride]. Raises IndexError.")
      .def("kv_block_bytes",
           [](const Model& model, int64_t block_size) { return layout_of(model, block_size).block_bytes(); })
      .def_prop_ro("logits_stride", &Model::logits_stride)
      .def_prop_ro("weight_bytes", &Model::weight_bytes)
      .def_prop_ro("instruction_set", [](const Model& model) { return std::string(model.kernels().name); });
}

}  // namespace giveway
