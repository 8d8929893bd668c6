// Automatic mixed precision: the lists of operations that torch has for CUDA.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define PRETEND_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define PRETEND_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PRETEND_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PRETEND_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(PRETEND_LOW)
  AT_FORALL_FP32(PRETEND_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(PRETEND_FP32_DTYPE)
  AT_FORALL_PROMOTE(PRETEND_PROMOTE)
}

}  // namespace at::autocast
