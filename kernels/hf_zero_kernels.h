// The whole C ABI of the native library: fixed-width integers, plain pointers, status codes.
//
// Every kernel exists once per instruction set, as <name>_<isa> with isa one of baseline, avx2, avx512, avx512bf16. The caller asks
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
#define HFZ_ABI_VERSION 6

enum hfz_status { HFZ_OK = 0, HFZ_BAD_TYPE = 1, HFZ_BAD_SIZE = 2 };
enum hfz_type { HFZ_NONE = 0, HFZ_F32 = 1, HFZ_BF16 = 2, HFZ_F16 = 3 };
enum hfz_isa { HFZ_BASELINE = 1, HFZ_AVX2 = 2, HFZ_AVX512 = 4, HFZ_AVX512BF16 = 8 };
enum hfz_decay { HFZ_NO_DECAY = 0, HFZ_L2 = 1, HFZ_DECOUPLED = 2 };

HFZ_EXPORT int32_t hfz_abi_version(void);
// Sum of the hfz_isa values that this processor runs and this library holds.
HFZ_EXPORT int32_t hfz_supported_isas(void);

// Sums come one per this many elements.
#define HFZ_BLOCK 65536
// quantize gives this many elements one scale.
#define HFZ_QUANTIZE_BLOCK 256

// The optimizers' passes: master fp32; states fp32 or bf16 (computed in fp32); low is a bf16 or fp16 copy of the result, or null.
// In all of them g = grad * grad_factor, and decay L2 means g = fma(p, decay, g) next.

//   p = p * decay (decoupled);  m = lerp(m, g, mean_weight);  v = fma(square_weight * g, g, v * beta2)
//   p = p + minus_step * m / (sqrt(v) / root_divisor + eps)
struct hfz_adam_rule {
  float grad_factor;
  float mean_weight;  // 1 - beta1
  float beta2;
  float square_weight;  // 1 - beta2
  float root_divisor;   // sqrt(1 - beta2 ** step), or 1
  float eps;
  float minus_step;    // -lr / (1 - beta1 ** step), or -lr
  float decay;         // weight_decay (L2), or 1 - lr * weight_decay (decoupled)
  int32_t decay_mode;  // hfz_decay
};

//   p = p * decay + minus_lr * sign(lerp(m, g, update_weight));  m = lerp(m, g, momentum_weight)
struct hfz_lion_rule {
  float grad_factor;
  float update_weight;    // 1 - beta1
  float momentum_weight;  // 1 - beta2
  float minus_lr;
  float decay;  // 1 - lr * weight_decay
};

//   sum = fma(g, g, sum);  p = p - lr * g / (sqrt(sum) + eps)
struct hfz_adagrad_rule {
  float grad_factor;
  float lr;  // lr / (1 + (step - 1) * lr_decay)
  float eps;
  float decay;  // L2
};

//   m = g (first step), or fma(g, grad_weight, m * momentum);  p = fma(nesterov ? fma(m, momentum, g) : m, minus_lr, p)
struct hfz_sgd_rule {
  float grad_factor;
  float minus_lr;
  float momentum;
  float grad_weight;  // 1 - dampening
  float decay;        // L2
  int32_t first;
  int32_t nesterov;
};

//   p = p * decay;  p = p + momentum / (sqrt(variance) / divisor + eps) * minus_step, or with sqrt(variance / divisor + eps)
struct hfz_move_rule {
  float decay;  // 1 leaves p alone
  float divisor;
  float eps;
  float minus_step;
  int32_t eps_inside;
};

#define HFZ_DECLARE_PASS(name, isa)                                                                                          \
  HFZ_EXPORT int32_t hfz_##name##_##isa(int64_t count, float* master, const void* grad, int32_t grad_type, void* first_state, \
                                        void* second_state, int32_t state_type, void* low, int32_t low_type,                 \
                                        const struct hfz_##name##_rule* rule);

// convert: between fp32 and bf16 or fp16, to nearest even. squared_norm: sums of squares, one double per block; one that is not
// finite shows an element that is not.
// A table of chunks gives the first element of each (a multiple of 16) and how many it has. compress: error = (momentum * beta + grad *
// weight) + error; then, chunk by chunk, scale = mean magnitude, bit i of byte j is 1 where element 8 j + i is 0 or above, and error -=
// scale * sign. decompress: the mean over workers of what they sent, scale * sign added up in their order; strides are in bytes of
// bits and in scales. recompress: compress of error + decompress. Elements that are not alive are 0 in all of them.
// crc32: CRC-32 as zlib's of each `chunk` bytes of `count`, the last chunk maybe shorter.
// move: one update along a momentum. take: decompress of one worker into momentum, and move; momentum, master and variance begin at
// element `first`.
// quantize codes vectors of `count` elements that lie one behind the other, dequantize decodes them; both do blocks `first` to `last` of
// all of them. Strides lead from message to message, in floats and bytes.
// quantize: per block, scale = largest magnitude / 127 (8 bits) or 7 (4), code = value / scale to the nearest whole number, even if two
// are as near; two's complement, with 4 bits the even element in the low half of its byte. A block that is everywhere below 2**-100 in
// magnitude has scale 0, one with an infinity or NaN scale NaN, both codes 0. With error codes (8 bits, in place, by the same rule) the
// error is added to the values first, and error = error * keep + (value - scale * code) * take is kept, but for blocks of scale NaN.
// dequantize: the sum of scale * code over the `workers` messages of each vector, in their order, rounded once to the type.
#define HFZ_DECLARE(isa)                                                                                                     \
  HFZ_DECLARE_PASS(adam, isa)                                                                                                \
  HFZ_DECLARE_PASS(lion, isa)                                                                                                \
  HFZ_DECLARE_PASS(adagrad, isa)                                                                                             \
  HFZ_DECLARE_PASS(sgd, isa)                                                                                                 \
  HFZ_EXPORT int32_t hfz_convert_##isa(int64_t count, const void* from, int32_t from_type, void* to, int32_t to_type);       \
  HFZ_EXPORT int32_t hfz_squared_norm_##isa(int64_t count, const void* values, int32_t type, double* sums);                  \
  HFZ_EXPORT int32_t hfz_compress_##isa(int64_t chunks, const int64_t* starts, const int64_t* counts, const float* momentum, \
                                        const float* grad, float beta, float weight, const uint8_t* alive, float* error,     \
                                        uint8_t* bits, float* scales);                                                       \
  HFZ_EXPORT int32_t hfz_decompress_##isa(int64_t chunks, const int64_t* starts, const int64_t* counts, int32_t workers,     \
                                          const uint8_t* bits, int64_t bits_stride, const float* scales,                     \
                                          int64_t scales_stride, const uint8_t* alive, float* out);                          \
  HFZ_EXPORT int32_t hfz_recompress_##isa(int64_t chunks, const int64_t* starts, const int64_t* counts, int32_t workers,     \
                                          const uint8_t* sent_bits, int64_t bits_stride, const float* sent_scales,           \
                                          int64_t scales_stride, const uint8_t* alive, float* error, uint8_t* bits,          \
                                          float* scales);                                                                    \
  HFZ_EXPORT int32_t hfz_move_##isa(int64_t count, float* master, const float* momentum, const float* variance,              \
                                    const struct hfz_move_rule* rule);                                                       \
  HFZ_EXPORT int32_t hfz_take_##isa(int64_t chunks, const int64_t* starts, const int64_t* counts, const uint8_t* bits,       \
                                    const float* scales, const uint8_t* alive, int64_t first, float* momentum,               \
                                    float* master, const float* variance, const struct hfz_move_rule* rule);                 \
  HFZ_EXPORT int32_t hfz_quantize_##isa(int64_t first, int64_t last, int64_t count, const void* from, int32_t from_type,     \
                                        int32_t bits, float* scales, int64_t scales_stride, uint8_t* codes,                  \
                                        int64_t codes_stride, float* error_scales, int64_t error_scales_stride,              \
                                        uint8_t* error_codes, int64_t error_codes_stride, float keep, float take);           \
  HFZ_EXPORT int32_t hfz_dequantize_##isa(int64_t first, int64_t last, int64_t count, int32_t workers, int32_t bits,         \
                                          const float* scales, int64_t scales_stride, const uint8_t* codes,                  \
                                          int64_t codes_stride, void* to, int32_t to_type);                                  \
  HFZ_EXPORT int32_t hfz_crc32_##isa(int64_t count, const void* bytes, int64_t chunk, uint32_t* sums);

// A pass or a norm above, given as a pointer, and a copy, over up to `threads` threads; what they compute does not depend on how many.
typedef int32_t (*hfz_pass)(int64_t count, float* master, const void* grad, int32_t grad_type, void* first_state, void* second_state,
                            int32_t state_type, void* low, int32_t low_type, const void* rule);
typedef int32_t (*hfz_norm)(int64_t count, const void* values, int32_t type, double* sums);
HFZ_EXPORT int32_t hfz_threaded_pass(hfz_pass pass, int32_t threads, int64_t count, float* master, const void* grad, int32_t grad_type,
                                     void* first_state, void* second_state, int32_t state_type, void* low, int32_t low_type,
                                     const void* rule);
HFZ_EXPORT int32_t hfz_threaded_norm(hfz_norm norm, int32_t threads, int64_t count, const void* values, int32_t type, double* sums);
HFZ_EXPORT int32_t hfz_threaded_copy(int32_t threads, int64_t bytes, void* to, const void* from);

HFZ_DECLARE(baseline)
HFZ_DECLARE(avx2)
HFZ_DECLARE(avx512)
HFZ_DECLARE(avx512bf16)

#ifdef __cplusplus
}
#endif
#endif
