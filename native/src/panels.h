// Weights as they come from a file, packed into panels once when a model is loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "types.h"

namespace giveway {

// Memory aligned to 64 bytes, given back with the object; from 2 MiB up in huge pages where the system has them.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(int64_t num_bytes);  // zeroed
  static AlignedBuffer uninitialized(int64_t num_bytes);
  AlignedBuffer(AlignedBuffer&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr, other.size_ = 0;
  }
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer();

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

// Rows of float32 or of activations, zeroed at first.
struct RowBuffer {
  int64_t stride = 0;  // elements
  int64_t element_bytes = 0;
  AlignedBuffer memory;

  RowBuffer() = default;
  RowBuffer(int64_t num_rows, int64_t row_stride, int64_t bytes)
      : stride(row_stride), element_bytes(bytes), memory(num_rows * row_stride * bytes) {}
  std::byte* row(int64_t index) const { return memory.data() + index * stride * element_bytes; }
};

// Zeroed memory of one matrix, aligned to 64 bytes. Small matrices share huge pages: a step reads all of them once, and
// with pages of 4 KiB looks up an address for every 6,500 weights.
std::shared_ptr<std::byte> matrix_memory(int64_t num_bytes);

// How a tensor is stored in a file; the block formats are those of ggml (giveway/runtime/weights/dequantize.py).
enum class Source : int { f32, f16, bf16, q8_0, q4_0, q4_1 };

// Bytes of one stored row of `num_inputs` elements; -1 where they do not fill whole blocks.
int64_t source_row_bytes(Source source, int64_t num_inputs);

// The encoding in which a tensor is kept: its own where possible, else what the compute type multiplies.
Encoding encoding_of(Source source, Compute compute);

// A packed matrix that owns its memory.
class Matrix {
 public:
  Matrix(Encoding encoding, PanelOrder order, int64_t num_outputs, int64_t num_inputs);
  Matrix(Matrix&&) = default;
  Matrix(const Matrix&) = delete;

  // Packs one stored row as output `output`. The source must be one that encoding_of gives this matrix's encoding for,
  // or any source when the encoding is f32 or bf16.
  void pack_row(int64_t output, Source source, const uint8_t* row);

  const Panels& panels() const { return panels_; }

 private:
  std::byte* block(int64_t output, int64_t index);

  std::shared_ptr<std::byte> memory_;
  Panels panels_;
};

}  // namespace giveway
