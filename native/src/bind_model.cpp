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

Floats floats_of(nb::handle array) {
  if (array.is_none()) return {};
  const auto values = nb::cast<InArray<float, 1>>(array);
  return Floats(values.data(), values.data() + values.size());
}

template <typename T>
T item(const nb::dict& values, const char* name) {
  if (!values.contains(name)) throw std::invalid_argument(std::string("'") + name + "' is missing");
  return nb::cast<T>(values[name]);
}

Floats vector_item(const nb::dict& values, const char* name) {
  return values.contains(name) ? floats_of(values[name]) : Floats{};
}

SharedMatrix matrix_item(const nb::dict& values, const char* name) {
  return item<std::shared_ptr<Matrix>>(values, name);
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
  shape.vocab_size = item<int64_t>(values, "vocab_size");
  shape.hidden_size = item<int64_t>(values, "hidden_size");
  shape.intermediate_size = item<int64_t>(values, "intermediate_size");
  shape.num_layers = item<int64_t>(values, "num_layers");
  shape.num_heads = item<int64_t>(values, "num_heads");
  shape.num_kv_heads = item<int64_t>(values, "num_kv_heads");
  shape.head_size = item<int64_t>(values, "head_size");
  shape.norm_eps = item<float>(values, "norm_eps");
  shape.window = item<int64_t>(values, "window");
  shape.soft_cap = item<float>(values, "soft_cap");
  shape.gate = gate_named(item<std::string>(values, "gate"));
  shape.compute = compute_named(item<std::string>(values, "compute"));
  return shape;
}

std::shared_ptr<Model> make_model(const nb::dict& shape, const nb::list& layers, std::shared_ptr<Matrix> embedding,
                                  std::shared_ptr<Matrix> head, const InArray<float, 1>& final_norm,
                                  const InArray<float, 2>& cosine, const InArray<float, 2>& sine,
                                  const std::string& isa) {
  ModelWeights weights;
  for (nb::handle layer : layers) weights.layers.push_back(layer_of(nb::cast<nb::dict>(layer)));
  weights.embedding = std::move(embedding);
  weights.head = std::move(head);
  weights.final_norm.assign(final_norm.data(), final_norm.data() + final_norm.size());
  const Kernels& kernels = isa.empty() ? chosen_kernels() : kernels_named(isa);
  return std::make_shared<Model>(shape_of(shape), std::move(weights),
                                 Floats(cosine.data(), cosine.data() + cosine.size()),
                                 Floats(sine.data(), sine.data() + sine.size()), kernels);
}

// tokens [rows]; num_rows, starts [sequences]; tables: all block tables one after another, table_ends [sequences].
void run(Model& model, const InArray<int32_t, 1>& tokens, const InArray<int64_t, 1>& num_rows,
         const InArray<int64_t, 1>& starts, const InArray<int32_t, 1>& tables, const InArray<int64_t, 1>& table_ends,
         const OutArray<uint8_t, 1>& pool, int64_t num_blocks, int64_t block_size, int num_threads) {
  const size_t num_sequences = num_rows.shape(0);
  require(starts.shape(0) == num_sequences && table_ends.shape(0) == num_sequences,
          "the arrays of the sequences differ in length");
  require(num_threads > 0, "at least one thread is needed");
  require(block_size > 0 && num_blocks >= 0 &&
              static_cast<int64_t>(pool.shape(0)) / model.kv_layout(block_size).block_bytes() >= num_blocks,
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
  nb::gil_scoped_release released;
  model.run(batch, blocks, num_threads);
}

void logits(Model& model, const InArray<int64_t, 1>& rows, const OutArray<float, 2>& out, int num_threads) {
  require(out.shape(0) >= rows.shape(0) && static_cast<int64_t>(out.shape(1)) == model.logits_stride(),
          "the array for the logits has the wrong shape");
  require(num_threads > 0, "at least one thread is needed");
  const std::vector<int64_t> wanted(rows.data(), rows.data() + rows.shape(0));
  nb::gil_scoped_release released;
  model.logits(wanted, out.data(), num_threads);
}

}  // namespace

void bind_model(nb::module_& m) {
  nb::class_<Model>(m, "Model", "A decoder of the Llama family. One call computes a whole step.")
      .def_static("make", &make_model, nb::arg("shape"), nb::arg("layers"), nb::kw_only(), nb::arg("embedding"),
                  nb::arg("head"), nb::arg("final_norm"), nb::arg("cosine"), nb::arg("sine"), nb::arg("isa") = "",
                  "shape: sizes by name; layers: a dict of matrices and float32 vectors each; cosine, sine: "
                  "[positions, head size / 2].\n"
                  "isa: empty for the chosen one. Raises ValueError when a shape does not fit.")
      .def("run", &run, nb::kw_only(), nb::arg("tokens"), nb::arg("num_rows"), nb::arg("starts"), nb::arg("tables"),
           nb::arg("table_ends"), nb::arg("pool"), nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("num_threads"),
           "Run all layers over a batch and write its KV. Raises IndexError, before anything is written, for an id out "
           "of range.")
      .def("logits", &logits, nb::arg("rows"), nb::arg("out"), nb::arg("num_threads"),
           "Write the logits after rows of the last step into out, float32 [rows, logits_stride]. Raises IndexError.")
      .def("kv_block_bytes",
           [](const Model& model, int64_t block_size) { return model.kv_layout(block_size).block_bytes(); })
      .def_prop_ro("logits_stride", &Model::logits_stride)
      .def_prop_ro("weight_bytes", &Model::weight_bytes)
      .def_prop_ro("instruction_set", [](const Model& model) { return std::string(model.kernels().name); });
}

}  // namespace giveway
