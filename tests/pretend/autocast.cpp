// Automatic mixed precision, for the operations that models are made of.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace at::autocast {  // as in ATen/autocast_mode.h, which takes ten seconds to compile
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

void call(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::optional<at::ScalarType> wanted) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  const size_t first = stack->size() - op.schema().arguments().size();
  at::ScalarType type = wanted.value_or(at::autocast::get_autocast_dtype(kType));
  if (!wanted)  // the widest that is there
    for (size_t i = first; i < stack->size(); ++i)
      if ((*stack)[i].isTensor() && (*stack)[i].toTensor().defined() && (*stack)[i].toTensor().scalar_type() == at::kFloat) type = at::kFloat;
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = at::autocast::cached_cast(type, value.toTensor(), kType);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = at::autocast::cached_cast(type, tensor, kType);
      value = tensors;
    }
  }
  op.callBoxed(stack);
}

void low(const c10::OperatorHandle& op, torch::jit::Stack* stack) { call(op, stack, at::autocast::get_autocast_dtype(kType)); }
void full(const c10::OperatorHandle& op, torch::jit::Stack* stack) { call(op, stack, at::kFloat); }
void widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) { call(op, stack, std::nullopt); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : {"_convolution", "conv1d", "conv2d", "conv3d", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum",
                           "mm", "mv", "linear", "addbmm", "baddbmm", "bmm", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&low>());
  for (const char* name : {"exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
                           "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "cosine_similarity",
                           "nll_loss", "nll_loss2d", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
                           "binary_cross_entropy_with_logits", "dist", "renorm", "logsumexp", "prod", "softmax.int", "log_softmax.int",
                           "cumprod", "cumsum", "linalg_vector_norm", "sum", "sum.dim_IntList"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&full>());
  for (const char* name : {"addcdiv", "addcmul", "atan2", "bilinear", "dot", "index_put", "tensordot", "scatter_add"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&widest>());
}

}  // namespace
