// Copies of KV blocks as functions of the Python module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "block_copy.h"

namespace nb = nanobind;

namespace giveway {

namespace {

using PoolArray = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;  // [blocks, bytes of a block]
using PairArray = nb::ndarray<const int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

static_assert(sizeof(BlockPair) == 2 * sizeof(int64_t));

BlockPool pool_of(const PoolArray& blocks) {
  return {reinterpret_cast<std::byte*>(blocks.data()), static_cast<int64_t>(blocks.shape(0))};
}

const BlockPair* pairs_of(const PairArray& pairs) { return reinterpret_cast<const BlockPair*>(pairs.data()); }

void copy_between_pools(const PoolArray& source, const PoolArray& target, const PairArray& pairs, int num_threads) {
  if (source.shape(1) != target.shape(1)) throw std::invalid_argument("the blocks of the two pools differ in size");
  if (num_threads < 1) throw std::invalid_argument("num_threads must be at least 1");
  const nb::gil_scoped_release released;
  giveway::copy_blocks(pool_of(source), pool_of(target), source.shape(1), pairs_of(pairs), pairs.shape(0), num_threads);
}

void copy_within_pool(const PoolArray& pool, const PairArray& pairs) {
  const nb::gil_scoped_release released;
  giveway::copy_blocks_in_order(pool_of(pool), pool.shape(1), pairs_of(pairs), pairs.shape(0));
}

}  // namespace

void bind_block_copy(nb::module_& m) {
  m.def("copy_blocks", &copy_between_pools, nb::arg("source").noconvert(), nb::arg("target").noconvert(), nb::arg("pairs"),
        nb::kw_only(), nb::arg("num_threads"),
        "Copies whole blocks from one pool to another on up to num_threads threads, in any order. source, target: uint8 "
        "[blocks, bytes of a block]. pairs: int64 [n, 2] of (source, target); no block may be a target twice, or source "
        "and target. Raises IndexError if a pool has no such block, before anything is copied.");
  m.def("copy_blocks_in_order", &copy_within_pool, nb::arg("pool").noconvert(), nb::arg("pairs"),
        "Copies whole blocks within one pool, one pair after another: a target may be the source of a later pair. "
        "Arguments and errors as in copy_blocks.");
}

}  // namespace giveway
