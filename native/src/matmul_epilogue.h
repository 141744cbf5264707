// What happens to finished products. Included by kernels_*.cpp only.
#pragma once

#include <type_traits>

#include "activations.h"
#include "kernels.h"

namespace giveway::GW_SET {

// The activation is x / (1 + e^-x), or x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2, which is x / (1 + e^-2z)
// with z the argument of tanh. In two steps: together they take longer than what AMX has to do meanwhile. First the
// power of e.
GW_INLINE v16 power_of_gate(Gate gate, v16 x) {
  v16 slope = broadcast(-1.0f);
  if (gate == Gate::gelu) slope = fma(mul(x, x), broadcast(-0.0713548163f), broadcast(-1.59576912f));
  return exp(mul(slope, x));
}

GW_INLINE void store_gated(const MatmulArgs& args, int64_t row, int64_t panel, const float* totals, v16 power) {
  const v16 activated = div(load(totals), add(broadcast(1.0f), power));
  store_activations(args.out, row * args.out_stride + panel / 2 * kPanelColumns, args.compute,
                    mul(activated, load(totals + kPanelColumns)));
}

// What is stored, or added to what is there. totals: of one row, [panels][16 columns], of the panels from `panel` on.
template <bool adds>
GW_INLINE void store_sums(const MatmulArgs& args, int64_t row, int64_t panel, int64_t num_panels, const float* totals) {
  float* out = static_cast<float*>(args.out) + row * args.out_stride + panel * kPanelColumns;
  const float* bias = args.bias == nullptr ? nullptr : args.bias + panel * kPanelColumns;
  const auto store_panel = [&](int64_t at) {
    v16 value = load(totals + at);
    if (bias != nullptr) value = add(value, load(bias + at));
    store(out + at, adds ? add(load(out + at), value) : value);
  };
  store_panel(0);
  if (num_panels > 1) store_panel(kPanelColumns);
}

// totals: [rows][2 panels][16 columns], of the panels from `panel` on.
template <Epilogue epilogue>
GW_INLINE void finish(const MatmulArgs& args, int64_t first_row, int64_t num_rows, int64_t panel, int64_t num_panels,
                      const float* totals) {
  for (int64_t row = first_row; row < first_row + num_rows; ++row, totals += kTotalsStride) {
    if constexpr (epilogue == Epilogue::gate) {
      store_gated(args, row, panel, totals, power_of_gate(args.gate, load(totals)));
    } else {
      store_sums<epilogue == Epilogue::add>(args, row, panel, num_panels, totals);
    }
  }
}

// Calls function(epilogue) with the epilogue as a constant.
template <typename Function>
GW_INLINE void with_epilogue(Epilogue epilogue, Function function) {
  switch (epilogue) {
    case Epilogue::store:
      return function(std::integral_constant<Epilogue, Epilogue::store>());
    case Epilogue::add:
      return function(std::integral_constant<Epilogue, Epilogue::add>());
    case Epilogue::gate:
      return function(std::integral_constant<Epilogue, Epilogue::gate>());
  }
}

static void finish(const MatmulArgs& args, int64_t first_row, int64_t num_rows, int64_t panel, int64_t num_panels,
                   const float* totals) {
  with_epilogue(args.epilogue,
                [&](auto epilogue) { finish<epilogue>(args, first_row, num_rows, panel, num_panels, totals); });
}

}  // namespace giveway::GW_SET
