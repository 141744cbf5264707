#if defined(GIVEWAY_EMULATE_AMX)
#include "amx_emulated.h"
#endif

#define GW_SET amx
#define GW_PACKS_BF16 true
#include "kernel_set.h"

namespace giveway {

const Kernels kernels_amx = amx::make_kernels("amx", 32, PanelOrder::outputs_first);

}  // namespace giveway
