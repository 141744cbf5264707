#include "block_copy.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace giveway {

namespace {

// What one thread takes at a time. Equal shares would take as long as the thread that the system lets run last.
constexpr int64_t kPieceBytes = 1 << 20;
// From this size on a further thread earns more than waking it costs.
constexpr int64_t kLargeCopyBytes = 2 << 20;

struct Piece {
  std::byte* target;
  const std::byte* source;
  int64_t num_bytes;
};

void check_block(int64_t block, int64_t num_blocks) {
  if (block >= 0 && block < num_blocks) return;
  const std::string range = num_blocks > 0 ? "blocks 0 to " + std::to_string(num_blocks - 1) : "no blocks";
  throw std::out_of_range("copy of KV block " + std::to_string(block) + ": that pool has " + range +
                          "; nothing was copied");
}

void check_pairs(const BlockPair* pairs, int64_t num_pairs, int64_t num_source, int64_t num_target) {
  for (int64_t i = 0; i < num_pairs; ++i) {
    check_block(pairs[i].source, num_source);
    check_block(pairs[i].target, num_target);
  }
}

// Neighbours on both sides become one piece, and long ones are cut so that threads can share them.
std::vector<Piece> pieces_of(const BlockPool& source, const BlockPool& target, int64_t block_bytes,
                             const BlockPair* pairs, int64_t num_pairs) {
  std::vector<Piece> pieces;
  for (int64_t first = 0, end; first < num_pairs; first = end) {
    end = first + 1;
    while (end < num_pairs && pairs[end].source == pairs[end - 1].source + 1 &&
           pairs[end].target == pairs[end - 1].target + 1) {
      ++end;
    }
    const int64_t num_bytes = (end - first) * block_bytes;
    for (int64_t start = 0; start < num_bytes; start += kPieceBytes) {
      pieces.push_back({target.first + pairs[first].target * block_bytes + start,
                        source.first + pairs[first].source * block_bytes + start,
                        std::min(kPieceBytes, num_bytes - start)});
    }
  }
  return pieces;
}

}  // namespace

void copy_blocks(const BlockPool& source, const BlockPool& target, int64_t block_bytes, const BlockPair* pairs,
                 int64_t num_pairs, int num_threads) {
  check_pairs(pairs, num_pairs, source.num_blocks, target.num_blocks);
  const std::vector<Piece> pieces = pieces_of(source, target, block_bytes, pairs, num_pairs);
  const int64_t num_pieces = static_cast<int64_t>(pieces.size());
  const bool is_large = num_pairs * block_bytes >= kLargeCopyBytes;
#pragma omp parallel for schedule(dynamic) num_threads(is_large ? num_threads : 1)
  for (int64_t i = 0; i < num_pieces; ++i) std::memcpy(pieces[i].target, pieces[i].source, pieces[i].num_bytes);
}

void copy_blocks_in_order(const BlockPool& pool, int64_t block_bytes, const BlockPair* pairs, int64_t num_pairs) {
  check_pairs(pairs, num_pairs, pool.num_blocks, pool.num_blocks);
  for (int64_t i = 0; i < num_pairs; ++i) {
    if (pairs[i].source == pairs[i].target) continue;
    std::memcpy(pool.first + pairs[i].target * block_bytes, pool.first + pairs[i].source * block_bytes, block_bytes);
  }
}

}  // namespace giveway
