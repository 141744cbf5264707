// Everything that is done to rows one by one: norms, embeddings, rotation. Included by kernels_*.cpp only.
#pragma once

#include "activations.h"
#include "decode.h"
#include "kernels.h"

namespace giveway::GW_SET {

// 1 / sqrt(mean of squares + eps).
static float inverse_root_mean_square(const float* row, int64_t size, float eps) {
  v16 squares = zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    const v16 x = load_up_to(row + i, size - i);
    squares = fma(x, x, squares);
  }
  return 1.0f / std::sqrt(sum_of_lanes(squares) / static_cast<float>(size) + eps);
}

static void rms_norm(const float* row, const float* weight, int64_t size, float eps, Compute compute, void* out) {
  const v16 inverse = broadcast(inverse_root_mean_square(row, size, eps));
  int64_t i = 0;
  for (; i < size; i += kLanes) {
    const v16 normed = mul(load_up_to(row + i, size - i), inverse);
    store_activations(out, i, compute, mul(normed, load_up_to(weight + i, size - i)));
  }
  for (; i < activation_stride(size); i += kLanes) store_activations(out, i, compute, zero());
}

static void to_activations(const float* values, int64_t size, Compute compute, void* out) {
  for (int64_t i = 0; i < activation_stride(size); i += kLanes) {
    float lanes[kLanes] = {};
    if (i < size) store(lanes, load_up_to(values + i, size - i));
    for (float& lane : lanes)  // what comes from outside may be denormal
      if (std::fabs(lane) < 0x1p-126f) lane = std::copysign(0.0f, lane);
    store_activations(out, i, compute, load(lanes));
  }
}

// A row of panels that list outputs first.
template <Encoding encoding>
static void embed_row(const Panels& table, int64_t token, float* out) {
  const std::byte* block = table.panel(token / kPanelColumns);
  const int64_t column = token % kPanelColumns;
  const auto half = [&](int64_t offset) {
    return half_to_float(reinterpret_cast<const uint16_t*>(block + offset)[column]);
  };
  for (int64_t k = 0; k < table.num_inputs; ++k) {
    if (k > 0 && k % kBlockK == 0) block += panel_block_bytes(encoding);
    const int64_t at = column * kBlockK + k % kBlockK;
    if constexpr (encoding == Encoding::bf16) {
      out[k] = bf16_to_float(reinterpret_cast<const uint16_t*>(block)[at]);
    } else if constexpr (encoding == Encoding::q8_0) {
      out[k] = half(512) * static_cast<float>(reinterpret_cast<const int8_t*>(block)[at]);
    } else if constexpr (encoding != Encoding::f32) {
      const uint16_t word = reinterpret_cast<const uint16_t*>(block)[column / 4 * kBlockK + k % kBlockK];
      const float scale = half(256), minimum = encoding == Encoding::q4_1 ? half(288) : scale * -8.0f;
      out[k] = scale * static_cast<float>(word >> column % 4 * 4 & 15) + minimum;  // the product is exact
    }
  }
}

// Decodes whole panels and keeps one column of each: sixteen times too much, and still nothing beside a step.
template <Encoding encoding>
static void embed_from(const Panels& table, int64_t token, float* out) {
  const std::byte* panel = table.panel(token / kPanelColumns);
  const int64_t column = token % kPanelColumns;
  for (int64_t k = 0; k < table.num_inputs; k += 2) {
    const auto block = PanelBlock<encoding, Compute::f32>::open(panel + k / kBlockK * panel_block_bytes(encoding));
    const v16_pair weights = block.pair(k % kBlockK / 2);
    float even[kLanes], odd[kLanes];
    store(even, weights.even);
    store(odd, weights.odd);
    out[k] = even[column];
    if (k + 1 < table.num_inputs) out[k + 1] = odd[column];
  }
}

static void embed(const Panels& table, int64_t token, float* out) {
  with_encoding(table.encoding, [&](auto encoding) {
    table.order == PanelOrder::inputs_first ? embed_from<encoding>(table, token, out)
                                            : embed_row<encoding>(table, token, out);
  });
}

// Norm (if there is one) and rotation of one head. Half a head may end within a vector: up to kLanes floats after the
// head are read, which a row has (values follow keys), and as many are overwritten after `turned`.
static void turn_head(const RotateArgs& args, const float* head, const float* norm, float* turned) {
  const int64_t size = args.layout.head_size, half = size / 2;
  float normed[kLargestHead + kLanes];
  if (norm != nullptr) {
    const v16 inverse = broadcast(inverse_root_mean_square(head, size, args.norm_eps));
    for (int64_t i = 0; i < size; i += kLanes) store(normed + i, mul(mul(load(head + i), inverse), load(norm + i)));
    store(normed + size, zero());
    head = normed;
  }
  // All of the first half before the second: what a vector holds beyond its half is overwritten, or is after the head.
  for (int64_t i = 0; i < half; i += kLanes) {
    const v16 cosine = load_up_to(args.cosine + i, half - i), sine = load_up_to(args.sine + i, half - i);
    store(turned + i, fma(load(head + i), cosine, mul(load(head + half + i), sub(zero(), sine))));
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const v16 cosine = load_up_to(args.cosine + i, half - i), sine = load_up_to(args.sine + i, half - i);
    store(turned + half + i, fma(load(head + half + i), cosine, mul(load(head + i), sine)));
  }
}

// The panel of keys, or of values, that holds this row's position.
GW_INLINE std::byte* panel_of_position(const RotateArgs& args, int64_t half_offset) {
  return args.pool + args.block * args.layout.block_bytes() + half_offset +
         args.offset / kKvPanel * args.layout.panel_bytes();
}

static void write_key(const RotateArgs& args, int64_t kv_head, const float* key) {
  std::byte* panel = panel_of_position(args, args.layout.key_offset(args.layer, kv_head));
  const int64_t column = args.offset % kKvPanel, size = args.layout.head_size;
  if (args.layout.compute == Compute::f32) {
    float* target = reinterpret_cast<float*>(panel) + column;
    for (int64_t d = 0; d < size; ++d) target[d * kKvPanel] = key[d];
    return;
  }
  uint16_t* target = reinterpret_cast<uint16_t*>(panel) + 2 * column;
  for (int64_t i = 0; i < size; i += kLanes) {
    uint16_t rounded[kLanes];
    store_rounded(rounded, load(key + i));
    for (int64_t d = 0; d < kLanes; d += 2) std::memcpy(target + (i + d) * kKvPanel, rounded + d, 4);
  }
}

static void write_value(const RotateArgs& args, std::byte* panel, int64_t position, const float* value) {
  const int64_t size = args.layout.head_size;
  float* row = reinterpret_cast<float*>(panel) + position * size;
  uint16_t* pairs = reinterpret_cast<uint16_t*>(panel) + position / 2 * 2 * size + position % 2;
  for (int64_t i = 0; i < size; i += kLanes) {
    if (args.layout.compute == Compute::f32) {
      store(row + i, load(value + i));
    } else {  // not computed here, so that some may be denormal; the pair's other position may be another thread's
      store_every_second(pairs + 2 * i, round_bf16(load(value + i)));
    }
  }
}

// Zeros for the positions of a panel of values after this one.
static void clear_later_values(const KvLayout& layout, std::byte* panel, int64_t position) {
  const int64_t size = layout.head_size;
  const bool is_bf16 = layout.compute == Compute::bf16;
  if (is_bf16 && position % 2 == 0)
    for (int64_t i = 0; i < size; i += kLanes)
      store_every_second(reinterpret_cast<uint16_t*>(panel) + position * size + 2 * i + 1, zero());
  const int64_t next = is_bf16 ? rounded_up(position + 1, 2) : position + 1;
  const int64_t bytes = size * layout.element_bytes();  // of one position, in the mean of a pair
  std::memset(panel + next * bytes, 0, static_cast<size_t>((kKvPanel - next) * bytes));
}

// Asks for the memory that the next row's keys and values go to: some hundred lines, which are scattered all over the
// pool when every row is another request's.
static void fetch_next(const RotateArgs& args) {
  const KvLayout& layout = args.layout;
  const int64_t pair_bytes = 2 * layout.head_size * layout.element_bytes();
  std::byte* panel = args.pool + args.next_block * layout.block_bytes() + layout.key_offset(args.layer, 0) +
                     args.next_offset / kKvPanel * layout.panel_bytes();
  for (int64_t head = 0; head < layout.num_kv_heads; ++head, panel += 2 * layout.half_bytes()) {
    for (int64_t at = 0; at < layout.panel_bytes(); at += 64) __builtin_prefetch(panel + at, 1);
    std::byte* values = panel + layout.half_bytes() + args.next_offset % kKvPanel / 2 * pair_bytes;
    for (int64_t at = 0; at < pair_bytes; at += 64) __builtin_prefetch(values + at, 1);
  }
}

static void rotate(const RotateArgs& args) {
  const KvLayout& layout = args.layout;
  if (args.next_block >= 0) fetch_next(args);
  const int64_t size = layout.head_size;
  alignas(64) float turned[kLargestHead + kLanes];
  for (int64_t head = 0; head < args.num_heads; ++head) {
    turn_head(args, args.qkv + head * size, args.query_norm, turned);
    for (int64_t i = 0; i < size; i += kLanes)
      store_activations(args.queries, head * size + i, layout.compute, load(turned + i));
  }
  pad_activations(args.queries, args.num_heads * size, layout.compute);
  const float* keys = args.qkv + args.num_heads * size;
  const float* values = keys + layout.num_kv_heads * size;
  for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
    turn_head(args, keys + head * size, args.key_norm, turned);
    write_key(args, head, turned);
    std::byte* panel = panel_of_position(args, layout.value_offset(args.layer, head));
    const int64_t position = args.offset % kKvPanel;
    write_value(args, panel, position, values + head * size);
    // Attention multiplies whole panels, by zero where a position is not seen, and zero times stale memory may be NaN.
    if (args.clears_rest) clear_later_values(layout, panel, position);
  }
}

}  // namespace giveway::GW_SET
