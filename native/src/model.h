// A whole step of a decoder of the Llama family in one call: nothing is spent between operators.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "panels.h"
#include "work_counter.h"

namespace giveway {

struct ModelShape {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_size = 0;
  float norm_eps = 0;
  int64_t window = 0;  // positions a query sees, itself included; 0: all
  float soft_cap = 0;  // of attention scores; 0: none
  Gate gate = Gate::silu;
  Compute compute = Compute::f32;

  int64_t query_columns() const { return num_heads * head_size; }
  int64_t key_columns() const { return num_kv_heads * head_size; }
  int64_t qkv_columns() const { return query_columns() + 2 * key_columns(); }
};

using SharedMatrix = std::shared_ptr<const Matrix>;
using Floats = std::vector<float>;  // empty: the model has none

struct LayerWeights {
  Floats input_norm, post_norm;    // [hidden]
  SharedMatrix query, key, value;  // [columns, hidden]
  Floats query_bias, key_bias, value_bias;
  Floats query_norm, key_norm;  // [head size]
  SharedMatrix output;          // [hidden, query columns]
  Floats output_bias;
  SharedMatrix gate_up;  // [2 * intermediate, hidden], panels of gate and up in turn
  SharedMatrix down;     // [hidden, intermediate]

  std::array<SharedMatrix, 6> matrices() const { return {query, key, value, output, gate_up, down}; }
};

struct ModelWeights {
  std::vector<LayerWeights> layers;
  SharedMatrix embedding;  // [vocabulary, hidden]
  SharedMatrix head;       // the same when they are tied
  Floats final_norm;
};

// The tokens of one request in a step.
struct Sequence {
  int64_t first_row = 0;  // in the batch
  int64_t num_rows = 0;
  int64_t start = 0;  // position of the first row
  const int32_t* table = nullptr;
  int64_t table_size = 0;
};

// Blocks of KV, owned by the caller.
struct Pool {
  std::byte* data = nullptr;
  int64_t num_blocks = 0;
  int64_t block_size = 0;
};

struct Batch {
  const int32_t* tokens = nullptr;  // [num_rows]
  int64_t num_rows = 0;
  std::vector<Sequence> sequences;  // they cover the rows in order
};

// Calls of several threads wait for each other.
class Model {
 public:
  // Throws std::invalid_argument when a shape does not fit.
  Model(ModelShape shape, ModelWeights weights, const Kernels& kernels);

  // cosine, sine: [num_positions][head_size / 2], of all positions that can be computed from now on; before, there are
  // none.
  void set_angles(Floats cosine, Floats sine);

  // Runs all layers over the batch, writing the KV of every row into the pool before any row of that layer is attended.
  // The result stays in the model until the next step. Throws std::out_of_range when a token, a position or a block id
  // is outside its range; nothing was written then.
  void run(const Batch& batch, const Pool& pool, int num_threads);

  // Logits after the given rows of the last step: out is [rows][logits_stride()], columns from the vocabulary's size on
  // have no meaning. Throws std::out_of_range.
  void logits(const std::vector<int64_t>& rows, float* out, int num_threads);

  int64_t logits_stride() const { return weights_.head->panels().num_panels() * kPanelColumns; }
  KvLayout kv_layout(int64_t block_size) const;
  const ModelShape& shape() const { return shape_; }
  const Kernels& kernels() const { return kernels_; }
  int64_t weight_bytes() const;

 private:
  struct AttentionTask {
    int64_t sequence, first_row, num_rows, start, kv_head, num_kv_heads;
  };
  class Worker;

  void check(const Batch& batch, const Pool& pool) const;
  void make_scratch(int num_threads);
  void make_room(int64_t num_rows, int64_t num_passing_rows);
  void plan_attention(const Batch& batch, int num_threads);
  void multiply_head(const int64_t* rows, int64_t num_rows, float* out,
                     int num_threads);  // at most passing_capacity_ rows
  int64_t num_positions() const { return static_cast<int64_t>(cosine_.size()) / (shape_.head_size / 2); }

  ModelShape shape_;
  ModelWeights weights_;
  const Kernels& kernels_;
  std::mutex mutex_;  // of all that follows
  Floats cosine_, sine_;

  // Working memory, grown when a larger batch comes; rows padded as the kernels want them.
  int64_t capacity_ = 0, passing_capacity_ = 0, scratch_bytes_ = 0;
  RowBuffer hidden_, queries_, attended_;  // of all rows of the step
  RowBuffer normed_, qkv_, inner_;         // of those that are on their way from one attention to the next
  AlignedBuffer scratch_;
  int64_t num_rows_ = 0;    // of the last step
  int64_t piece_rows_ = 0;  // that a thread takes from one attention to the next; 0: threads share weights, not rows
  std::vector<AttentionTask> tasks_, dealt_tasks_;
  std::vector<int64_t> row_block_, row_offset_, row_position_;  // where the KV of each row goes
  std::vector<uint8_t> row_clears_rest_;
  std::unique_ptr<WorkCounter[]> stages_;
};

}  // namespace giveway
