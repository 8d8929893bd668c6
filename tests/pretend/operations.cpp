// What torch asks of a device: a few operations of its own, and the CPU's kernels on the same memory for all others.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace pretend {

at::Generator host_generator(const at::Generator& generator);  // generator.cpp: what CPU kernels draw from in its place

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

bool ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

int index_of(std::optional<c10::Device> device) { return device && device->has_index() ? device->index() : current_device(); }

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(int device) : device_(device) {}
  c10::DataPtr allocate(size_t bytes) override { return Machine::get().allocate(bytes, device_); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(real(to), real(from), bytes); }

 private:
  int device_;
};

Tensor new_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, caffe2::TypeMeta type, int device) {
  Allocator allocator(device);
  const auto bytes = at::detail::computeStorageNbytes(sizes, strides, type.itemsize());
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, allocator.allocate(bytes), c10::GetAllocator(kType), true);
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

// One call of a CPU kernel on device memory: arguments are replaced by CPU tensors of the same memory, results put back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack), name_(op.schema().name()) {}

  void run() {
    const auto& schema = op_.schema();
    const size_t count = schema.arguments().size();
    const size_t first = stack_->size() - count;
    for (size_t i = 0; i < count; ++i) look((*stack_)[first + i]);
    auto& machine = Machine::get();
    c10::OptionalDeviceGuard guard(c10::Device(kType, device_ < 0 ? current_device() : device_));
    const bool sized = sizes_depend_on_values(first, count);
    if (sized) tell_wait(name_);
    machine.begin(name_);
    for (size_t i = 0; i < count; ++i) {
      const auto& argument = schema.arguments()[i];
      const bool write = argument.alias_info() && argument.alias_info()->isWrite();
      replace((*stack_)[first + i], write, argument.name() == "generator");
    }
    call();
    for (auto& pair : tensors_)
      if (pair.write) put_back(pair);
    const size_t results = schema.returns().size();
    bool numbers = false;
    for (size_t i = stack_->size() - results; i < stack_->size(); ++i) give((*stack_)[i], numbers);
    if (numbers && !sized) tell_wait(name_);
    if (numbers || sized) machine.wait_current();  // the host has its value only when the device has come so far
  }

 private:
  struct Pair {
    Tensor device, host;
    bool write;
  };

  void look(const IValue& value) {
    if (value.isTensor()) {
      check(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) check(tensor);
    } else if (value.isList()) {
      for (const IValue& item : value.toListRef())
        if (item.isTensor()) check(item.toTensor());
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      device_ = index_of(value.toDevice());
    }
    for (const Tensor& host : hosts_)
      TORCH_CHECK(device_ < 0 || host.dim() == 0 || host_indices(), "Expected all tensors to be on the same device, but ", name_,
                  " was given tensors on ", c10::Device(kType, device_), " and a tensor of ", host.sizes(), " on the CPU");
  }

  // The host must know how many elements were chosen before it can allocate the result.
  bool sizes_depend_on_values(size_t first, size_t count) const {
    static const std::set<std::string> always = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                                 "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount"};
    if (device_ < 0) return false;
    if (always.count(name_)) return true;
    if (!host_indices() || name_ == "aten::index") return false;  // for the latter torch asks for nonzero itself
    for (size_t i = first; i < first + count; ++i) {
      if (!(*stack_)[i].isList()) continue;
      for (const IValue& item : (*stack_)[i].toListRef())
        if (item.isTensor() && item.toTensor().defined() && ours(item.toTensor()) && item.toTensor().scalar_type() == at::kBool) return true;
    }
    return false;
  }

  bool host_indices() const { return name_ == "aten::index" || name_ == "aten::index_put_" || name_ == "aten::_index_put_impl_"; }

  void check(const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (!ours(tensor)) {
      if (tensor.device().is_cpu()) hosts_.push_back(tensor);
      return;
    }
    TORCH_CHECK(device_ < 0 || device_ == tensor.device().index() || tensor.dim() == 0, "Expected all tensors to be on the same device, but ",
                name_, " was given tensors on ", c10::Device(kType, device_), " and ", tensor.device());
    if (device_ < 0) device_ = tensor.device().index();
  }

  Tensor host_of(const Tensor& tensor, bool write) {
    if (!ours(tensor)) return tensor;
    Machine::get().touch(tensor, write, name_);
    for (auto& pair : tensors_)
      if (pair.device.is_same(tensor)) {
        pair.write |= write;
        return pair.host;
      }
    Tensor host = region_of(tensor).on_host();
    for (auto& pair : tensors_)  // views of one storage stay views of one storage
      if (pair.device.storage().is_alias_of(tensor.storage())) {
        host.unsafeGetTensorImpl()->set_storage_keep_dtype(pair.host.storage());
        break;
      }
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors_.push_back({tensor, host, write});
    return host;
  }

  void replace(IValue& value, bool write, bool generator) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = host_of(value.toTensor(), write);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = host_of(tensor, write);
      value = tensors;
    } else if (value.isList()) {
      auto list = value.toList().copy();
      for (size_t i = 0; i < list.size(); ++i) {
        const IValue item = list.get(i);
        if (item.isTensor() && item.toTensor().defined()) list.set(i, host_of(item.toTensor(), write));
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      value = host_generator(value.toGenerator());
    } else if (generator && value.isNone()) {
      value = host_generator(at::detail::getPrivateUse1Hooks().getDefaultGenerator(device_));
    }
  }

  // Kernels without a generator among their arguments draw from the CPU's default one: lend it this device's state.
  void call() {
    bool draws = op_.hasTag(at::Tag::nondeterministic_seeded);
    for (const auto& argument : op_.schema().arguments()) draws = draws && argument.name() != "generator";
    if (!draws) return op_.callBoxed(stack_);
    auto cpu = at::detail::getDefaultCPUGenerator();
    auto own = host_generator(at::detail::getPrivateUse1Hooks().getDefaultGenerator(device_));
    const auto kept = cpu.get_state();
    cpu.set_state(own.get_state());
    op_.callBoxed(stack_);
    own.set_state(cpu.get_state());
    cpu.set_state(kept);
  }

  // An output that the kernel has resized takes its size, and memory of its own where it needed more.
  void put_back(Pair& pair) {
    auto* impl = pair.device.unsafeGetTensorImpl();
    auto* storage = pair.device.storage().unsafeGetStorageImpl();
    if (pair.host.storage().data_ptr().get() != (storage->data_ptr().get() ? real(storage->data_ptr().get()) : nullptr)) {
      storage->set_data_ptr_noswap(Machine::get().allocate(pair.host.storage().nbytes(), pair.device.device().index()));
      storage->set_nbytes(pair.host.storage().nbytes());
      std::memcpy(real(storage->data_ptr().get()), pair.host.storage().data_ptr().get(), pair.host.storage().nbytes());
    }
    if (pair.device.sizes() != pair.host.sizes() || pair.device.strides() != pair.host.strides())
      impl->set_sizes_and_strides(pair.host.sizes(), pair.host.strides());
    Machine::get().touch(pair.device, true, name_);
  }

  Tensor device_of(const Tensor& host) {
    if (!host.defined()) return host;
    for (auto& pair : tensors_)
      if (pair.host.is_same(host)) return pair.device;
    for (auto& pair : tensors_)
      if (pair.host.storage().is_alias_of(host.storage())) {
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(pair.device.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
        return view;
      }
    for (const Tensor& argument : hosts_)
      if (argument.is_same(host)) return host;
    const int device = device_ < 0 ? current_device() : device_;
    Tensor result = new_tensor(host.sizes(), host.strides(), host.dtype(), device);
    Machine::get().touch(result, true, name_);
    if (host.numel()) region_of(result).on_host().copy_(host);
    if (host.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
    return result;
  }

  void give(IValue& value, bool& numbers) {
    if (value.isTensor()) {
      value = device_of(value.toTensor());
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = device_of(tensor);
      value = tensors;
    } else if (!value.isNone()) {
      numbers = true;
    }
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  std::string name_;
  int device_ = -1;
  std::vector<Pair> tensors_;
  std::vector<Tensor> hosts_;
};

void on_cpu(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

c10::OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

// torch sends the convolutions of devices that it does not know here.
void convolution(const c10::OperatorHandle&, Stack* stack) { Call(find("aten::convolution"), stack).run(); }

void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto first = stack->end() - op.schema().arguments().size();
  const Tensor weight = first[2].toTensor();
  const bool transposed = first[6].toBool();
  stack->insert(first + 3, IValue(std::vector<int64_t>{transposed ? weight.size(1) * first[8].toInt() : weight.size(0)}));
  Call(find("aten::convolution_backward"), stack).run();
}

// --------------------------------------------------------------------------------------------------------- own operations

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device> device,
             std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  Allocator allocator(index_of(device));
  c10::OptionalDeviceGuard guard(c10::Device(kType, index_of(device)));
  return at::detail::empty_generic(size, c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), memory_format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(c10::Device(kType, index_of(device)));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

void grow(const Tensor& self, size_t bytes) {
  if (self.storage().nbytes() < bytes) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const auto [begin, end] = extent(self);
  if (begin != end) grow(self, end);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device().type() == kType, "set_: the storage is on ", source.device(), ", the tensor on ", self.device());
  impl->set_storage_keep_dtype(source);
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  const auto [begin, end] = extent(self);
  if (begin != end) grow(self, end);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t count = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, source, 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, Machine::get().allocate(0, self.device().index()), c10::GetAllocator(kType), true);
  return set_storage(self, c10::Storage(storage), 0, {0}, {});
}

at::Scalar local_scalar_dense(const Tensor& self) {
  auto& machine = Machine::get();
  c10::OptionalDeviceGuard guard(self.device());
  machine.begin("item");
  machine.touch(self, false, "item");
  tell_wait("item");
  machine.wait_current();
  return at::native::_local_scalar_dense_cpu(region_of(self).on_host());
}

void copy_now(const Tensor& target, const Tensor& source, const std::string& name) {
  auto& machine = Machine::get();
  machine.begin(name);
  if (ours(source)) machine.touch(source, false, name);
  if (ours(target)) machine.touch(target, true, name);
  Tensor to = ours(target) ? region_of(target).on_host() : target;
  to.copy_(ours(source) ? region_of(source).on_host() : source);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  auto& machine = Machine::get();
  c10::OptionalDeviceGuard guard(ours(source) ? source.device() : self.device());
  const Tensor from = source.sizes() == self.sizes() ? source : source.expand_as(self);
  if (ours(self) && ours(source)) {
    copy_now(self, from, "copy_");
    return self;
  }
  const bool to_host = !ours(self);
  const Tensor& host = to_host ? self : from;
  TORCH_CHECK(host.device().is_cpu(), "copy_ between ", self.device(), " and ", source.device());
  if (non_blocking && machine.is_pinned(host.storage().data_ptr().get())) {
    machine.copy_later(to_host ? from : self, host, to_host);
    return self;
  }
  if (non_blocking) machine.count_pageable();
  tell_wait(to_host ? "a copy to the host" : "a copy from the host");
  machine.begin("copy_");
  machine.wait_current();
  copy_now(self, from, "copy_");
  if (to_host) machine.wait_current();
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) { Machine::get().record_stream(self.storage().data_ptr(), stream); }

// torch answers yes for CUDA and a few others: `param.data = tensor` may then move a parameter from the CPU to the device.
bool same_kind(const Tensor& self, const Tensor& from) {
  for (const Tensor* tensor : {&self, &from})
    if (!ours(*tensor) && !(tensor->device().is_cpu() && tensor->layout() == c10::kStrided)) return false;
  return true;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("_has_compatible_shallow_copy_type", &same_kind);
}

}  // namespace
}  // namespace pretend
