// One kind of kernel over and over, shared out among threads as a step shares it: what `giveway bench kernels` times. A
// step itself never comes here.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "panels.h"

namespace giveway {

// Work that can be done any number of times. A turn is one call of the operation, by all threads together.
class Workload {
 public:
  virtual ~Workload() = default;

  // Does so many turns. Returns the seconds they took; memory is taken before the clock starts.
  double run(int64_t num_turns, int num_threads);

 protected:
  // How a turn is shared out: units of work, and how many of them a thread takes at a time.
  struct Sharing {
    int64_t total;
    int64_t granularity = 1;  // pieces are multiples of this
    int64_t largest_piece = int64_t{1} << 62;
  };

  // scratch_bytes: for each thread.
  Workload(const Kernels& kernels, Sharing sharing, int64_t scratch_bytes)
      : kernels_(kernels), sharing_(sharing), scratch_bytes_(rounded_up(scratch_bytes, kAlignment)) {}

  // Units [first, last) of a turn; the first turn of all has number 0.
  struct Share {
    int64_t turn, first, last;
    std::byte* scratch;  // the thread's own
    bool is_first;       // that this thread does of the turn
  };
  virtual void compute(const Share& share) const = 0;

  const Kernels& kernels_;

 private:
  const Sharing sharing_;
  const int64_t scratch_bytes_;
  int64_t num_turns_done_ = 0;
};

struct ProductShape {
  int64_t num_rows = 0;
  int64_t num_outputs = 0;  // a multiple of 16; 32 for Epilogue::gate
  Compute compute = Compute::f32;
  Epilogue epilogue = Epilogue::store;
};

// A product with num_outputs of the matrix's outputs. Every turn takes the next ones: with a matrix larger than the
// caches the weights come from memory, as in a step.
class ProductWorkload : public Workload {
 public:
  ProductWorkload(const Kernels& kernels, std::shared_ptr<const Matrix> matrix, const ProductShape& shape);

 private:
  void compute(const Share& share) const override;

  std::shared_ptr<const Matrix> matrix_;
  ProductShape shape_;
  RowBuffer x_, out_;
};

struct AttentionShape {
  int64_t num_sequences = 0;
  int64_t num_rows = 0;  // new positions of each sequence
  int64_t context = 0;   // positions of each sequence, the new ones included
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_size = 0;
  int64_t block_size = 0;
  Compute compute = Compute::f32;

  KvLayout layout() const { return {1, num_kv_heads, head_size, block_size, compute}; }
  int64_t blocks_of_sequence() const { return (context + block_size - 1) / block_size; }
};

// Attention of some sequences, each with KV of its own, in one layer.
class AttentionWorkload : public Workload {
 public:
  AttentionWorkload(const Kernels& kernels, const AttentionShape& shape);

 private:
  void compute(const Share& share) const override;

  AttentionShape shape_;
  RowBuffer queries_, out_, pool_;
  std::vector<int32_t> tables_;
};

// RMSNorm of rows of float32.
class NormWorkload : public Workload {
 public:
  NormWorkload(const Kernels& kernels, int64_t num_rows, int64_t size, Compute compute);

 private:
  void compute(const Share& share) const override;

  Compute compute_;
  RowBuffer rows_, weight_, out_;
};

// Rotation of queries and keys of rows at consecutive positions, and storing of their KV.
class RotationWorkload : public Workload {
 public:
  RotationWorkload(const Kernels& kernels, const AttentionShape& shape);

 private:
  void compute(const Share& share) const override;

  AttentionShape shape_;
  RowBuffer qkv_, angles_, queries_, pool_;
};

}  // namespace giveway
