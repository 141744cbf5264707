// Products of activations with packed weights. Included by kernels_*.cpp only.
#pragma once

#include "decode.h"
#include "kernels.h"

namespace giveway::GW_SET {

GW_INLINE float activation(const float* row, int64_t k) { return row[k]; }

// The order of adding that every set keeps: see kernels.h and the README of this package.
template <Encoding encoding, Compute compute>
static void multiply_panel(const MatmulArgs& args, int64_t panel, float* sums) {
  const int64_t num_blocks = args.weights->num_blocks();
  for (int64_t row = 0; row < args.num_rows; ++row) {
    const float* x = static_cast<const float*>(args.x) + row * args.x_stride;
    v16 total = zero();
    for (int64_t index = 0; index < num_blocks; ++index) {
      const auto block = PanelBlock<encoding, compute>::open(args.weights->panel(panel) + index * panel_block_bytes(encoding));
      v16 even = zero(), odd = zero();
      for (int64_t pair = 0; pair < kBlockK / 2; ++pair) {
        const v16_pair weights = block.pair(pair);
        even = fma(broadcast(x[index * kBlockK + 2 * pair]), weights.even, even);
        odd = fma(broadcast(x[index * kBlockK + 2 * pair + 1]), weights.odd, odd);
      }
      total = add(total, add(even, odd));
    }
    store(sums + row * kPanelColumns, total);
  }
}

}  // namespace giveway::GW_SET
