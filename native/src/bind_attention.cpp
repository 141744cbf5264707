// Rotation and attention of one chunk of one request for Python: what tests compare.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>

#include "bind_rows.h"

namespace nb = nanobind;

namespace giveway {
namespace {

using OptionalNorm = std::optional<InArray<float, 1>>;

const float* norm_or_null(const OptionalNorm& norm, int64_t head_size) {
  if (!norm) return nullptr;
  require(static_cast<int64_t>(norm->shape(0)) == head_size, "a norm of heads has the wrong size");
  return norm->data();
}

void require_table(const InArray<int32_t, 1>& table, int64_t num_positions, int64_t block_size,
                   int64_t num_pool_blocks) {
  require(static_cast<int64_t>(table.shape(0)) >= (num_positions + block_size - 1) / block_size,
          "the table does not cover the chunk");
  const auto inside = [&](int32_t block) { return block >= 0 && block < num_pool_blocks; };
  require(std::all_of(table.data(), table.data() + table.shape(0), inside),
          "a block of the table is not within the pool");
}

void require_layout(const KvLayout& layout, int64_t num_heads, int64_t layer) {
  check_heads(num_heads, layout.num_kv_heads, layout.head_size);
  check_layout(layout);
  require(layer >= 0 && layer < layout.num_layers, "layer is not below num_layers");
}

OwnedFloats attend(const InArray<float, 2>& qkv, const InArray<int32_t, 1>& table, const OutArray<uint8_t, 1>& pool,
                   int64_t start, int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                   const InArray<float, 2>& cosine, const InArray<float, 2>& sine, float scale,
                   const OptionalNorm& query_norm, const OptionalNorm& key_norm, float norm_eps, int64_t window,
                   float soft_cap, int64_t num_layers, int64_t layer, const std::string& compute,
                   const std::string& isa) {
  const Kernels& kernels = kernels_or_chosen(isa);
  const KvLayout layout{num_layers, num_kv_heads, head_size, block_size, compute_named(compute)};
  require_layout(layout, num_heads, layer);
  const auto num_rows = static_cast<int64_t>(qkv.shape(0)), num_columns = (num_heads + 2 * num_kv_heads) * head_size;
  require(static_cast<int64_t>(qkv.shape(1)) == num_columns, "qkv has the wrong number of columns");
  for (const auto& angles : {cosine, sine})
    require(static_cast<int64_t>(angles.shape(0)) == num_rows && static_cast<int64_t>(angles.shape(1)) == head_size / 2,
            "cosine and sine must be [rows, head_size / 2]");
  require(start >= 0 && start <= kMostBytes, "start is " + std::to_string(start) + "; it must be a position");
  check_window(window);
  const int64_t num_blocks = static_cast<int64_t>(pool.size()) / layout.block_bytes();
  require_table(table, start + num_rows, block_size, num_blocks);

  Activations queries(kernels, layout.compute, num_rows, num_heads * head_size),
      out(kernels, layout.compute, num_rows, num_heads * head_size);
  AlignedBuffer scratch(kernels.attention_scratch_bytes(layout, num_heads / num_kv_heads));
  RotateArgs turn;
  turn.num_heads = num_heads, turn.query_norm = norm_or_null(query_norm, head_size),
  turn.key_norm = norm_or_null(key_norm, head_size);
  turn.norm_eps = norm_eps, turn.pool = reinterpret_cast<std::byte*>(pool.data()), turn.layout = layout,
  turn.layer = layer;
  AttentionArgs args;
  args.queries = queries.row(0), args.query_stride = queries.stride, args.out = out.row(0),
  args.out_stride = out.stride;
  args.num_rows = num_rows, args.start = start, args.table = table.data(), args.num_pool_blocks = num_blocks,
  args.pool = turn.pool;
  args.layout = layout, args.layer = layer, args.group_size = num_heads / num_kv_heads, args.scale = scale,
  args.window = window_among(start + num_rows, window);
  args.soft_cap = soft_cap, args.scratch = scratch.data();

  const uint32_t state = kernels.enter();
  for (int64_t row = 0; row < num_rows; ++row) {
    turn.qkv = qkv.data() + row * num_columns, turn.queries = queries.row(row);
    turn.cosine = cosine.data() + row * (head_size / 2), turn.sine = sine.data() + row * (head_size / 2);
    turn.block = table.data()[(start + row) / block_size], turn.offset = (start + row) % block_size;
    turn.clears_rest = row + 1 == num_rows;
    kernels.rotate(turn);
  }
  const int64_t together = heads_together(num_rows, args.group_size, num_kv_heads);
  for (args.kv_head = 0; args.kv_head < num_kv_heads; args.kv_head += together) {
    args.num_kv_heads = std::min(together, num_kv_heads - args.kv_head);
    kernels.attention(args);
  }
  kernels.leave(state);

  OwnedFloats values = floats(num_rows, out.stride);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t column = 0; column < out.stride; ++column)
      values.data()[row * out.stride + column] = out.value(row, column);
  return values;
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attend", &attend, array_arg("qkv"), array_arg("table"), array_arg("pool"), nb::kw_only(), nb::arg("start"),
        nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_size"), nb::arg("block_size"), array_arg("cosine"),
        array_arg("sine"), nb::arg("scale"), array_arg("query_norm") = nb::none(), array_arg("key_norm") = nb::none(),
        nb::arg("norm_eps") = 0.0f, nb::arg("window") = 0, nb::arg("soft_cap") = 0.0f, nb::arg("num_layers") = 1,
        nb::arg("layer") = 0, nb::arg("compute") = "f32", nb::arg("isa") = "",
        "Rotates the rows of one chunk (float32 [rows, q heads + k heads + v heads]), writes their keys and values "
        "into the pool and\n"
        "attends, by one thread. Returns float32 [rows, num_heads * head_size and zeros].");
}

}  // namespace giveway
