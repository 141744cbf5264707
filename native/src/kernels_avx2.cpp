#define GW_SET avx2
#include "kernel_set.h"

namespace giveway {

const Kernels kernels_avx2 = avx2::make_kernels("avx2");

}  // namespace giveway
