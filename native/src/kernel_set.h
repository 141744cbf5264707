// All kernels of one instruction set, as the table that the rest of the library calls. Included by kernels_*.cpp only.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "floating_mode.h"
#include "kernels.h"
#include "matmul.h"
#include "peaks.h"

namespace giveway::GW_SET {

static constexpr Kernels make_kernels(const char* name, int64_t row_multiple = 1,
                                      PanelOrder bf16_order = PanelOrder::inputs_first) {
  return {name,
          kPacksBf16,
          row_multiple,
          bf16_order,
          flush_denormals,
          restore_mode,
          matmul_scratch_bytes,
          attention_scratch_bytes,
          matmul,
          attention,
          rotate,
          rms_norm,
          embed,
          to_activations,
          multiply_peak,
          read_peak};
}

}  // namespace giveway::GW_SET
