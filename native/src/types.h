// Words that all kernels share: how weights, activations and KV lie in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace giveway {

constexpr int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The size of the first part when `total` is cut into as few parts of at most `most` as there must be, nearly equal.
constexpr int64_t equal_part(int64_t total, int64_t most) {
  const int64_t num_parts = (total + most - 1) / most;
  return (total + num_parts - 1) / num_parts;
}

inline constexpr int kLanes = 16;         // float lanes that everything vectorised works on, whatever the registers
inline constexpr int kPanelColumns = 16;  // outputs of a panel of weights
inline constexpr int64_t kTotalsStride = 2 * kPanelColumns;  // floats of a row of totals: products with two panels
inline constexpr int kBlockK = 32;             // inputs whose products are added before they join the total
inline constexpr int kPieceTokens = 64;        // KV positions that attention takes at a time, from position 0 on
inline constexpr int kKvPanel = 16;            // KV positions of a panel of keys or values
inline constexpr int kLargestHead = 256;       // dimensions of a head, a multiple of kLanes
inline constexpr int64_t kAttentionRows = 16;  // query positions of one request that make a piece of attention work
inline constexpr int64_t kAlignment = 64;      // bytes; of whatever kernels are given as scratch

// What activations and decoded weights are rounded to before they are multiplied. Sums are float32 always.
enum class Compute : int { f32 = 0, bf16 = 1 };

// How a panel of weights is stored.
enum class Encoding : int { f32 = 0, bf16 = 1, q8_0 = 2, q4_0 = 3, q4_1 = 4 };

// In which order a panel block lists its weights: for instructions that multiply one input with sixteen outputs, or
// for AMX, whose tiles take a row of inputs for each output.
enum class PanelOrder : int { inputs_first = 0, outputs_first = 1 };

// Bytes of one panel block: kPanelColumns outputs by kBlockK inputs. With p = pair of inputs (2p, 2p + 1), c = column
// (output):
//         inputs first                                               outputs first
//   f32   float    [32 inputs][16 columns]                           (never)
//   bf16  uint16   [16 pairs][16 columns][2]                         uint16 [16 columns][32 inputs]
//   q8_0  int8     [32 inputs][16 columns]                           int8   [16 columns][32 inputs]
//   q4_0  uint8    [16 pairs][16 columns], low nibble = input 2p,    uint16 [4 groups][32 inputs], nibble n from the
//   low
//                  high = 2p + 1                                            end on = column 4 * group + n
//   q4_1  the same                                                   the same
// After the quants: float16 d[16] (scales), for q4_1 then float16 m[16] (minima).
constexpr int64_t panel_block_bytes(Encoding encoding) {
  switch (encoding) {
    case Encoding::f32:
      return 2048;
    case Encoding::bf16:
      return 1024;
    case Encoding::q8_0:
      return 512 + 32;
    case Encoding::q4_0:
      return 256 + 32;
    case Encoding::q4_1:
      return 256 + 64;
  }
  return 0;
}

// A weight matrix [num_outputs, num_inputs], packed once when the model is loaded: [panels][blocks] panel blocks, one
// panel's blocks in a row. Missing outputs and inputs are zeros.
struct Panels {
  const std::byte* data = nullptr;
  Encoding encoding = Encoding::f32;
  PanelOrder order = PanelOrder::inputs_first;
  int64_t num_outputs = 0;
  int64_t num_inputs = 0;

  int64_t num_panels() const { return (num_outputs + kPanelColumns - 1) / kPanelColumns; }
  int64_t num_blocks() const { return (num_inputs + kBlockK - 1) / kBlockK; }
  int64_t panel_bytes() const { return num_blocks() * panel_block_bytes(encoding); }
  int64_t bytes() const { return num_panels() * panel_bytes(); }
  const std::byte* panel(int64_t index) const { return data + index * panel_bytes(); }
};

// Elements from one row of activations to the next; what lies between the row's end and the next row is zero. An odd
// number of blocks: rows whose distance is a large power of two lie in a few sets of the first cache only.
constexpr int64_t activation_stride(int64_t num_columns) {
  return (rounded_up(num_columns, kBlockK) / kBlockK | 1) * kBlockK;
}

// Where K and V of one token lie in a block of the pool. A block is [layers][KV heads][K, then V]; with e = element (2
// bytes of bf16 or 4 of float32), d = dimension of the head, and panels of 16 positions:
//   K  f32: [panels][head size][16 positions]       bf16: [panels][head size / 2][16 positions][2]
//   V  f32: [panels][16 positions][head size]       bf16: [panels][8 pairs of positions][head size][2]
// So a panel of keys is a panel of weights with inputs d, and a panel of values one with inputs = positions.
struct KvLayout {
  int64_t num_layers = 0;
  int64_t num_kv_heads = 0;
  int64_t head_size = 0;
  int64_t block_size = 0;  // positions, a multiple of kKvPanel
  Compute compute = Compute::f32;

  int64_t element_bytes() const { return compute == Compute::bf16 ? 2 : 4; }
  int64_t panel_bytes() const { return kKvPanel * head_size * element_bytes(); }
  int64_t half_bytes() const { return block_size * head_size * element_bytes(); }  // K, or V, of one head
  int64_t block_bytes() const { return num_layers * num_kv_heads * 2 * half_bytes(); }
  int64_t key_offset(int64_t layer, int64_t kv_head) const {
    return (layer * num_kv_heads + kv_head) * 2 * half_bytes();
  }
  int64_t value_offset(int64_t layer, int64_t kv_head) const { return key_offset(layer, kv_head) + half_bytes(); }
};

}  // namespace giveway
