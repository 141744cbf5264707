// Arguments that come from Python are checked before a kernel sees them. Not for kernels_*.cpp.
#pragma once

#include <stdexcept>
#include <string>

#include "kernels.h"

namespace giveway {

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
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
}

inline void check_block_size(int64_t block_size) {
  require(block_size > 0 && block_size % kKvPanel == 0, "the block size must be a multiple of 16 tokens");
}

}  // namespace giveway
