// The whole C ABI of the native library: fixed-width integers, plain pointers, status codes.
//
// Every kernel exists once per instruction set, as <name>_<isa> with isa one of baseline, avx2, avx512. The caller asks
// hfz_supported_isas() once and picks. All instruction sets give the same bits. A call uses one thread and keeps no state, so
// any number of threads may work on ranges that do not overlap, and the result does not depend on how a range is sliced.
// Pointers need the alignment of their element type only. Sizes are in elements.

#ifndef HF_ZERO_KERNELS_H
#define HF_ZERO_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define HFZ_EXPORT __attribute__((visibility("default")))
#else
#define HFZ_EXPORT
#endif

// Raised with every change of a signature, a struct or the meaning of an argument; the loader compares it.
#define HFZ_ABI_VERSION 1

enum hfz_status { HFZ_OK = 0, HFZ_BAD_TYPE = 1, HFZ_BAD_SIZE = 2 };
enum hfz_type { HFZ_NONE = 0, HFZ_F32 = 1, HFZ_BF16 = 2, HFZ_F16 = 3 };
enum hfz_isa { HFZ_BASELINE = 1, HFZ_AVX2 = 2, HFZ_AVX512 = 4 };
enum hfz_decay { HFZ_NO_DECAY = 0, HFZ_L2 = 1, HFZ_DECOUPLED = 2 };

HFZ_EXPORT int32_t hfz_abi_version(void);
// Sum of the hfz_isa values that this processor runs and this library holds.
HFZ_EXPORT int32_t hfz_supported_isas(void);

// What one Adam step does to every element:
//   g = grad * grad_factor;  g = fma(p, decay, g) (L2)  or  p = p * decay (decoupled)
//   m = lerp(m, g, mean_weight);  v = fma(square_weight * g, g, v * beta2)
//   p = p + minus_step * m / (sqrt(v) / root_divisor + eps)
struct hfz_adam_rule {
  float grad_factor;
  float mean_weight;    // 1 - beta1
  float beta2;
  float square_weight;  // 1 - beta2
  float root_divisor;   // sqrt(1 - beta2 ** step), or 1
  float eps;
  float minus_step;     // -lr / (1 - beta1 ** step), or -lr
  float decay;          // weight_decay (L2), or 1 - lr * weight_decay (decoupled)
  int32_t decay_mode;   // hfz_decay
};

#define HFZ_DECLARE(isa)                                                                                               \
  HFZ_EXPORT int32_t hfz_adam_##isa(int64_t count, float* master, const void* grad, int32_t grad_type, void* exp_avg,  \
                                    void* exp_avg_sq, int32_t moment_type, void* low, int32_t low_type,                \
                                    const struct hfz_adam_rule* rule);

HFZ_DECLARE(baseline)
HFZ_DECLARE(avx2)
HFZ_DECLARE(avx512)

#ifdef __cplusplus
}
#endif
#endif
