#define GW_SET scalar
#include "kernel_set.h"

namespace giveway {

const Kernels kernels_scalar = scalar::make_kernels("scalar");

}  // namespace giveway
