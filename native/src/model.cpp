#include "model.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "checks.h"

namespace giveway {
namespace {

constexpr int64_t kStagesOfLayer = 8;

void check_matrix(const SharedMatrix& matrix, int64_t num_outputs, int64_t num_inputs, const char* name) {
  require(matrix != nullptr, std::string(name) + " is missing");
  const Panels& panels = matrix->panels();
  require(panels.num_outputs == num_outputs && panels.num_inputs == num_inputs,
          std::string(name) + " is [" + std::to_string(panels.num_outputs) + ", " + std::to_string(panels.num_inputs) +
              "]; the model needs [" + std::to_string(num_outputs) + ", " + std::to_string(num_inputs) + "]");
}

void check_vector(const Floats& values, int64_t size, bool may_lack, const char* name) {
  require((may_lack && values.empty()) || static_cast<int64_t>(values.size()) == size,
          std::string(name) + " has " + std::to_string(values.size()) + " elements; the model needs " +
              std::to_string(size));
}

void check_weights(const ModelShape& shape, const ModelWeights& weights, const Kernels& kernels) {
  const auto check = [&](const SharedMatrix& matrix, int64_t num_outputs, int64_t num_inputs, const char* name) {
    check_matrix(matrix, num_outputs, num_inputs, name);
    check_order(matrix->panels(), kernels, shape.compute);
  };
  check_heads(shape.num_heads, shape.num_kv_heads, shape.head_size);
  require(shape.intermediate_size > 0 && shape.intermediate_size % kPanelColumns == 0,
          "the intermediate size must be a multiple of 16");
  require(static_cast<int64_t>(weights.layers.size()) == shape.num_layers, "the number of layers differs");
  check(weights.embedding, shape.vocab_size, shape.hidden_size, "embedding");
  check(weights.head, shape.vocab_size, shape.hidden_size, "head");
  check_vector(weights.final_norm, shape.hidden_size, false, "final norm");
  for (const LayerWeights& layer : weights.layers) {
    check_vector(layer.input_norm, shape.hidden_size, false, "input norm");
    check_vector(layer.post_norm, shape.hidden_size, false, "post norm");
    check(layer.query, shape.query_columns(), shape.hidden_size, "query projection");
    check(layer.key, shape.key_columns(), shape.hidden_size, "key projection");
    check(layer.value, shape.key_columns(), shape.hidden_size, "value projection");
    check_vector(layer.query_bias, shape.query_columns(), true, "query bias");
    check_vector(layer.key_bias, shape.key_columns(), true, "key bias");
    check_vector(layer.value_bias, shape.key_columns(), true, "value bias");
    check_vector(layer.query_norm, shape.head_size, true, "query norm");
    check_vector(layer.key_norm, shape.head_size, true, "key norm");
    check(layer.output, shape.hidden_size, shape.query_columns(), "output projection");
    check_vector(layer.output_bias, shape.hidden_size, true, "output bias");
    check(layer.gate_up, 2 * shape.intermediate_size, shape.hidden_size, "gate and up projection");
    check(layer.down, shape.hidden_size, shape.intermediate_size, "down projection");
  }
}

const float* data_or_null(const Floats& values) { return values.empty() ? nullptr : values.data(); }

}  // namespace

Model::Model(ModelShape shape, ModelWeights weights, Floats cosine, Floats sine, const Kernels& kernels)
    : shape_(shape),
      weights_(std::move(weights)),
      cosine_(std::move(cosine)),
      sine_(std::move(sine)),
      kernels_(kernels) {
  check_weights(shape_, weights_, kernels_);
  // Read by whole panels: what lies beyond the outputs is added to columns that nobody reads.
  for (LayerWeights& layer : weights_.layers)
    if (!layer.output_bias.empty())
      layer.output_bias.resize(static_cast<size_t>(rounded_up(shape_.hidden_size, kPanelColumns)));
  require(cosine_.size() == sine_.size() && static_cast<int64_t>(cosine_.size()) % (shape_.head_size / 2) == 0,
          "the tables of angles have the wrong size");
  stages_ = std::make_unique<WorkCounter[]>(static_cast<size_t>(kStagesOfLayer * shape_.num_layers + 1));
}

KvLayout Model::kv_layout(int64_t block_size) const {
  return {shape_.num_layers, shape_.num_kv_heads, shape_.head_size, block_size, shape_.compute};
}

int64_t Model::weight_bytes() const {
  int64_t total = weights_.embedding->panels().bytes();
  if (weights_.head != weights_.embedding) total += weights_.head->panels().bytes();
  for (const LayerWeights& layer : weights_.layers)
    for (const SharedMatrix& matrix : layer.matrices()) total += matrix->panels().bytes();
  return total;
}

void Model::check(const Batch& batch, const Pool& pool) const {
  check_block_size(pool.block_size);
  for (int64_t row = 0; row < batch.num_rows; ++row)
    if (batch.tokens[row] < 0 || batch.tokens[row] >= shape_.vocab_size)
      throw std::out_of_range("token id " + std::to_string(batch.tokens[row]) + " is outside the vocabulary of " +
                              std::to_string(shape_.vocab_size));
  int64_t next_row = 0;
  for (const Sequence& sequence : batch.sequences) {
    if (sequence.first_row != next_row || sequence.num_rows < 1 || sequence.num_rows > batch.num_rows - next_row)
      throw std::out_of_range("a sequence of " + std::to_string(sequence.num_rows) +
                              " rows: " + std::to_string(batch.num_rows - next_row) + " are left of the batch");
    if (sequence.start < 0 || sequence.start > num_positions() - sequence.num_rows)
      throw std::out_of_range(std::to_string(sequence.num_rows) + " positions from " + std::to_string(sequence.start) +
                              " on cannot be computed: the model has " + std::to_string(num_positions()));
    next_row += sequence.num_rows;
    const int64_t end = sequence.start + sequence.num_rows;
    const int64_t num_used = (end + pool.block_size - 1) / pool.block_size;
    if (num_used > sequence.table_size)
      throw std::out_of_range(std::to_string(end) + " tokens need " + std::to_string(num_used) +
                              " KV blocks, the table has " + std::to_string(sequence.table_size));
    for (int64_t index = 0; index < num_used; ++index)
      if (sequence.table[index] < 0 || sequence.table[index] >= pool.num_blocks)
        throw std::out_of_range("KV block " + std::to_string(sequence.table[index]) + " is outside the pool of " +
                                std::to_string(pool.num_blocks));
  }
  if (next_row != batch.num_rows) throw std::out_of_range("the sequences do not cover the rows of the batch");
}

void Model::make_scratch(int num_threads) {
  const int64_t of_attention =
      kernels_.attention_scratch_bytes(kv_layout(kKvPanel), shape_.num_heads / shape_.num_kv_heads);
  const int64_t widest = std::max({shape_.hidden_size, shape_.query_columns(), shape_.intermediate_size});
  scratch_bytes_ = rounded_up(std::max(of_attention, kernels_.matmul_scratch_bytes(widest)), kAlignment);
  if (scratch_.size() < scratch_bytes_ * num_threads) scratch_ = AlignedBuffer(scratch_bytes_ * num_threads);
}

void Model::make_room(int64_t num_rows) {
  if (num_rows <= capacity_) return;
  const int64_t capacity = rounded_up(std::max(num_rows, 2 * capacity_), std::max<int64_t>(16, kernels_.row_multiple));
  const auto floats = [&](int64_t columns) { return AlignedBuffer(capacity * rounded_up(columns, kPanelColumns) * 4); };
  const auto activations = [&](int64_t columns) {
    return AlignedBuffer(capacity * activation_stride(columns) * element_bytes());
  };
  capacity_ = 0;  // until there is room in all of them: memory may run out on the way
  hidden_ = floats(shape_.hidden_size);
  normed_ = activations(shape_.hidden_size);
  qkv_ = floats(shape_.qkv_columns());
  queries_ = activations(shape_.query_columns());
  attended_ = activations(shape_.query_columns());
  inner_ = activations(shape_.intermediate_size);
  capacity_ = capacity;
}

void Model::plan_attention(const Batch& batch, int num_threads) {
  // Heads together make fewer pieces of work: only where there are enough for all threads.
  const bool are_many = static_cast<int64_t>(batch.sequences.size()) >= 4 * num_threads;
  tasks_.clear();
  for (size_t index = 0; index < batch.sequences.size(); ++index) {
    const Sequence& sequence = batch.sequences[index];
    for (int64_t done = 0; done < sequence.num_rows; done += kAttentionRows) {
      const int64_t num_rows = std::min(kAttentionRows, sequence.num_rows - done);
      const int64_t together =
          are_many ? heads_together(num_rows, shape_.num_heads / shape_.num_kv_heads, shape_.num_kv_heads) : 1;
      for (int64_t kv_head = 0; kv_head < shape_.num_kv_heads; kv_head += together)
        tasks_.push_back({static_cast<int64_t>(index), sequence.first_row + done, num_rows, sequence.start + done,
                          kv_head, std::min(together, shape_.num_kv_heads - kv_head)});
    }
  }
  // The longest contexts first, so that no thread is left with a long one at the end.
  std::stable_sort(tasks_.begin(), tasks_.end(),
                   [](const AttentionTask& a, const AttentionTask& b) { return a.start > b.start; });
}

// One thread's part of a step. Within a stage threads take pieces of work from a counter, which is safe because no
// result depends on who computes it; see WorkCounter for how they go on to the next stage.
class Model::Worker {
 public:
  Worker(Model& model, const Batch& batch, const Pool& pool, Member member)
      : model_(model),
        shape_(model.shape_),
        kernels_(model.kernels_),
        batch_(batch),
        pool_(pool),
        member_(member),
        scratch_(model.scratch_.data() + member.index * model.scratch_bytes_),
        layout_(model.kv_layout(pool.block_size)) {}

  void run() {
    const uint32_t state = kernels_.enter();
    embed();
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) run_layer(layer);
    kernels_.leave(state);
  }

 private:
  // Calls work(first, last) for pieces of [0, total); returns when the whole stage is done, by whichever threads.
  template <typename Work>
  void share(int64_t total, int64_t granularity, Work work) {
    next_stage().share(cut_for(member_.count, total, granularity), member_, work);
  }

  WorkCounter& next_stage() { return model_.stages_[static_cast<size_t>(stage_++)]; }

  void embed() {
    share(batch_.num_rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row)
        kernels_.embed(model_.weights_.embedding->panels(), batch_.tokens[row], hidden_row(row));
    });
  }

  void run_layer(int64_t index) {
    const LayerWeights& layer = model_.weights_.layers[static_cast<size_t>(index)];
    const int64_t query_stride = activation_stride(shape_.query_columns());
    normalize(layer.input_norm);
    project_qkv(layer);
    rotate(layer, index);
    attend(index);
    multiply(*layer.output, model_.attended_.data(), query_stride, Epilogue::add, model_.hidden_.data(),
             model_.hidden_stride(), data_or_null(layer.output_bias));
    normalize(layer.post_norm);
    multiply(*layer.gate_up, model_.normed_.data(), model_.normed_stride(), Epilogue::gate, model_.inner_.data(),
             activation_stride(shape_.intermediate_size), nullptr);
    multiply(*layer.down, model_.inner_.data(), activation_stride(shape_.intermediate_size), Epilogue::add,
             model_.hidden_.data(), model_.hidden_stride(), nullptr);
  }

  void normalize(const Floats& weight) {
    share(batch_.num_rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row)
        kernels_.rms_norm(hidden_row(row), weight.data(), shape_.hidden_size, shape_.norm_eps, shape_.compute,
                          activation_row(model_.normed_, row, model_.normed_stride()));
    });
  }

  // Queries, keys and values are three matrices, because a file may store them in different encodings; their panels are
  // shared out together.
  void project_qkv(const LayerWeights& layer) {
    struct Part {
      const Matrix& matrix;
      const Floats& bias;
      int64_t first_column;
    };
    const Part parts[] = {{*layer.query, layer.query_bias, 0},
                          {*layer.key, layer.key_bias, shape_.query_columns()},
                          {*layer.value, layer.value_bias, shape_.query_columns() + shape_.key_columns()}};
    const int64_t granularity = panels_together(batch_.num_rows, Epilogue::store);
    bool same_x = false;  // after the first piece
    share(shape_.qkv_columns() / kPanelColumns, granularity, [&](int64_t first, int64_t last) {
      int64_t before = 0;
      for (const Part& part : parts) {
        const int64_t num_panels = part.matrix.panels().num_panels();
        const int64_t begin = std::max(first - before, int64_t{0}), end = std::min(last - before, num_panels);
        if (begin < end) {
          multiply_panels(part.matrix, model_.normed_.data(), model_.normed_stride(), Epilogue::store,
                          float_row(model_.qkv_, 0, qkv_stride()) + part.first_column, qkv_stride(),
                          data_or_null(part.bias), begin, end, same_x);
          same_x = true;
        }
        before += num_panels;
      }
    });
  }

  void rotate(const LayerWeights& layer, int64_t index) {
    const int64_t half = shape_.head_size / 2;
    RotateArgs args;
    args.num_heads = shape_.num_heads;
    args.query_norm = data_or_null(layer.query_norm);
    args.key_norm = data_or_null(layer.key_norm);
    args.norm_eps = shape_.norm_eps;
    args.pool = pool_.data;
    args.layout = layout_;
    args.layer = index;
    share(batch_.num_rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const auto at = static_cast<size_t>(row);
        args.qkv = float_row(model_.qkv_, row, qkv_stride());
        args.cosine = model_.cosine_.data() + model_.row_position_[at] * half;
        args.sine = model_.sine_.data() + model_.row_position_[at] * half;
        args.queries = activation_row(model_.queries_, row, activation_stride(shape_.query_columns()));
        args.block = model_.row_block_[at];
        args.offset = model_.row_offset_[at];
        args.clears_rest = model_.row_clears_rest_[at] != 0;
        kernels_.rotate(args);
      }
    });
  }

  void attend(int64_t index) {
    AttentionArgs args;
    args.queries = model_.queries_.data();
    args.out = model_.attended_.data();
    args.query_stride = args.out_stride = activation_stride(shape_.query_columns());
    args.num_pool_blocks = pool_.num_blocks;
    args.pool = pool_.data;
    args.layout = layout_;
    args.layer = index;
    args.group_size = shape_.num_heads / shape_.num_kv_heads;
    args.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_size));
    args.window = shape_.window;
    args.soft_cap = shape_.soft_cap;
    args.scratch = scratch_;
    next_stage().share({static_cast<int64_t>(model_.tasks_.size()), 1, 1}, kOneOrder, [&](int64_t number, int64_t) {
      const AttentionTask& task = model_.tasks_[static_cast<size_t>(number)];
      args.first_row = task.first_row;
      args.num_rows = task.num_rows;
      args.start = task.start;
      args.table = batch_.sequences[static_cast<size_t>(task.sequence)].table;
      args.kv_head = task.kv_head;
      args.num_kv_heads = task.num_kv_heads;
      kernels_.attention(args);
    });
  }

  void multiply(const Matrix& matrix, const std::byte* x, int64_t x_stride, Epilogue epilogue, std::byte* out,
                int64_t out_stride, const float* bias) {
    bool same_x = false;  // after the first piece
    share(matrix.panels().num_panels(), panels_together(batch_.num_rows, epilogue), [&](int64_t first, int64_t last) {
      multiply_panels(matrix, x, x_stride, epilogue, out, out_stride, bias, first, last, same_x);
      same_x = true;
    });
  }

  void multiply_panels(const Matrix& matrix, const std::byte* x, int64_t x_stride, Epilogue epilogue, void* out,
                       int64_t out_stride, const float* bias, int64_t first, int64_t last, bool same_x) {
    MatmulArgs args;
    args.x = x;
    args.x_stride = x_stride;
    args.num_rows = batch_.num_rows;
    args.weights = &matrix.panels();
    args.first_panel = first;
    args.last_panel = last;
    args.compute = shape_.compute;
    args.epilogue = epilogue;
    args.gate = shape_.gate;
    args.bias = bias;
    args.out = out;
    args.out_stride = out_stride;
    args.scratch = scratch_;
    args.same_x = same_x;
    kernels_.matmul(args);
  }

  int64_t qkv_stride() const { return rounded_up(shape_.qkv_columns(), kPanelColumns); }
  float* float_row(const AlignedBuffer& buffer, int64_t row, int64_t stride) const {
    return reinterpret_cast<float*>(buffer.data()) + row * stride;
  }
  float* hidden_row(int64_t row) const { return float_row(model_.hidden_, row, model_.hidden_stride()); }
  std::byte* activation_row(const AlignedBuffer& buffer, int64_t row, int64_t stride) const {
    return buffer.data() + row * stride * model_.element_bytes();
  }

  Model& model_;
  const ModelShape& shape_;
  const Kernels& kernels_;
  const Batch& batch_;
  const Pool& pool_;
  const Member member_;
  std::byte* const scratch_;
  const KvLayout layout_;
  int64_t stage_ = 0;
};

void Model::run(const Batch& batch, const Pool& pool, int num_threads) {
  check(batch, pool);
  if (batch.num_rows == 0) return;
  num_rows_ = 0;  // what the last step left is gone from here on
  make_scratch(num_threads);
  make_room(batch.num_rows);
  plan_attention(batch, num_threads);
  const auto num_rows = static_cast<size_t>(batch.num_rows);
  row_block_.resize(num_rows), row_offset_.resize(num_rows), row_position_.resize(num_rows),
      row_clears_rest_.resize(num_rows);
  for (const Sequence& sequence : batch.sequences)
    for (int64_t index = 0; index < sequence.num_rows; ++index) {
      const auto row = static_cast<size_t>(sequence.first_row + index);
      const int64_t position = sequence.start + index;
      row_position_[row] = position;
      row_block_[row] = sequence.table[position / pool.block_size];
      row_offset_[row] = position % pool.block_size;
      row_clears_rest_[row] = index + 1 == sequence.num_rows;
    }
  for (int64_t stage = 0; stage <= kStagesOfLayer * shape_.num_layers; ++stage)
    stages_[static_cast<size_t>(stage)].reset();
#pragma omp parallel num_threads(num_threads)
  Worker(*this, batch, pool, this_member()).run();
  num_rows_ = batch.num_rows;
}

void Model::logits(const std::vector<int64_t>& rows, float* out, int num_threads) {
  for (int64_t row : rows)
    if (row < 0 || row >= num_rows_)
      throw std::out_of_range("row " + std::to_string(row) + " is not one of the " + std::to_string(num_rows_) +
                              " of the last step");
  make_scratch(num_threads);
  const auto num_rows = static_cast<int64_t>(rows.size());
  for (int64_t first = 0; first < num_rows; first += capacity_)  // a row may be asked for more than once
    multiply_head(rows.data() + first, std::min(capacity_, num_rows - first), out + first * logits_stride(),
                  num_threads);
}

void Model::multiply_head(const int64_t* rows, int64_t num_rows, float* out, int num_threads) {
  const Panels& head = weights_.head->panels();
  WorkCounter norms, products;
#pragma omp parallel num_threads(num_threads)
  {
    const uint32_t state = kernels_.enter();
    const float* hidden = reinterpret_cast<const float*>(hidden_.data());
    const Member member = this_member();
    norms.share(cut_for(member.count, num_rows, 1), member, [&](int64_t first, int64_t last) {
      for (int64_t index = first; index < last; ++index)
        kernels_.rms_norm(hidden + rows[index] * hidden_stride(), weights_.final_norm.data(), shape_.hidden_size,
                          shape_.norm_eps, shape_.compute, normed_.data() + index * normed_stride() * element_bytes());
    });
    MatmulArgs args;
    args.x = normed_.data();
    args.x_stride = normed_stride();
    args.num_rows = num_rows;
    args.weights = &head;
    args.compute = shape_.compute;
    args.out = out;
    args.out_stride = logits_stride();
    args.scratch = scratch_.data() + member.index * scratch_bytes_;
    const Cut cut = cut_for(member.count, head.num_panels(), panels_together(num_rows, Epilogue::store));
    products.share(cut, member, [&](int64_t first, int64_t last) {
      args.first_panel = first;
      args.last_panel = last;
      kernels_.matmul(args);
      args.same_x = true;
    });
    kernels_.leave(state);
  }
}

}  // namespace giveway
