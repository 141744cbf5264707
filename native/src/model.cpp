#include "model.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "checks.h"

namespace giveway {
namespace {

constexpr int64_t kStagesOfLayer = 8;  // at most
// Rows for each thread from which on threads share rows, not weights; and rows that one takes at a time, at most.
constexpr int64_t kManyRows = 192, kMostRows = 384;

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
  check_window(shape.window);
  check_sizes("the embedding", {shape.vocab_size, shape.hidden_size, sizeof(float)});
  check_sizes("gate and up", {2, shape.intermediate_size, shape.hidden_size, sizeof(float)});
  require(shape.intermediate_size % kPanelColumns == 0, "the intermediate size must be a multiple of 16");
  require(shape.num_layers > 0, "a model needs at least one layer");
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

// Rows that a thread takes from one attention to the next, or 0 where there are too few.
int64_t piece_rows(int64_t num_rows, int64_t num_threads, int64_t multiple) {
  if (num_rows < kManyRows * num_threads) return 0;
  const int64_t of_all = equal_part(num_rows, kMostRows * num_threads);  // that all threads take at a time
  return rounded_up((of_all + num_threads - 1) / num_threads, multiple);
}

// Rows or panels, [first, last).
struct Range {
  int64_t first, last;
};

// Rows of a buffer by their number in the step.
struct RowView {
  const RowBuffer& buffer;
  int64_t place_of_first;

  std::byte* row(int64_t index) const { return buffer.row(place_of_first + index); }
  float* floats(int64_t index) const { return reinterpret_cast<float*>(row(index)); }
};

// One product of a layer: which activations are multiplied with what, and where the result goes.
struct Product {
  const Matrix& matrix;
  RowView x;
  Epilogue epilogue;
  RowView out;
  const float* bias = nullptr;
  int64_t first_column = 0;  // of the result, in a row of `out`
};

const float* data_or_null(const Floats& values) { return values.empty() ? nullptr : values.data(); }

}  // namespace

Model::Model(ModelShape shape, ModelWeights weights, const Kernels& kernels)
    : shape_(shape), weights_(std::move(weights)), kernels_(kernels) {
  check_weights(shape_, weights_, kernels_);
  // Read by whole panels: what lies beyond the outputs is added to columns that nobody reads.
  for (LayerWeights& layer : weights_.layers)
    if (!layer.output_bias.empty())
      layer.output_bias.resize(static_cast<size_t>(rounded_up(shape_.hidden_size, kPanelColumns)));
  stages_ = std::make_unique<WorkCounter[]>(static_cast<size_t>(kStagesOfLayer * shape_.num_layers + 1));
}

void Model::set_angles(Floats cosine, Floats sine) {
  const std::lock_guard lock(mutex_);
  cosine_ = std::move(cosine);
  sine_ = std::move(sine);
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

void Model::make_room(int64_t num_rows, int64_t num_passing_rows) {
  const auto grown = [&](int64_t wanted, int64_t before) {
    return rounded_up(std::max(wanted, 2 * before), std::max<int64_t>(16, kernels_.row_multiple));
  };
  const auto floats = [&](int64_t capacity, int64_t columns) {
    return RowBuffer(capacity, rounded_up(columns, kPanelColumns), sizeof(float));
  };
  const auto activations = [&](int64_t capacity, int64_t columns) {
    return RowBuffer(capacity, activation_stride(columns), kernels_.activation_bytes(shape_.compute));
  };
  if (num_rows > capacity_) {
    const int64_t capacity = grown(num_rows, capacity_);
    capacity_ = 0;  // until there is room in all of them: memory may run out on the way
    hidden_ = floats(capacity, shape_.hidden_size);
    queries_ = activations(capacity, shape_.query_columns());
    attended_ = activations(capacity, shape_.query_columns());
    capacity_ = capacity;
  }
  if (num_passing_rows > passing_capacity_) {
    const int64_t capacity = grown(num_passing_rows, passing_capacity_);
    passing_capacity_ = 0;
    normed_ = activations(capacity, shape_.hidden_size);
    qkv_ = floats(capacity, shape_.qkv_columns());
    inner_ = activations(capacity, shape_.intermediate_size);
    passing_capacity_ = capacity;
  }
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
  // The longest contexts first, so that no thread is left with a long one at the end; dealt out to the threads' spans.
  std::stable_sort(tasks_.begin(), tasks_.end(),
                   [](const AttentionTask& a, const AttentionTask& b) { return a.start > b.start; });
  const Spans spans(static_cast<int64_t>(tasks_.size()), num_threads);
  dealt_tasks_.clear();
  for (int64_t span = 0; span < spans.count; ++span)
    for (auto index = static_cast<size_t>(span); index < tasks_.size(); index += static_cast<size_t>(spans.count))
      dealt_tasks_.push_back(tasks_[index]);
  std::swap(tasks_, dealt_tasks_);
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
        layout_(model.kv_layout(pool.block_size)),
        window_(window_among(model.num_positions(), shape_.window)) {}

  void run() {
    const uint32_t state = kernels_.enter();
    if (model_.piece_rows_ > 0) {
      run_by_rows();
    } else {
      run_by_panels();
    }
    kernels_.leave(state);
  }

 private:
  // Many rows: a thread takes some of them from one attention to the next, so that what it computes stays in its caches
  // and threads meet twice a layer only. It decodes all weights by itself for that.
  void run_by_rows() {
    const Cut cut{batch_.num_rows, kernels_.row_multiple, model_.piece_rows_};
    const auto share_rows = [&](auto work) {
      next_stage().share(cut, member_, [&](int64_t first, int64_t last) {
        passing_place_ = member_.index * model_.piece_rows_ - first;
        work(Range{first, last});
      });
    };
    share_rows([&](Range rows) {
      embed(rows);
      before_attention(0, rows);
    });
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      attend(layer);
      share_rows([&](Range rows) {
        after_attention(layer, rows);
        if (layer + 1 < shape_.num_layers) before_attention(layer + 1, rows);
      });
    }
  }

  void before_attention(int64_t index, Range rows) {
    const LayerWeights& layer = model_.weights_.layers[static_cast<size_t>(index)];
    normalize(layer.input_norm, rows);
    project_qkv(layer, rows, {0, qkv_panels()}, false);
    rotate(layer, index, rows);
  }

  void after_attention(int64_t index, Range rows) {
    const LayerWeights& layer = model_.weights_.layers[static_cast<size_t>(index)];
    multiply_all(of_output(layer), rows);
    normalize(layer.post_norm, rows);
    multiply_all(of_gate_up(layer), rows);
    multiply_all(of_down(layer), rows);
  }

  // Few rows: reading and decoding weights takes most of the time, and threads share the weights of every product.
  void run_by_panels() {
    share_rows([&](Range rows) { embed(rows); });
    for (int64_t index = 0; index < shape_.num_layers; ++index) {
      const LayerWeights& layer = model_.weights_.layers[static_cast<size_t>(index)];
      share_rows([&](Range rows) { normalize(layer.input_norm, rows); });
      share_panels(qkv_panels(), Epilogue::store,
                   [&](Range panels, bool same_x) { project_qkv(layer, all_rows(), panels, same_x); });
      share_rows([&](Range rows) { rotate(layer, index, rows); });
      attend(index);
      share_product(of_output(layer));
      share_rows([&](Range rows) { normalize(layer.post_norm, rows); });
      share_product(of_gate_up(layer));
      share_product(of_down(layer));
    }
  }

  template <typename Work>
  void share_rows(Work work) {
    next_stage().share(cut_for(member_.count, batch_.num_rows, 1), member_,
                       [&](int64_t first, int64_t last) { work(Range{first, last}); });
  }

  // Calls work(panels, same_x), all calls of which multiply the same rows.
  template <typename Work>
  void share_panels(int64_t num_panels, Epilogue epilogue, Work work) {
    bool same_x = false;  // after the first piece
    next_stage().share(cut_for(member_.count, num_panels, panels_together(batch_.num_rows, epilogue)), member_,
                       [&](int64_t first, int64_t last) {
                         work(Range{first, last}, same_x);
                         same_x = true;
                       });
  }

  void share_product(const Product& product) {
    share_panels(product.matrix.panels().num_panels(), product.epilogue,
                 [&](Range panels, bool same_x) { multiply(product, all_rows(), panels, same_x); });
  }

  Range all_rows() const { return {0, batch_.num_rows}; }
  int64_t qkv_panels() const { return shape_.qkv_columns() / kPanelColumns; }
  WorkCounter& next_stage() { return model_.stages_[static_cast<size_t>(stage_++)]; }

  RowView hidden() const { return {model_.hidden_, 0}; }
  RowView queries() const { return {model_.queries_, 0}; }
  RowView attended() const { return {model_.attended_, 0}; }
  RowView normed() const { return {model_.normed_, passing_place_}; }
  RowView qkv() const { return {model_.qkv_, passing_place_}; }
  RowView inner() const { return {model_.inner_, passing_place_}; }

  void embed(Range rows) {
    for (int64_t row = rows.first; row < rows.last; ++row)
      kernels_.embed(model_.weights_.embedding->panels(), batch_.tokens[row], hidden().floats(row));
  }

  void normalize(const Floats& weight, Range rows) {
    for (int64_t row = rows.first; row < rows.last; ++row)
      kernels_.rms_norm(hidden().floats(row), weight.data(), shape_.hidden_size, shape_.norm_eps, shape_.compute,
                        normed().row(row));
  }

  // Queries, keys and values are three matrices, because a file may store them in different encodings; their panels are
  // counted together.
  void project_qkv(const LayerWeights& layer, Range rows, Range panels, bool same_x) {
    struct Part {
      const Matrix& matrix;
      const Floats& bias;
    };
    const Part parts[] = {
        {*layer.query, layer.query_bias}, {*layer.key, layer.key_bias}, {*layer.value, layer.value_bias}};
    int64_t before = 0;
    for (const Part& part : parts) {
      const int64_t num_panels = part.matrix.panels().num_panels();
      const Range own{std::max(panels.first - before, int64_t{0}), std::min(panels.last - before, num_panels)};
      if (own.first < own.last) {
        multiply({part.matrix, normed(), Epilogue::store, qkv(), data_or_null(part.bias), before * kPanelColumns}, rows,
                 own, same_x);
        same_x = true;
      }
      before += num_panels;
    }
  }

  Product of_output(const LayerWeights& layer) const {
    return {*layer.output, attended(), Epilogue::add, hidden(), data_or_null(layer.output_bias)};
  }
  Product of_gate_up(const LayerWeights& layer) const { return {*layer.gate_up, normed(), Epilogue::gate, inner()}; }
  Product of_down(const LayerWeights& layer) const { return {*layer.down, inner(), Epilogue::add, hidden()}; }

  void rotate(const LayerWeights& layer, int64_t index, Range rows) {
    const int64_t half = shape_.head_size / 2;
    RotateArgs args;
    args.num_heads = shape_.num_heads;
    args.query_norm = data_or_null(layer.query_norm);
    args.key_norm = data_or_null(layer.key_norm);
    args.norm_eps = shape_.norm_eps;
    args.pool = pool_.data;
    args.layout = layout_;
    args.layer = index;
    for (int64_t row = rows.first; row < rows.last; ++row) {
      const auto at = static_cast<size_t>(row);
      args.qkv = qkv().floats(row);
      args.cosine = model_.cosine_.data() + model_.row_position_[at] * half;
      args.sine = model_.sine_.data() + model_.row_position_[at] * half;
      args.queries = queries().row(row);
      args.block = model_.row_block_[at];
      args.offset = model_.row_offset_[at];
      args.clears_rest = model_.row_clears_rest_[at] != 0;
      args.next_block = -1;
      if (args.clears_rest && row + 1 < rows.last)  // the next row is another request's
        args.next_block = model_.row_block_[at + 1], args.next_offset = model_.row_offset_[at + 1];
      kernels_.rotate(args);
    }
  }

  void attend(int64_t index) {
    AttentionArgs args;
    args.queries = queries().row(0);
    args.out = attended().row(0);
    args.query_stride = args.out_stride = model_.queries_.stride;
    args.num_pool_blocks = pool_.num_blocks;
    args.pool = pool_.data;
    args.layout = layout_;
    args.layer = index;
    args.group_size = shape_.num_heads / shape_.num_kv_heads;
    args.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_size));
    args.window = window_;
    args.soft_cap = shape_.soft_cap;
    args.scratch = scratch_;
    const std::vector<AttentionTask>& tasks = model_.tasks_;
    next_stage().share({static_cast<int64_t>(tasks.size()), 1, 1}, member_, [&](int64_t number, int64_t last) {
      const AttentionTask& task = tasks[static_cast<size_t>(number)];
      args.next = {};
      if (last < static_cast<int64_t>(tasks.size())) args.next = first_kv(tasks[static_cast<size_t>(last)]);
      args.first_row = task.first_row;
      args.num_rows = task.num_rows;
      args.start = task.start;
      args.table = batch_.sequences[static_cast<size_t>(task.sequence)].table;
      args.kv_head = task.kv_head;
      args.num_kv_heads = task.num_kv_heads;
      kernels_.attention(args);
    });
  }

  NextKv first_kv(const AttentionTask& task) const {
    return {batch_.sequences[static_cast<size_t>(task.sequence)].table, task.kv_head,
            first_piece(task.start, window_) * kPieceTokens, task.start + task.num_rows - 1};
  }

  void multiply_all(const Product& product, Range rows) {
    multiply(product, rows, {0, product.matrix.panels().num_panels()}, false);
  }

  void multiply(const Product& product, Range rows, Range panels, bool same_x) {
    MatmulArgs args;
    args.x = product.x.row(rows.first);
    args.x_stride = product.x.buffer.stride;
    args.num_rows = rows.last - rows.first;
    args.weights = &product.matrix.panels();
    args.first_panel = panels.first;
    args.last_panel = panels.last;
    args.compute = shape_.compute;
    args.epilogue = product.epilogue;
    args.gate = shape_.gate;
    args.bias = product.bias;
    args.out = product.out.row(rows.first) + product.first_column * product.out.buffer.element_bytes;
    args.out_stride = product.out.buffer.stride;
    args.scratch = scratch_;
    args.same_x = same_x;
    kernels_.matmul(args);
  }

  Model& model_;
  const ModelShape& shape_;
  const Kernels& kernels_;
  const Batch& batch_;
  const Pool& pool_;
  const Member member_;
  std::byte* const scratch_;
  const KvLayout layout_;
  const int64_t window_;
  int64_t stage_ = 0;
  // Where row 0 of the step would lie in the buffers of rows on their way, whose part for this thread holds its own.
  int64_t passing_place_ = 0;
};

void Model::run(const Batch& batch, const Pool& pool, int num_threads) {
  const std::lock_guard lock(mutex_);
  check(batch, pool);
  if (batch.num_rows == 0) return;
  num_rows_ = 0;  // what the last step left is gone from here on
  make_scratch(num_threads);
  piece_rows_ = piece_rows(batch.num_rows, num_threads, kernels_.row_multiple);
  make_room(batch.num_rows, piece_rows_ > 0 ? piece_rows_ * num_threads : batch.num_rows);
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
  const std::lock_guard lock(mutex_);
  for (int64_t row : rows)
    if (row < 0 || row >= num_rows_)
      throw std::out_of_range("row " + std::to_string(row) + " is not one of the " + std::to_string(num_rows_) +
                              " of the last step");
  make_scratch(num_threads);
  const auto num_rows = static_cast<int64_t>(rows.size());
  for (int64_t first = 0; first < num_rows; first += passing_capacity_)
    multiply_head(rows.data() + first, std::min(passing_capacity_, num_rows - first), out + first * logits_stride(),
                  num_threads);
}

void Model::multiply_head(const int64_t* rows, int64_t num_rows, float* out, int num_threads) {
  const Panels& head = weights_.head->panels();
  WorkCounter norms, products;
#pragma omp parallel num_threads(num_threads)
  {
    const uint32_t state = kernels_.enter();
    const Member member = this_member();
    norms.share(cut_for(member.count, num_rows, 1), member, [&](int64_t first, int64_t last) {
      for (int64_t index = first; index < last; ++index)
        kernels_.rms_norm(reinterpret_cast<const float*>(hidden_.row(rows[index])), weights_.final_norm.data(),
                          shape_.hidden_size, shape_.norm_eps, shape_.compute, normed_.row(index));
    });
    MatmulArgs args;
    args.x = normed_.row(0);
    args.x_stride = normed_.stride;
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
