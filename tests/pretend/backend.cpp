// What torch's own machinery asks: guards, streams and events, the allocator, random numbers, page-locked memory, and a C interface.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <torch/library.h>

#include <algorithm>
#include <cstring>

namespace pretend {

namespace {

c10::Stream stream_at(int device, int number) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), number); }

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return c10::Device(kType, current_device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return Machine::get().devices(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < deviceCount(), "pretend device ", device, " does not exist: there are ", int{deviceCount()});
    set_current_device(index_of(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(index_of(device)); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return stream_at(index_of(device), current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_at(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_at(index_of(device), new_stream(index_of(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_at(stream.device_index(), exchange_stream(stream.device_index(), static_cast<int>(stream.id())));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override { return Machine::get().query(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    tell_wait("a stream");
    Machine::get().wait(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    tell_wait("a device");
    Machine::get().wait_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Machine::get().record_stream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of device ", int{device}, " cannot be recorded on device ",
                int{stream.device_index()});
    if (!*event) *event = new Event();
    Machine::get().record(*static_cast<Event*>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Machine::get().block(*static_cast<Event*>(event), stream);
  }
  bool queryEvent(void* event) const override { return !event || Machine::get().query(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    tell_wait("an event");
    Machine::get().wait(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return Machine::get().elapsed(*static_cast<Event*>(first), *static_cast<Event*>(second));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return Machine::get().allocate(bytes, current_device()); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(real(to), real(from), bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { Machine::get().empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { Machine::get().record_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Stats now = Machine::get().stats(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes[0], &stats.active_bytes[0], &stats.requested_bytes[0]}) {
      bytes->current = now.now;
      bytes->peak = now.peak;
    }
    stats.reserved_bytes[0].current = now.reserved;
    stats.reserved_bytes[0].peak = now.reserved_peak;
    stats.allocation[0].allocated = now.allocations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { Machine::get().reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const size_t total = Machine::get().total_bytes();
    return {total - std::min<size_t>(total, Machine::get().stats(device).reserved), total};
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return Machine::get().allocate_pinned(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// Draws the CPU's numbers from a state of its own.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : c10::GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
  mutable at::Generator inner;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return Machine::get().devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return Machine::get().entered(device); }
  c10::DeviceIndex deviceCount() const override { return Machine::get().devices(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { guard().setDevice(c10::Device(kType, device)); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return guard().exchangeDevice(c10::Device(kType, device)).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return device < 0 ? current_device() : exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return Machine::get().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedMemory memory;
    return &memory;
  }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(kType, current_device()); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* generators = [] {
      auto* all = new std::vector<at::Generator>();
      for (int i = 0; i < Machine::get().devices(); ++i) all->push_back(at::make_generator<Generator>(i));
      return all;
    }();
    return generators->at(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::OptionalDeviceGuard on(storage.device());
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
  static const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(kType); }
};

const bool registered = [] {
  static DeviceMemory memory;
  c10::SetAllocator(kType, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

thread_local std::string t_text;
std::atomic<void (*)(const char*)> g_on_wait{nullptr};

TORCH_LIBRARY(pretend, m) {
  m.def("default_generator(int device) -> Generator?", [](int64_t device) { return at::detail::getPrivateUse1Hooks().getDefaultGenerator(device); });
}

}  // namespace

void tell_wait(const std::string& what) {
  if (auto* listener = g_on_wait.load()) listener(what.c_str());
}

at::Generator host_generator(const at::Generator& generator) {
  if (generator.device().type() != kType) return generator;
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace pretend

extern "C" {

// The complaints since the last call, one per line.
const char* pretend_complaints() {
  pretend::t_text.clear();
  for (const auto& line : pretend::Machine::get().take_complaints()) pretend::t_text += line + "\n";
  return pretend::t_text.c_str();
}

// `listener` is told of each wait of the host for the device, and what it is for; nullptr ends that.
void pretend_on_wait(void (*listener)(const char*)) { pretend::g_on_wait = listener; }

int64_t pretend_counter(const char* name) { return pretend::Machine::get().counter(name); }

void pretend_empty_cache() { pretend::Machine::get().empty_cache(); }

void pretend_reset() { pretend::Machine::get().reset_counters(); }

int pretend_register(void* memory, size_t bytes) {
  if (pretend::Machine::get().is_pinned(memory)) return 712;  // as CUDA: already registered
  pretend::Machine::get().add_pinned(memory, bytes, true);
  return 0;
}

int pretend_unregister(void* memory) { return pretend::Machine::get().remove_pinned(memory) ? 0 : 713; }
}
