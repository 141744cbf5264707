// The Python module giveway_kernels._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "isa.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
#ifndef GIVEWAY_CHECK_BLOCKS
  // What a process still holds when it ends is no leak worth a page of warnings; the sanitizers' build shows it.
  nb::set_leak_warnings(false);
#endif
  m.def(
      "instruction_sets",
      [] {
        std::vector<std::pair<std::string, std::string>> found;
        for (const giveway::SetState& set : giveway::instruction_sets())
          found.emplace_back(set.kernels->name, set.why_not);
        return found;
      },
      "Name of every instruction set, slowest first, and why it cannot run here (empty: it can).");
  m.def(
      "chosen_instruction_set", [] { return std::string(giveway::chosen_kernels().name); },
      "The set that runs: the fastest, or that of GIVEWAY_KERNELS_ISA. Raises RuntimeError when that one cannot run.");
  giveway::bind_matrix(m);
  giveway::bind_model(m);
  giveway::bind_ops(m);
  giveway::bind_attention(m);
  giveway::bind_peaks(m);
  giveway::bind_sampling(m);
  giveway::bind_block_copy(m);
}
