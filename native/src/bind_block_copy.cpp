// Copies of KV blocks as functions of the Python module.
#include "bind.h"
#include "block_copy.h"

namespace nb = nanobind;

namespace giveway {

namespace {

// [blocks, bytes of a block]
using SourcePool = InArray<uint8_t, 2>;
using TargetPool = OutArray<uint8_t, 2>;
using Pairs = nb::ndarray<const int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

static_assert(sizeof(BlockPair) == 2 * sizeof(int64_t));

const BlockPair* first_of(const Pairs& pairs) { return reinterpret_cast<const BlockPair*>(pairs.data()); }

void copy_between_pools(const SourcePool& source, const TargetPool& target, const Pairs& pairs, int64_t num_threads) {
  require(source.shape(1) == target.shape(1), "the pools have blocks of " + std::to_string(source.shape(1)) +
                                                  " and of " + std::to_string(target.shape(1)) + " bytes");
  const int count = checked_threads(num_threads);
  const nb::gil_scoped_release released;
  copy_blocks({reinterpret_cast<const std::byte*>(source.data()), static_cast<int64_t>(source.shape(0))},
              {reinterpret_cast<std::byte*>(target.data()), static_cast<int64_t>(target.shape(0))},
              static_cast<int64_t>(source.shape(1)), first_of(pairs), static_cast<int64_t>(pairs.shape(0)), count);
}

void copy_within_pool(const TargetPool& pool, const Pairs& pairs) {
  const nb::gil_scoped_release released;
  copy_blocks_in_order({reinterpret_cast<std::byte*>(pool.data()), static_cast<int64_t>(pool.shape(0))},
                       static_cast<int64_t>(pool.shape(1)), first_of(pairs), static_cast<int64_t>(pairs.shape(0)));
}

}  // namespace

void bind_block_copy(nb::module_& m) {
  m.def("copy_blocks", &copy_between_pools, array_arg("source"), array_arg("target"), array_arg("pairs"), nb::kw_only(),
        nb::arg("num_threads"),
        "Copy whole blocks from one pool to another on up to num_threads threads, in any order. source, target: uint8 "
        "[blocks, bytes of a block]. pairs: int64 [n, 2] of (source, target); no block may be a target twice, or "
        "source and target. Raises IndexError if a pool has no such block, before anything is copied.");
  m.def("copy_blocks_in_order", &copy_within_pool, array_arg("pool"), array_arg("pairs"),
        "Copy whole blocks within one pool, one pair after another: a target may be the source of a later pair. "
        "Arguments and errors as in copy_blocks.");
}

}  // namespace giveway
