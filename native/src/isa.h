// Which instruction set runs.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace giveway {

struct SetState {
  const Kernels* kernels;
  std::string why_not;  // empty: this machine can run it
};

// All sets, slowest first, each with why it cannot run here. Looks at the processor and, for AMX, asks the operating
// system for the use of its registers; then runs a small product and compares it with the scalar set's. Done once.
const std::vector<SetState>& instruction_sets();

// The fastest set that runs here, or the one named by GIVEWAY_KERNELS_ISA. Throws std::runtime_error naming the value,
// what can be used, and why the one asked for cannot.
const Kernels& chosen_kernels();

// A set by name; throws std::runtime_error when it is unknown or cannot run here.
const Kernels& kernels_named(const std::string& name);

}  // namespace giveway
