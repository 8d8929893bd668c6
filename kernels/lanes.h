// Sixteen floats as one value, for four instruction sets. Every operation is one IEEE-754 operation per lane, so all
// give the same bits. Everything has internal linkage: each instruction set compiles its own copy.

#ifndef HF_ZERO_LANES_H
#define HF_ZERO_LANES_H

#include <stdint.h>
#include <string.h>

#if defined(HFZ_USE_AVX512BF16) || defined(HFZ_USE_AVX512) || defined(HFZ_USE_AVX2)
#include <immintrin.h>
#else
#include <math.h>
#endif

#define HFZ_INLINE static inline __attribute__((always_inline))
#define HFZ_RULE inline __attribute__((always_inline))  // for members that use `this`

namespace {

constexpr int64_t kLanes = 16;

#if defined(HFZ_USE_AVX512BF16) || defined(HFZ_USE_AVX512)
#include "lanes_avx512.inc"
#elif defined(HFZ_USE_AVX2)
#include "lanes_avx2.inc"
#else
#include "lanes_baseline.inc"
#endif

// Division by one number for a whole range, with the bits of a true division, for a that is 0, from 2**-80 to 2**80, infinite or
// NaN. The divider is what Adam waits for, and multiply-adds have room. The quotient from a reciprocal of two floats is one of the
// two floats around a / b; its remainder is then exact, and one more step rounds right (Markstein, "Computation of elementary
// functions on the IBM RISC System/6000 processor", 1990). Infinity and NaN divided by a positive number are themselves.
class Divisor {
 public:
  explicit Divisor(float b)
      : value_(all(b)),
        high_(all((float)(1.0 / (double)b))),
        low_(all((float)(1.0 / (double)b - (double)(float)(1.0 / (double)b)))),
        multiplies_(kMultiplies && b >= 0x1p-20f && b <= 1.0f) {}

  HFZ_RULE Lanes divide(Lanes a) const {
    if (!multiplies_) return div(a, value_);
    const Lanes quotient = fma(a, high_, mul(a, low_));
    const Lanes remainder = minus_fma(quotient, value_, a);
    return where_finite(a, fma(remainder, high_, quotient), a);
  }

 private:
  Lanes value_, high_, low_;
  bool multiplies_;
};

// How the element types of the ABI are read into lanes and written from them. `stream` bypasses the cache: for data that is
// written only, it saves the read that a normal store begins with. It needs a multiple of 16 elements as alignment.
struct F32 {
  using Element = float;
  HFZ_INLINE Lanes load(const float* from) { return load_f32(from); }
  HFZ_INLINE void store(float* to, Lanes value) { store_f32(to, value); }
  HFZ_INLINE void stream(float* to, Lanes value) { stream_f32(to, value); }
};
struct BF16 {
  using Element = uint16_t;
  HFZ_INLINE Lanes load(const uint16_t* from) { return load_bf16(from); }
  HFZ_INLINE void store(uint16_t* to, Lanes value) { store_16(to, to_bf16(value)); }
  HFZ_INLINE void stream(uint16_t* to, Lanes value) { stream_16(to, to_bf16(value)); }
};
struct F16 {
  using Element = uint16_t;
  HFZ_INLINE Lanes load(const uint16_t* from) { return load_f16(from); }
  HFZ_INLINE void store(uint16_t* to, Lanes value) { store_16(to, to_f16(value)); }
  HFZ_INLINE void stream(uint16_t* to, Lanes value) { stream_16(to, to_f16(value)); }
};
struct Nothing {
  using Element = uint16_t;
  HFZ_INLINE void store(uint16_t*, Lanes) {}
  HFZ_INLINE void stream(uint16_t*, Lanes) {}
};

}  // namespace
#endif
