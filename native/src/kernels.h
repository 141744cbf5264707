// The kernels of one instruction set as a table of functions. Every set computes the same numbers, to the bit, but for
// avx512_bf16 with Compute::bf16, whose dot instruction adds in another order.
//
// A row of any result depends on that row of the input only. All functions are called by one thread for its share of
// the work and use no memory but what they are given. They run between enter() and leave(), which set how denormal
// numbers are treated (flushed, as AMX does always) and load the tile configuration where there is one.
#pragma once

#include "types.h"

namespace giveway {

enum class Gate : int { silu = 0, gelu = 1 };  // gelu: the tanh form

enum class Epilogue : int {
  store = 0,  // out = product + bias
  add = 1,    // out = out + (product + bias)
  gate = 2,   // panels 2j and 2j + 1 are gate and up of the same outputs: out = activation(gate) * up, as activations
};

// Panels that a piece of work should hold a multiple of: kernels multiply many rows with two panels at once. Few rows
// leave so little work that it should be shared as finely as it can.
constexpr int64_t panels_together(int64_t num_rows, Epilogue epilogue) {
  constexpr int64_t kManyRows = 16;
  return epilogue == Epilogue::gate || num_rows >= kManyRows ? 2 : 1;
}

struct MatmulArgs {
  const void* x = nullptr;  // activations [num_rows (buffer: padded to row_multiple)][x_stride]
  int64_t x_stride = 0;     // elements
  int64_t num_rows = 0;
  const Panels* weights = nullptr;
  int64_t first_panel = 0;  // this call's share, [first_panel, last_panel); for Epilogue::gate both even
  int64_t last_panel = 0;
  Compute compute = Compute::f32;
  Epilogue epilogue = Epilogue::store;
  Gate gate = Gate::silu;
  const float* bias = nullptr;  // [16 * panels] or null; not with Epilogue::gate
  void* out = nullptr;     // float32 [num_rows][out_stride]; for Epilogue::gate activations, column 16 * (panel / 2)
  int64_t out_stride = 0;  // elements. Columns up to 16 * last_panel are written, also beyond num_outputs
  std::byte* scratch = nullptr;  // matmul_scratch_bytes, 64-byte aligned, this thread's own
  bool same_x = false;  // as in the call before, and the scratch is as that call left it: what it made of x is there
};

// KV heads that one call of attention may take together: where there are few query rows, reading takes most of the
// time, and the heads of a block lie side by side.
inline constexpr int64_t kMostHeadsTogether = 4;
constexpr int64_t heads_together(int64_t num_rows, int64_t group_size, int64_t num_kv_heads) {
  constexpr int64_t kFewQueryRows = 16;
  return num_rows * group_size <= kFewQueryRows ? equal_part(num_kv_heads, kMostHeadsTogether) : 1;
}

// Number of the first piece of positions that a query at `position` sees.
constexpr int64_t first_piece(int64_t position, int64_t window) {
  return window > 0 && position >= window ? (position - window + 1) / kPieceTokens : 0;
}

// What is read first by the attention after this one: its first piece of KV is asked for while this one ends.
struct NextKv {
  const int32_t* table = nullptr;  // null: nobody knows
  int64_t kv_head = 0;
  int64_t first = 0, last = 0;  // positions: the first, a multiple of kPieceTokens, to the last of all
};

struct AttentionArgs {
  const void* queries = nullptr;  // activations [rows][query_stride]: rotated heads of head_size, one after another
  int64_t query_stride = 0;
  void* out = nullptr;  // activations [rows][out_stride], same order of heads
  int64_t out_stride = 0;
  int64_t first_row = 0;  // rows of this call: consecutive positions of one request
  int64_t num_rows = 0;
  int64_t start = 0;               // position of the first row
  const int32_t* table = nullptr;  // block ids of the request, from position 0
  int64_t num_pool_blocks = 0;     // for the check of ids in debug builds
  const std::byte* pool = nullptr;
  KvLayout layout;
  int64_t layer = 0;
  int64_t kv_head = 0;
  int64_t num_kv_heads = 1;  // from kv_head on; more than one only as heads_together() says
  int64_t group_size = 1;    // query heads of a KV head: kv_head * group_size and the following
  float scale = 1.0f;        // of the scores
  int64_t window = 0;        // a query sees this many positions, itself included; 0: all
  float soft_cap = 0.0f;     // scores become soft_cap * tanh(score / soft_cap); 0: they do not
  NextKv next;
  std::byte* scratch = nullptr;  // attention_scratch_bytes, 64-byte aligned
};

// Rotates query and key heads of one row and writes queries as activations, keys and values into the pool.
struct RotateArgs {
  const float* qkv = nullptr;  // [q heads][k heads][v heads] of head_size, one row
  int64_t num_heads = 0;
  const float* cosine = nullptr;  // [head_size / 2] of this row's position; element i turns with i + head_size / 2
  const float* sine = nullptr;
  const float* query_norm = nullptr;  // [head_size], RMSNorm of every head before it is turned; null: none
  const float* key_norm = nullptr;
  float norm_eps = 0.0f;
  void* queries = nullptr;  // activations [num_heads * head_size] of this row
  std::byte* pool = nullptr;
  KvLayout layout;
  int64_t layer = 0;
  int64_t block = 0;  // block id and offset of this row's position
  int64_t offset = 0;
  bool clears_rest = false;  // the last row of its chunk: V of the later positions of its panel becomes zero
  int64_t next_block = -1;   // those of the row after this one, to be asked for; -1: they lie near this row's
  int64_t next_offset = 0;
};

struct Kernels {
  const char* name;
  bool packs_bf16;        // with Compute::bf16 activations are stored as 2-byte bfloat16; else as float32, rounded
  int64_t row_multiple;   // buffers of activations have a multiple of this many rows
  PanelOrder bf16_order;  // of the weights that are multiplied with Compute::bf16; for others: inputs first
  uint32_t (*enter)();    // returns what leave() needs; once per thread and step
  void (*leave)(uint32_t state);
  int64_t (*matmul_scratch_bytes)(int64_t num_inputs);
  int64_t (*attention_scratch_bytes)(const KvLayout& layout, int64_t group_size);
  void (*matmul)(const MatmulArgs& args);
  void (*attention)(const AttentionArgs& args);
  void (*rotate)(const RotateArgs& args);
  // out = row / sqrt(mean of squares + eps) * weight, as activations; beyond `size` up to activation_stride(size):
  // zeros.
  void (*rms_norm)(const float* row, const float* weight, int64_t size, float eps, Compute compute, void* out);
  // One row of a packed matrix (outputs are tokens) as float32 [num_inputs].
  void (*embed)(const Panels& table, int64_t token, float* out);
  // Stores float32 values as activations; for tests and for whatever computes outside these kernels.
  void (*to_activations)(const float* values, int64_t size, Compute compute, void* out);
  // What the others are held against (peaks.h). Runs `rounds` rounds of multiply-adds in registers; returns how many
  // operations that were, two for each multiply-add.
  int64_t (*multiply_peak)(Compute compute, int64_t rounds);
  void (*read_peak)(const std::byte* data, int64_t num_bytes);  // reads it all and does nothing else

  // Of one element of activations.
  int64_t activation_bytes(Compute compute) const { return compute == Compute::bf16 && packs_bf16 ? 2 : 4; }
  PanelOrder panel_order(Compute compute) const {
    return compute == Compute::bf16 ? bf16_order : PanelOrder::inputs_first;
  }
};

extern const Kernels kernels_scalar;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512_bf16;
extern const Kernels kernels_amx;

}  // namespace giveway
