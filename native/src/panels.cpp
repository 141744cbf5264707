#include "panels.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "formats.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace giveway {

namespace {

constexpr int64_t kHugePage = int64_t{1} << 21;

// Matrices below this size share pages; none where the address sanitizer is to see what is read beyond the end of one.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kAloneBytes = 0;
#else
constexpr int64_t kAloneBytes = kHugePage;
#endif

}  // namespace

AlignedBuffer AlignedBuffer::uninitialized(int64_t num_bytes) {
  AlignedBuffer buffer;
  if (num_bytes == 0) return buffer;
  // Huge pages where the system has them: small ones cost a look-up each.
  const int64_t alignment = num_bytes >= kHugePage ? kHugePage : kAlignment;
  const int64_t rounded = rounded_up(num_bytes, alignment);
  buffer.data_ =
      static_cast<std::byte*>(std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(rounded)));
  if (buffer.data_ == nullptr) throw std::bad_alloc();
  buffer.size_ = num_bytes;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (alignment == kHugePage) madvise(buffer.data_, static_cast<size_t>(rounded), MADV_HUGEPAGE);
#endif
  return buffer;
}

AlignedBuffer::AlignedBuffer(int64_t num_bytes) : AlignedBuffer(uninitialized(num_bytes)) {
  if (num_bytes > 0) std::memset(data_, 0, static_cast<size_t>(num_bytes));
}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

std::shared_ptr<std::byte> matrix_memory(int64_t num_bytes) {
  constexpr int64_t kSharedBytes = 16 * kHugePage;
  // What matrices are cut from at present, and how much of it is taken. It goes with the last of them.
  static std::mutex mutex;
  static std::weak_ptr<AlignedBuffer> shared;
  static int64_t taken = 0;
  std::shared_ptr<AlignedBuffer> whole;
  std::byte* data = nullptr;
  if (num_bytes >= kAloneBytes) {
    whole = std::make_shared<AlignedBuffer>(AlignedBuffer::uninitialized(num_bytes));
    data = whole->data();
  } else {
    const std::lock_guard lock(mutex);
    whole = shared.lock();
    if (whole == nullptr || whole->size() - taken < num_bytes) {
      whole = std::make_shared<AlignedBuffer>(AlignedBuffer::uninitialized(kSharedBytes));
      shared = whole, taken = 0;
    }
    data = whole->data() + taken;
    taken += rounded_up(num_bytes, kAlignment);
  }
  if (num_bytes > 0) std::memset(data, 0, static_cast<size_t>(num_bytes));
  return {std::move(whole), data};
}

namespace {

struct SourceFormat {
  int64_t elements, bytes;  // of a block
};

SourceFormat format_of(Source source) {
  switch (source) {
    case Source::f32:
      return {1, 4};
    case Source::f16:
    case Source::bf16:
      return {1, 2};
    case Source::q8_0:
      return {32, 34};
    case Source::q4_0:
      return {32, 18};
    case Source::q4_1:
      return {32, 20};
  }
  throw std::invalid_argument("unknown source encoding");
}

template <typename T>
T read(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Element `index` of a stored row, float32. Block formats: the formulas of their sources, every product exact.
float element(Source source, const uint8_t* row, int64_t index) {
  const SourceFormat format = format_of(source);
  const uint8_t* block = row + index / format.elements * format.bytes;
  const int64_t at = index % format.elements;
  const auto nibble = [&](const uint8_t* packed) {
    return static_cast<float>(at < 16 ? packed[at] & 15 : packed[at - 16] >> 4);
  };
  switch (source) {
    case Source::f32:
      return read<float>(block);
    case Source::f16:
      return half_to_float(read<uint16_t>(block));
    case Source::bf16:
      return bf16_to_float(read<uint16_t>(block));
    case Source::q8_0:
      return half_to_float(read<uint16_t>(block)) * static_cast<float>(static_cast<int8_t>(block[2 + at]));
    case Source::q4_0:
      return half_to_float(read<uint16_t>(block)) * (nibble(block + 2) - 8.0f);
    case Source::q4_1:
      return half_to_float(read<uint16_t>(block)) * nibble(block + 4) + half_to_float(read<uint16_t>(block + 2));
  }
  return 0;
}

// Nibbles of a ggml block: low ones are elements 0 to 15, high ones 16 to 31.
void pack_nibbles(const uint8_t* packed, PanelOrder order, std::byte* block, int64_t column) {
  for (int64_t k = 0; k < kBlockK; ++k) {
    const int value = k < 16 ? packed[k] & 15 : packed[k - 16] >> 4;
    if (order == PanelOrder::inputs_first) {
      block[k / 2 * kPanelColumns + column] |= static_cast<std::byte>(value << (k % 2 * 4));
    } else {
      const int64_t word = column / 4 * kBlockK + k;
      block[2 * word + column % 4 / 2] |= static_cast<std::byte>(value << (column % 2 * 4));
    }
  }
}

// Where weight `k` of a column lies, in elements from the start of a block; nibbles not.
int64_t place_of(const Panels& panels, int64_t column, int64_t k) {
  if (panels.order == PanelOrder::outputs_first) return column * kBlockK + k;
  if (panels.encoding == Encoding::bf16) return (k / 2 * kPanelColumns + column) * 2 + k % 2;
  return k * kPanelColumns + column;
}

void pack_half(const uint8_t* half, std::byte* halves, int64_t column) { std::memcpy(halves + 2 * column, half, 2); }

}  // namespace

int64_t source_row_bytes(Source source, int64_t num_inputs) {
  const SourceFormat format = format_of(source);
  return num_inputs % format.elements != 0 ? -1 : num_inputs / format.elements * format.bytes;
}

Encoding encoding_of(Source source, Compute compute) {
  switch (source) {
    case Source::q8_0:
      return Encoding::q8_0;
    case Source::q4_0:
      return Encoding::q4_0;
    case Source::q4_1:
      return Encoding::q4_1;
    case Source::bf16:
      return Encoding::bf16;  // every bfloat16 is a float32
    default:
      return compute == Compute::bf16 ? Encoding::bf16 : Encoding::f32;
  }
}

Matrix::Matrix(Encoding encoding, PanelOrder order, int64_t num_outputs, int64_t num_inputs) {
  panels_ = {nullptr, encoding, order, num_outputs, num_inputs};
  memory_ = matrix_memory(panels_.bytes());
  panels_.data = memory_.get();
}

std::byte* Matrix::block(int64_t output, int64_t index) {
  return memory_.get() + output / kPanelColumns * panels_.panel_bytes() + index * panel_block_bytes(panels_.encoding);
}

void Matrix::pack_row(int64_t output, Source source, const uint8_t* row) {
  const int64_t column = output % kPanelColumns;
  const SourceFormat format = format_of(source);
  for (int64_t index = 0; index < panels_.num_blocks(); ++index) {
    std::byte* target = block(output, index);
    const uint8_t* stored = row + index * format.bytes;  // of the block formats
    switch (panels_.encoding) {
      case Encoding::q8_0:
        for (int k = 0; k < kBlockK; ++k) target[place_of(panels_, column, k)] = static_cast<std::byte>(stored[2 + k]);
        pack_half(stored, target + 512, column);
        break;
      case Encoding::q4_0:
        pack_nibbles(stored + 2, panels_.order, target, column);
        pack_half(stored, target + 256, column);
        break;
      case Encoding::q4_1:
        pack_nibbles(stored + 4, panels_.order, target, column);
        pack_half(stored, target + 256, column);
        pack_half(stored + 2, target + 288, column);
        break;
      default:
        for (int64_t k = index * kBlockK; k < std::min((index + 1) * int64_t{kBlockK}, panels_.num_inputs); ++k) {
          const float value = element(source, row, k);
          const int64_t at = place_of(panels_, column, k % kBlockK);
          if (panels_.encoding == Encoding::f32) {
            std::memcpy(target + at * 4, &value, 4);
          } else {
            const uint16_t rounded = to_bf16(value);
            std::memcpy(target + at * 2, &rounded, 2);
          }
        }
    }
  }
}

}  // namespace giveway
