#include "isa.h"

#include <cctype>
#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>

#if defined(GIVEWAY_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "panels.h"

namespace giveway {
namespace {

#if defined(GIVEWAY_X86)

struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

// Register states that the operating system saves for a thread (XCR0).
uint64_t saved_states() {
  if (!(cpuid(1, 0).c >> 27 & 1)) return 0;
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

constexpr uint64_t kSavesAvx = 0x6, kSavesAvx512 = 0xe6, kSavesTiles = 0x60000;

bool has(uint32_t word, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(word >> bit & 1)) return false;
  return true;
}

std::string why_no_avx2() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
  if (!has(one.c, {12, 28, 29}) || !has(seven.b, {5})) return "the processor lacks AVX2, FMA or F16C";
  return (saved_states() & kSavesAvx) == kSavesAvx ? "" : "the operating system does not save AVX registers";
}

std::string why_no_avx512() {
  if (std::string reason = why_no_avx2(); !reason.empty()) return reason;
  if (!has(cpuid(7, 0).b, {16, 17, 30, 31})) return "the processor lacks AVX-512 (F, DQ, BW, VL)";
  return (saved_states() & kSavesAvx512) == kSavesAvx512 ? "" : "the operating system does not save AVX-512 registers";
}

std::string why_no_avx512_bf16() {
  if (std::string reason = why_no_avx512(); !reason.empty()) return reason;
  return has(cpuid(7, 1).a, {5}) ? "" : "the processor lacks AVX512-BF16";
}

// Linux gives a process the use of tile data only when it asks, once (arch_prctl, since 5.16).
std::string ask_for_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
  return std::string("the operating system refuses AMX tile data: ") + std::strerror(errno);
#else
  return "AMX tile data can be asked for on Linux only";
#endif
}

std::string why_no_amx() {
  if (std::string reason = why_no_avx512_bf16(); !reason.empty()) return reason;
#if defined(GIVEWAY_EMULATE_AMX)
  return "";
#endif
  if (!has(cpuid(7, 0).d, {22, 24})) return "the processor lacks AMX-BF16";
  if ((saved_states() & kSavesTiles) != kSavesTiles) return "the operating system does not save AMX tiles";
  return ask_for_tiles();
}

#endif

sigjmp_buf illegal_instruction;
void on_illegal_instruction(int) { siglongjmp(illegal_instruction, 1); }

constexpr int64_t kInputs = 64, kOutputs = 32;

float weight_at(int64_t output, int64_t k) { return static_cast<float>((k * 112 + output * 7 + k) % 9 - 4); }

// The same small matrix in every way that a set may want it, packed once for all sets.
class SmallMatrices {
 public:
  const Panels& wanted_by(const Kernels& kernels, Compute compute) const {
    if (compute == Compute::f32) return float32_.panels();
    return (kernels.bf16_order == PanelOrder::inputs_first ? inputs_first_ : outputs_first_).panels();
  }

 private:
  static Matrix packed(Encoding encoding, PanelOrder order) {
    Matrix matrix(encoding, order, kOutputs, kInputs);
    for (int64_t output = 0; output < kOutputs; ++output) {
      float row[kInputs];
      for (int64_t k = 0; k < kInputs; ++k) row[k] = weight_at(output, k);
      matrix.pack_row(output, Source::f32, reinterpret_cast<const uint8_t*>(row));
    }
    return matrix;
  }

  const Matrix float32_ = packed(Encoding::f32, PanelOrder::inputs_first);
  const Matrix inputs_first_ = packed(Encoding::bf16, PanelOrder::inputs_first);
  const Matrix outputs_first_ = packed(Encoding::bf16, PanelOrder::outputs_first);
};

// One small product with every compute type: [5, 64] by two panels. Sums in which every order of adding is exact, so
// that avx512_bf16 can be compared too.
bool multiplies_rightly(const Kernels& kernels, const SmallMatrices& matrices) {
  constexpr int64_t kRows = 5, kBuffer = 32;
  alignas(64) static float values[kBuffer * kInputs], out[kBuffer * kOutputs];
  alignas(64) static std::byte activations[kBuffer * kInputs * sizeof(float)];
  for (int64_t i = 0; i < kRows * kInputs; ++i) values[i] = static_cast<float>((i * 5 + i / 8) % 7 - 3);
  std::vector<std::byte> scratch(static_cast<size_t>(kernels.matmul_scratch_bytes(kInputs)) + 64);
  const auto address = reinterpret_cast<uintptr_t>(scratch.data());
  for (Compute compute : {Compute::f32, Compute::bf16}) {
    const int64_t element = kernels.activation_bytes(compute);
    const uint32_t state = kernels.enter();
    for (int64_t row = 0; row < kRows; ++row)
      kernels.to_activations(values + row * kInputs, kInputs, compute, activations + row * kInputs * element);
    MatmulArgs args;
    args.x = activations, args.x_stride = kInputs, args.num_rows = kRows,
    args.weights = &matrices.wanted_by(kernels, compute);
    args.last_panel = 2, args.compute = compute, args.out = out, args.out_stride = kOutputs;
    args.scratch = scratch.data() + (64 - address % 64) % 64;
    kernels.matmul(args);
    kernels.leave(state);
    for (int64_t row = 0; row < kRows; ++row)
      for (int64_t column = 0; column < kOutputs; ++column) {
        float wanted = 0;
        for (int64_t k = 0; k < kInputs; ++k) wanted += values[row * kInputs + k] * weight_at(column, k);
        if (out[row * kOutputs + column] != wanted) return false;
      }
  }
  return true;
}

// Virtual machines have been seen to announce instructions that they do not run, so seeing is believing.
std::string why_it_fails(const Kernels& kernels, const SmallMatrices& matrices) {
  struct sigaction guard = {}, before = {};
  guard.sa_handler = on_illegal_instruction;
  sigaction(SIGILL, &guard, &before);
  std::string reason;
  if (sigsetjmp(illegal_instruction, 1)) {
    reason = "an instruction that the processor announces is illegal when run";
  } else if (!multiplies_rightly(kernels, matrices)) {
    reason = "a small product came out wrong";
  }
  sigaction(SIGILL, &before, nullptr);
  return reason;
}

std::vector<SetState> find_sets() {
  std::vector<SetState> sets{{&kernels_scalar, ""}};
#if defined(GIVEWAY_X86)
  sets.push_back({&kernels_avx2, why_no_avx2()});
  sets.push_back({&kernels_avx512, why_no_avx512()});
  sets.push_back({&kernels_avx512_bf16, why_no_avx512_bf16()});
  sets.push_back({&kernels_amx, why_no_amx()});
#endif
  const SmallMatrices matrices;
  for (SetState& set : sets)
    if (set.why_not.empty()) set.why_not = why_it_fails(*set.kernels, matrices);
  return sets;
}

}  // namespace

const std::vector<SetState>& instruction_sets() {
  static const std::vector<SetState> sets = find_sets();
  return sets;
}

const Kernels& kernels_named(const std::string& name) {
  std::string usable, wanted = name;
  for (char& letter : wanted) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  for (const SetState& set : instruction_sets()) {
    if (set.why_not.empty()) usable += (usable.empty() ? "" : ", ") + std::string(set.kernels->name);
    if (wanted != set.kernels->name) continue;
    if (!set.why_not.empty())
      throw std::runtime_error("instruction set '" + name + "' cannot run here: " + set.why_not);
    return *set.kernels;
  }
  throw std::runtime_error("no instruction set is called '" + name + "'; this machine runs " + usable);
}

const Kernels& chosen_kernels() {
  const char* forced = std::getenv("GIVEWAY_KERNELS_ISA");
  if (forced != nullptr && *forced != '\0') return kernels_named(forced);
  const Kernels* best = &kernels_scalar;
  for (const SetState& set : instruction_sets())
    if (set.why_not.empty()) best = set.kernels;
  return *best;
}

}  // namespace giveway
