#define GW_SET avx512
#include "kernel_set.h"

namespace giveway {

const Kernels kernels_avx512 = avx512::make_kernels("avx512");

}  // namespace giveway
