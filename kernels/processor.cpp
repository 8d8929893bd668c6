// What this processor can run. It is asked here and not through __builtin_cpu_supports, whose answers come from the compiler's run-time
// library: zig's has the table and leaves it empty.

#include "hf_zero_kernels.h"

#if defined(HFZ_X86)
#include <cpuid.h>

namespace {

struct Registers {
  unsigned eax, ebx, ecx, edx;
};

// Zeros where the processor does not know the leaf.
Registers leaf(unsigned number, unsigned part) {
  Registers found = {0, 0, 0, 0};
  __get_cpuid_count(number, part, &found.eax, &found.ebx, &found.ecx, &found.edx);
  return found;
}

bool has(unsigned value, unsigned bits) { return (value & bits) == bits; }

// Registers that the operating system keeps over a change of threads: a bit each (XCR0).
unsigned kept_registers() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Intel's manual, volume 2, CPUID; volume 1, 13.3, XCR0.
constexpr unsigned kPclmul = 1u << 1, kFma = 1u << 12, kXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;  // leaf 1, ecx
constexpr unsigned kAvx2 = 1u << 5, kAvx512f = 1u << 16, kAvx512dq = 1u << 17, kAvx512bw = 1u << 30, kAvx512vl = 1u << 31;  // 7, ebx
constexpr unsigned kAvx512bf16 = 1u << 5;  // leaf 7, part 1, eax
constexpr unsigned kYmm = 6, kZmm = 0xe6;  // registers of 256 bits; of 512, and masks

}  // namespace
#endif

extern "C" int32_t hfz_abi_version(void) { return HFZ_ABI_VERSION; }

extern "C" int32_t hfz_supported_isas(void) {
  int32_t found = HFZ_BASELINE;
#if defined(HFZ_X86)
  if (!has(leaf(1, 0).ecx, kPclmul | kFma | kXsave | kAvx | kF16c)) return found;
  const unsigned kept = kept_registers(), sets = leaf(7, 0).ebx;
  if (has(kept, kYmm) && has(sets, kAvx2)) found |= HFZ_AVX2;
  if ((found & HFZ_AVX2) && has(kept, kZmm) && has(sets, kAvx512f | kAvx512dq | kAvx512bw | kAvx512vl)) {
    found |= HFZ_AVX512;
    if (has(leaf(7, 1).eax, kAvx512bf16)) found |= HFZ_AVX512BF16;
  }
#endif
  return found;
}
