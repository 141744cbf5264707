// Copies of whole KV blocks between two pools, or within one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace giveway {

// Blocks of equal size, one behind the other. Byte: std::byte, const where they are only read.
template <typename Byte>
struct BlockPool {
  Byte* first;
  int64_t num_blocks;
};

// Block numbers: from source to target.
struct BlockPair {
  int64_t source;
  int64_t target;
};

// Copies blocks of block_bytes from one pool to another, in any order and on up to num_threads threads. No block may be
// the target of two pairs, nor the source of one and the target of another.
// Throws std::out_of_range if a pool has no such block; nothing has been copied then.
void copy_blocks(BlockPool<const std::byte> source, BlockPool<std::byte> target, int64_t block_bytes,
                 const BlockPair* pairs, int64_t num_pairs, int num_threads);

// Copies blocks within one pool, one pair after another: a target may be the source of a later pair. Throws as above.
void copy_blocks_in_order(BlockPool<std::byte> pool, int64_t block_bytes, const BlockPair* pairs, int64_t num_pairs);

}  // namespace giveway
