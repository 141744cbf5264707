// How denormal numbers are treated while kernels run. Included by kernels_*.cpp only.
#pragma once

#include "vec16.h"

#if defined(GIVEWAY_X86)
#include <xmmintrin.h>
#endif

namespace giveway::GW_SET {

// AMX flushes denormal numbers to zero, going in and coming out; so all sets do. Returns the mode to go back to.
static uint32_t flush_denormals() {
#if defined(GIVEWAY_X86)
  constexpr uint32_t kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | kFlushToZero | kDenormalsAreZero);
  return before;
#else
  return 0;
#endif
}

static void restore_mode([[maybe_unused]] uint32_t before) {
#if defined(GIVEWAY_X86)
  _mm_setcsr(before);
#endif
}

}  // namespace giveway::GW_SET
