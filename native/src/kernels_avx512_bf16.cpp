#define GW_SET avx512_bf16
#define GW_PACKS_BF16 true
#include "kernel_set.h"

namespace giveway {

const Kernels kernels_avx512_bf16 = avx512_bf16::make_kernels("avx512_bf16");

}  // namespace giveway
