// What happens to finished products. Included by kernels_*.cpp only.
#pragma once

#include "activations.h"
#include "kernels.h"

namespace giveway::GW_SET {

// x / (1 + e^-x), or x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2, which is x / (1 + e^-2z) with z the
// argument of tanh.
GW_INLINE v16 activate(Gate gate, v16 x) {
  v16 slope = broadcast(-1.0f);
  if (gate == Gate::gelu) slope = fma(mul(x, x), broadcast(-0.0713548163f), broadcast(-1.59576912f));
  return div(x, add(broadcast(1.0f), exp(mul(slope, x))));
}

// totals: [rows][2 panels][16 columns], of the panels from `panel` on.
static void finish(const MatmulArgs& args, int64_t first_row, int64_t num_rows, int64_t panel, int64_t num_panels,
                   const float* totals) {
  for (int64_t row = first_row; row < first_row + num_rows; ++row, totals += kTotalsStride) {
    if (args.epilogue == Epilogue::gate) {
      const v16 gated = mul(activate(args.gate, load(totals)), load(totals + kPanelColumns));
      store_activations(args.out, row * args.out_stride + panel / 2 * kPanelColumns, args.compute, gated);
      continue;
    }
    for (int64_t index = 0; index < num_panels; ++index) {
      const int64_t column = (panel + index) * kPanelColumns;
      float* out = static_cast<float*>(args.out) + row * args.out_stride + column;
      v16 value = load(totals + index * kPanelColumns);
      if (args.bias != nullptr) value = add(value, load(args.bias + column));
      store(out, args.epilogue == Epilogue::add ? add(load(out), value) : value);
    }
  }
}

}  // namespace giveway::GW_SET
