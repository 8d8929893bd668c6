// What this processor can run.

#include "hf_zero_kernels.h"

extern "C" int32_t hfz_abi_version(void) { return HFZ_ABI_VERSION; }

extern "C" int32_t hfz_supported_isas(void) {
  int32_t found = HFZ_BASELINE;
#if defined(HFZ_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
      __builtin_cpu_supports("pclmul"))
    found |= HFZ_AVX2;
  if ((found & HFZ_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found |= HFZ_AVX512;
    if (__builtin_cpu_supports("avx512bf16")) found |= HFZ_AVX512BF16;
  }
#endif
  return found;
}
