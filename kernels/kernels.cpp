// All kernels for one instruction set. CMake compiles this file once per set, with HFZ_ISA naming it.

#include "hf_zero_kernels.h"
#include "lanes.h"

#define HFZ_JOIN_(name, isa) name##_##isa
#define HFZ_JOIN(name, isa) HFZ_JOIN_(name, isa)
#define HFZ_NAME(name) HFZ_JOIN(name, HFZ_ISA)

namespace {
// From this many elements on, what is only written bypasses the cache; smaller ranges are likely to be read again soon.
constexpr int64_t kStreamFrom = 1 << 16;
}  // namespace

#include "pass.inc"

#include "adagrad.inc"
#include "adam.inc"
#include "lion.inc"
#include "sgd.inc"

#include "convert.inc"
#include "sums.inc"

#include "codes.inc"

#include "quantize.inc"

#include "crc32.inc"
