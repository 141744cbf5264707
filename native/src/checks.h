// Arguments that come from Python are checked before a kernel sees them. Not for kernels_*.cpp.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace giveway {

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

// The most threads of one call. Each takes memory, and the system ends a process that asks for more than it gives.
inline constexpr int64_t kMostThreads = 1024;

inline int checked_threads(int64_t num_threads) {
  require(num_threads >= 1 && num_threads <= kMostThreads,
          "num_threads is " + std::to_string(num_threads) + "; it must be from 1 to " + std::to_string(kMostThreads));
  return static_cast<int>(num_threads);
}

// No memory has more bytes, and sums of a few of them do not overflow.
inline constexpr int64_t kMostBytes = int64_t{1} << 47;

// Sizes whose product lies in memory: before anything is multiplied that might overflow.
inline void check_sizes(const std::string& what, std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  std::string shown;
  bool may_be = true;
  for (int64_t size : sizes) {
    shown += (shown.empty() ? "" : " x ") + std::to_string(size);
    may_be = may_be && size > 0 && size <= kMostBytes / product;
    if (may_be) product *= size;
  }
  require(may_be, what + " of " + shown + " bytes: every size must be at least 1, and the product at most 2**47");
}

// Some instruction sets want the weights in an order of their own.
inline void check_order(const Panels& panels, const Kernels& kernels, Compute compute) {
  require(panels.order == kernels.panel_order(compute),
          std::string("the matrix was packed for another instruction set or type than ") + kernels.name);
}

inline void check_heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_size) {
  require(head_size > 0 && head_size % kLanes == 0 && head_size <= kLargestHead,
          "the head size must be a multiple of 16, at most " + std::to_string(kLargestHead));
  require(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
          "the heads must be a multiple of the KV heads");
  check_sizes("the heads of a row", {num_heads, head_size, sizeof(float)});
}

inline void check_block_size(int64_t block_size) {
  require(block_size > 0 && block_size % kKvPanel == 0, "the block size must be a multiple of 16 tokens");
}

inline void check_layout(const KvLayout& layout) {
  check_block_size(layout.block_size);
  check_sizes("a KV block",
              {layout.num_layers, layout.num_kv_heads, 2, layout.block_size, layout.head_size, layout.element_bytes()});
}

inline void check_window(int64_t window) {
  require(window >= 0, "window is " + std::to_string(window) + "; it must be a number of positions, or 0 for all");
}

// A window that no position reaches the end of hides nothing: the same as none, and no sum with it can overflow.
constexpr int64_t window_among(int64_t num_positions, int64_t window) { return window < num_positions ? window : 0; }

}  // namespace giveway
