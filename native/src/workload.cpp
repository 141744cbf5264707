#include "workload.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "formats.h"
#include "work_counter.h"

namespace giveway {
namespace {

// Rows filled with values between -1 and 1.
RowBuffer filled_rows(int64_t num_rows, int64_t stride, int64_t element_bytes) {
  RowBuffer rows(num_rows, stride, element_bytes);
  uint32_t state = 1;
  for (int64_t index = 0; index < num_rows * stride; ++index) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
    if (element_bytes == 4) {
      reinterpret_cast<float*>(rows.memory.data())[index] = value;
    } else {
      reinterpret_cast<uint16_t*>(rows.memory.data())[index] = to_bf16(value);
    }
  }
  return rows;
}

RowBuffer activations(const Kernels& kernels, Compute compute, int64_t num_rows, int64_t num_columns) {
  return filled_rows(rounded_up(num_rows, kernels.row_multiple), activation_stride(num_columns),
                     kernels.activation_bytes(compute));
}

RowBuffer product_out(const Kernels& kernels, const ProductShape& shape) {
  if (shape.epilogue == Epilogue::gate)
    return activations(kernels, shape.compute, shape.num_rows, shape.num_outputs / 2);
  return filled_rows(rounded_up(shape.num_rows, kernels.row_multiple), shape.num_outputs, 4);
}

RowBuffer pool_of(const AttentionShape& shape) {
  const int64_t element = shape.layout().element_bytes();
  return filled_rows(shape.num_sequences * shape.blocks_of_sequence(), shape.layout().block_bytes() / element, element);
}

int64_t heads_of_call(const AttentionShape& shape) {
  return heads_together(shape.num_rows, shape.num_heads / shape.num_kv_heads, shape.num_kv_heads);
}

int64_t calls_of_piece(const AttentionShape& shape) {
  return (shape.num_kv_heads + heads_of_call(shape) - 1) / heads_of_call(shape);
}

int64_t pieces_of_rows(int64_t num_rows) { return (num_rows + kAttentionRows - 1) / kAttentionRows; }

}  // namespace

double Workload::run(int64_t num_turns, int num_threads) {
  std::vector<WorkCounter> turns(static_cast<size_t>(num_turns));
  const AlignedBuffer scratch(scratch_bytes_ * num_threads);
  Cut cut = cut_for(num_threads, sharing_.total, sharing_.granularity);
  cut.piece = std::min(cut.piece, sharing_.largest_piece);
  const auto started = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(num_threads)
  {
    const uint32_t state = kernels_.enter();
    const Member member = this_member();
    std::byte* own = scratch.data() + member.index * scratch_bytes_;
    for (int64_t turn = 0; turn < num_turns; ++turn) {
      bool is_first = true;
      turns[static_cast<size_t>(turn)].share(cut, member, [&](int64_t first, int64_t last) {
        compute({num_turns_done_ + turn, first, last, own, is_first});
        is_first = false;
      });
    }
    kernels_.leave(state);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  num_turns_done_ += num_turns;
  return seconds;
}

ProductWorkload::ProductWorkload(const Kernels& kernels, std::shared_ptr<const Matrix> matrix,
                                 const ProductShape& shape)
    : Workload(kernels, {shape.num_outputs / kPanelColumns, panels_together(shape.num_rows, shape.epilogue)},
               kernels.matmul_scratch_bytes(matrix->panels().num_inputs)),
      matrix_(std::move(matrix)),
      shape_(shape),
      x_(activations(kernels, shape.compute, shape.num_rows, matrix_->panels().num_inputs)),
      out_(product_out(kernels, shape)) {}

void ProductWorkload::compute(const Share& share) const {
  const Panels& all = matrix_->panels();
  const int64_t num_products = all.num_outputs / shape_.num_outputs;
  Panels weights = all;
  weights.data = all.panel(share.turn % num_products * (shape_.num_outputs / kPanelColumns));
  weights.num_outputs = shape_.num_outputs;
  MatmulArgs args;
  args.x = x_.row(0);
  args.x_stride = x_.stride;
  args.num_rows = shape_.num_rows;
  args.weights = &weights;
  args.first_panel = share.first;
  args.last_panel = share.last;
  args.compute = shape_.compute;
  args.epilogue = shape_.epilogue;
  args.out = out_.row(0);
  args.out_stride = out_.stride;
  args.scratch = share.scratch;
  args.same_x = !share.is_first;
  kernels_.matmul(args);
}

AttentionWorkload::AttentionWorkload(const Kernels& kernels, const AttentionShape& shape)
    : Workload(kernels, {shape.num_sequences * pieces_of_rows(shape.num_rows) * calls_of_piece(shape), 1, 1},
               kernels.attention_scratch_bytes(shape.layout(), shape.num_heads / shape.num_kv_heads)),
      shape_(shape),
      queries_(
          activations(kernels, shape.compute, shape.num_sequences * shape.num_rows, shape.num_heads * shape.head_size)),
      out_(
          activations(kernels, shape.compute, shape.num_sequences * shape.num_rows, shape.num_heads * shape.head_size)),
      pool_(pool_of(shape)) {
  for (int64_t block = 0; block < shape.num_sequences * shape.blocks_of_sequence(); ++block)
    tables_.push_back(static_cast<int32_t>(block));
}

// Units: pieces of a sequence's rows, the last and longest first as in a step, and of these the KV heads that are
// taken together.
void AttentionWorkload::compute(const Share& share) const {
  AttentionArgs args;
  args.queries = queries_.row(0);
  args.out = out_.row(0);
  args.query_stride = queries_.stride;
  args.out_stride = out_.stride;
  args.num_pool_blocks = static_cast<int64_t>(tables_.size());
  args.pool = pool_.row(0);
  args.layout = shape_.layout();
  args.group_size = shape_.num_heads / shape_.num_kv_heads;
  args.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_size));
  args.scratch = share.scratch;
  const int64_t calls = calls_of_piece(shape_), units_of_piece = shape_.num_sequences * calls;
  for (int64_t unit = share.first; unit < share.last; ++unit) {
    const int64_t piece = pieces_of_rows(shape_.num_rows) - 1 - unit / units_of_piece;
    const int64_t sequence = unit % units_of_piece / calls, done = piece * kAttentionRows;
    args.first_row = sequence * shape_.num_rows + done;
    args.num_rows = std::min(kAttentionRows, shape_.num_rows - done);
    args.start = shape_.context - shape_.num_rows + done;
    args.table = tables_.data() + sequence * shape_.blocks_of_sequence();
    args.kv_head = unit % calls * heads_of_call(shape_);
    args.num_kv_heads = std::min(heads_of_call(shape_), shape_.num_kv_heads - args.kv_head);
    kernels_.attention(args);
  }
}

NormWorkload::NormWorkload(const Kernels& kernels, int64_t num_rows, int64_t size, Compute compute)
    : Workload(kernels, {num_rows}, 0),
      compute_(compute),
      rows_(filled_rows(num_rows, size, 4)),
      weight_(filled_rows(1, size, 4)),
      out_(activations(kernels, compute, num_rows, size)) {}

void NormWorkload::compute(const Share& share) const {
  for (int64_t row = share.first; row < share.last; ++row)
    kernels_.rms_norm(reinterpret_cast<const float*>(rows_.row(row)), reinterpret_cast<const float*>(weight_.row(0)),
                      rows_.stride, 1e-5f, compute_, out_.row(row));
}

RotationWorkload::RotationWorkload(const Kernels& kernels, const AttentionShape& shape)
    : Workload(kernels, {shape.num_rows}, 0),
      shape_(shape),
      qkv_(filled_rows(shape.num_rows, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size, 4)),
      angles_(filled_rows(shape.num_rows, shape.head_size, 4)),
      queries_(activations(kernels, shape.compute, shape.num_rows, shape.num_heads * shape.head_size)),
      pool_(pool_of(shape)) {}

void RotationWorkload::compute(const Share& share) const {
  RotateArgs args;
  args.num_heads = shape_.num_heads;
  args.pool = pool_.row(0);
  args.layout = shape_.layout();
  for (int64_t row = share.first; row < share.last; ++row) {
    args.qkv = reinterpret_cast<const float*>(qkv_.row(row));
    args.cosine = reinterpret_cast<const float*>(angles_.row(row));
    args.sine = args.cosine + shape_.head_size / 2;
    args.queries = queries_.row(row);
    args.block = row / shape_.block_size;
    args.offset = row % shape_.block_size;
    kernels_.rotate(args);
  }
}

}  // namespace giveway
