// Clocks, memory and late copies; see device.h.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace pretend {

// Holds the lock. Tensors that tasks held go when it is given back: taking or dropping a reference may need Python's lock, which another
// thread may hold while it waits for this one.
class Locked {
 public:
  explicit Locked(Machine& machine) : machine_(machine) {
    machine_.mutex_.lock();
    ++machine_.depth_;
  }
  ~Locked() {
    std::vector<at::Tensor> dead;
    if (--machine_.depth_ == 0) dead.swap(machine_.dead_);
    machine_.mutex_.unlock();
  }

 private:
  Machine& machine_;
};

namespace {

constexpr int kPoison = 0xFF;  // NaN in every floating-point type, -1 in the integers

thread_local int t_device = 0;
thread_local std::vector<int> t_streams;

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

size_t variable(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

std::string stream_name(int ordinal) {
  return "stream " + std::to_string(ordinal % kStreams) + (ordinal % kStreams ? "" : " (the default)") + " of device " + std::to_string(ordinal / kStreams);
}

void drop_block(void* context) {
  auto* holder = static_cast<std::shared_ptr<Block>*>(context);
  Machine::get().free(std::move(*holder));
  delete holder;
}

void drop_pinned(void* context) {
  Machine::get().remove_pinned(context);
  std::free(context);
}

}  // namespace

int current_device() { return t_device; }
void set_current_device(int device) { t_device = device; }

int exchange_stream(int device, int stream) {
  if (t_streams.empty()) t_streams.resize(Machine::get().devices(), 0);
  return std::exchange(t_streams.at(device), stream);
}

int current_stream(int device) { return t_streams.empty() ? 0 : t_streams.at(device); }

int new_stream(int device) {
  static std::atomic<int> given{0};
  return 1 + given++ % (kStreams - 1);
}

char* real(const void* far) { return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(far) & ~kFar); }

std::shared_ptr<Block> block_of(const c10::DataPtr& data) {
  auto* holder = static_cast<std::shared_ptr<Block>*>(data.get_context());
  return holder ? *holder : nullptr;
}

Region region_of(const at::Tensor& tensor) {
  Region region;
  region.block = block_of(tensor.storage().data_ptr());
  region.type = tensor.dtype();
  region.sizes = tensor.sizes().vec();
  region.strides = tensor.strides().vec();
  region.offset = tensor.storage_offset();
  region.bytes = tensor.storage().nbytes();
  return region;
}

at::Tensor Region::on_host() const {
  c10::DataPtr data(block ? block->memory : nullptr, c10::Device(c10::kCPU));
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

at::Tensor borrowed(const at::Tensor& host) {
  c10::DataPtr data(const_cast<void*>(host.storage().data_ptr().get()), c10::Device(c10::kCPU));
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), host.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return tensor;
}

std::pair<size_t, size_t> extent(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  size_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const size_t size = tensor.dtype().itemsize();
  return {tensor.storage_offset() * size, (tensor.storage_offset() + last + 1) * size};
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const auto device = storage->device();
  auto& machine = Machine::get();
  c10::DataPtr data = machine.allocate(bytes, device.index());
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept) {
    machine.begin("resize_");
    std::memcpy(real(data.get()), real(storage->data_ptr().get()), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

Block::~Block() { std::free(memory); }

Machine& Machine::get() {
  static auto* machine = new Machine();  // tensors may outlive the end of main
  return *machine;
}

Machine::Machine() : devices_(variable("PRETEND_DEVICES", 2)), total_(variable("PRETEND_MEMORY", size_t{2} << 30)) {
  const size_t streams = devices_ * kStreams;
  host_.assign(streams, 0);
  clocks_.assign(streams, Clock(streams, 0));
  places_.assign(streams, 0);
  waiting_.resize(streams);
  staged_.resize(streams);
  stats_.resize(devices_);
}

int Machine::ordinal(const c10::Stream& stream) const { return stream.device_index() * kStreams + static_cast<int>(stream.id()); }
int Machine::current() const { return t_device * kStreams + current_stream(t_device); }

// ---------------------------------------------------------------------------------------------------------------- memory

c10::DataPtr Machine::allocate(size_t bytes, int device) {
  const c10::Device where(kType, device);
  if (bytes == 0) return c10::DataPtr(nullptr, where);
  Locked lock(*this);
  const int stream = device * kStreams + current_stream(device);
  enter(device);
  use_again(device, stream);
  auto& stats = stats_[device];
  if (stats.now + static_cast<int64_t>(bytes) > static_cast<int64_t>(total_)) {
    C10_THROW_ERROR(OutOfMemoryError, "pretend accelerator out of memory: " + std::to_string(bytes) + " bytes asked for, " +
                    std::to_string(total_ - stats.now) + " of " + std::to_string(total_) + " free");
  }
  auto block = std::make_shared<Block>();
  if (posix_memalign(reinterpret_cast<void**>(&block->memory), 64, (bytes + 63) / 64 * 64) != 0) throw std::bad_alloc();
  std::memset(block->memory, kPoison, bytes);
  block->bytes = bytes;
  block->device = device;
  block->stream = stream;
  // What the stream was given before may still use this memory: another stream must wait before it does.
  join(clocks_[stream], host_);
  block->accesses.push_back({stream, places_[stream], 0, bytes, true, "what it was freed from"});
  stats.now += bytes;
  stats.peak = std::max(stats.peak, stats.now);
  ++stats.allocations;
  reserve(stats, stream, bytes);
  void* far = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(block->memory) | kFar);
  return c10::DataPtr(far, new std::shared_ptr<Block>(std::move(block)), &drop_block, where);
}

void Machine::free(std::shared_ptr<Block> block) {
  Locked lock(*this);
  stats_[block->device].now -= block->bytes;
  Clock needs(host_.size(), 0);
  for (int other : block->recorded) needs[other] = places_[other];  // all that was given to that stream, whatever uses the block
  if (done(needs)) ++unused_[{block->stream, block->bytes}];
  else returning_.push_back({block->stream, block->bytes, std::move(needs)});
  freed_.push_back(std::move(block));
}

// A caching allocator hands a stream what was given back on that stream, of the same size here. What `record_stream` named comes back when
// the host sees that the other stream has come so far, and the host of this machine sees that when it waits: it runs ahead as far as it may.
void Machine::reserve(Stats& stats, int stream, size_t bytes) {
  std::vector<Returning> kept;
  for (auto& returning : returning_) {
    if (done(returning.needs)) ++unused_[{returning.stream, returning.bytes}];
    else kept.push_back(std::move(returning));
  }
  returning_ = std::move(kept);
  auto& unused = unused_[{stream, bytes}];
  if (unused) {
    --unused;
    return;
  }
  stats.reserved += bytes;
  stats.reserved_peak = std::max(stats.reserved_peak, stats.reserved);
}

// The allocator of a device gives freed memory away at the next allocation on its stream; whoever still uses it then reads other
// people's data. Uses by streams that were recorded, or that the stream or the host has waited for, have ended.
void Machine::use_again(int device, int stream) {
  std::vector<std::shared_ptr<Block>> ours, others;
  for (auto& block : freed_) (block->stream == stream ? ours : others).push_back(std::move(block));
  freed_ = std::move(others);
  Clock seen = clocks_[stream];
  join(seen, host_);
  for (auto& block : ours) {
    std::string broken;
    Clock needed(host_.size(), 0);
    for (const auto& access : block->accesses) {
      const bool ends = access.stream == stream || block->recorded.count(access.stream) || seen[access.stream] >= access.place;
      if (ends) needed[access.stream] = std::max(needed[access.stream], access.place);
      else broken = access.name + " on " + stream_name(access.stream);
    }
    run_until(needed);
    std::memset(block->memory, kPoison, block->bytes);
    if (!broken.empty()) {
      complain("memory of " + std::to_string(block->bytes) + " bytes, allocated on " + stream_name(stream) +
               ", was freed and is used again while it may still be used by " + broken + ": record_stream is missing", false);
    }
  }
}

void Machine::record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  Locked lock(*this);
  auto block = block_of(data);
  if (!block || block->stream == ordinal(stream)) return;
  ++recorded_;
  block->recorded.insert(ordinal(stream));
}

Stats Machine::stats(int device) {
  Locked lock(*this);
  return stats_.at(device);
}

void Machine::reset_peak(int device) {
  Locked lock(*this);
  stats_.at(device).peak = stats_.at(device).now;
  stats_.at(device).reserved_peak = stats_.at(device).reserved;
}

void Machine::empty_cache() {
  Locked lock(*this);
  unused_.clear();
  returning_.clear();  // as CUDA: the host waits for them
  for (auto& stats : stats_) stats.reserved = stats.now;
}

void Machine::reset_counters() {
  Locked lock(*this);
  locked_peak_ = locked_;
  contexts_ = 0;
}

void Machine::lock_bytes(int64_t bytes) {
  locked_ += bytes;
  locked_peak_ = std::max(locked_peak_, locked_);
}

c10::DataPtr Machine::allocate_pinned(size_t bytes) {
  if (bytes == 0) return c10::DataPtr(nullptr, c10::Device(c10::kCPU));
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, (bytes + 63) / 64 * 64) != 0) throw std::bad_alloc();
  std::memset(memory, kPoison, bytes);
  add_pinned(memory, bytes, false);
  {  // as torch's: powers of two, never given back
    Locked lock(*this);
    auto& unused = unused_pinned_[std::bit_ceil(bytes)];
    unused ? static_cast<void>(--unused) : lock_bytes(std::bit_ceil(bytes));
  }
  return c10::DataPtr(memory, memory, &drop_pinned, c10::Device(c10::kCPU));
}

void Machine::add_pinned(void* memory, size_t bytes, bool registered) {
  Locked lock(*this);
  enter(t_device);
  if (registered) lock_bytes(bytes);
  pinned_.emplace_back(reinterpret_cast<uintptr_t>(memory), Pinned{bytes, registered});
  std::sort(pinned_.begin(), pinned_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
}

bool Machine::remove_pinned(void* memory) {
  Locked lock(*this);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  for (auto found = pinned_.begin(); found != pinned_.end(); ++found) {
    if (found->first != address) continue;
    bool used = false;
    for (const auto* queues : {&waiting_, &staged_})
      for (const auto& queue : *queues)
        for (const auto& task : queue) {
          const auto begin = reinterpret_cast<uintptr_t>(task.host.data_ptr());
          used |= found->second.registered && begin >= address && begin < address + found->second.bytes;
        }
    if (used) {
      complain("host memory is unregistered while a copy uses it: synchronize first", false);
      show(Clock(places_));  // while the memory is there
    }
    if (found->second.registered) {
      enter(t_device);
      lock_bytes(-static_cast<int64_t>(found->second.bytes));
    } else {
      ++unused_pinned_[std::bit_ceil(found->second.bytes)];
    }
    pinned_.erase(found);
    return true;
  }
  return false;
}

bool Machine::is_pinned(const void* memory) {
  Locked lock(*this);
  return find_pinned(memory) != nullptr;
}

bool Machine::is_registered(const void* memory) {
  Locked lock(*this);
  const auto* pinned = find_pinned(memory);
  return pinned && pinned->registered;
}

const Machine::Pinned* Machine::find_pinned(const void* memory) const {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  auto next = std::upper_bound(pinned_.begin(), pinned_.end(), address, [](uintptr_t a, const auto& b) { return a < b.first; });
  if (next == pinned_.begin()) return nullptr;
  --next;
  return address < next->first + next->second.bytes ? &next->second : nullptr;
}

// ------------------------------------------------------------------------------------------------------------ operations

void Machine::begin(const std::string&) {
  Locked lock(*this);
  raise_kept();
  enter(t_device);
  const int stream = current();
  ++operations_;
  join(clocks_[stream], host_);
  run_until(clocks_[stream]);
  clocks_[stream][stream] = ++places_[stream];
}

void Machine::touch(const at::Tensor& tensor, bool write, const std::string& name) {
  auto block = block_of(tensor.storage().data_ptr());
  const auto [begin, end] = extent(tensor);
  if (!block || begin == end) return;
  Locked lock(*this);
  const int stream = current();
  touch(*block, stream, places_[stream], begin, end, write, name);
}

void Machine::touch(Block& block, int stream, uint64_t place, size_t begin, size_t end, bool write, const std::string& name, bool raise) {
  const auto& seen = clocks_[stream];
  std::vector<Access> kept;
  std::string broken;
  for (auto& other : block.accesses) {
    const bool meets = other.begin < end && begin < other.end;
    if (meets && other.stream != stream && (write || other.write) && seen[other.stream] < other.place)
      broken = name + " on " + stream_name(stream) + (write ? " writes" : " reads") + " memory that " + other.name + " on " +
               stream_name(other.stream) + (other.write ? " writes" : " reads") + ", and has not waited for it";
    const bool covered = other.begin >= begin && other.end <= end && (write || (!other.write && other.stream == stream));
    if (!covered) kept.push_back(std::move(other));
  }
  kept.push_back({stream, place, begin, end, write, name});
  block.accesses = std::move(kept);
  if (!broken.empty()) complain(broken, raise);
}

void Machine::copy_later(const at::Tensor& device_side, const at::Tensor& host, bool to_host) {
  Task task{0, 0, {}, to_host, region_of(device_side), is_registered(host.data_ptr()) ? borrowed(host) : host, {}};  // before the lock: see Locked
  Locked lock(*this);
  raise_kept();
  enter(t_device);
  ++late_;
  const int stream = current();
  join(clocks_[stream], host_);
  task.needs = clocks_[stream];
  task.place = clocks_[stream][stream] = ++places_[stream];
  task.order = ++issued_;
  touch(device_side, !to_host, to_host ? "a copy to the host" : "a copy from the host");
  waiting_[stream].push_back(std::move(task));
}

void Machine::run_until(const Clock& clock) {
  for (size_t stream = 0; stream < waiting_.size(); ++stream) {
    auto& queue = waiting_[stream];
    while (!queue.empty() && queue.front().place <= clock[stream]) {
      Task task = std::move(queue.front());
      queue.pop_front();
      run_until(task.needs);
      run(task);
      if (task.to_host) staged_[stream].push_back(std::move(task));
      else dead_.push_back(std::move(task.host));
    }
  }
}

void Machine::run(Task& task) {
  at::Tensor device_side = task.region.on_host();
  if (task.to_host) {
    task.staged = at::empty_like(task.host).copy_(device_side);
    return;
  }
  Clock before = task.needs;
  show_on(task.host, before);  // an earlier copy to this memory
  device_side.copy_(task.host);
}

void Machine::make_visible(Task& task) {
  task.host.copy_(task.staged);
  dead_.push_back(std::move(task.host));
}

void Machine::show(const Clock& clock) {
  run_until(clock);
  std::vector<Task> ready;
  for (size_t stream = 0; stream < staged_.size(); ++stream) {
    auto& queue = staged_[stream];
    while (!queue.empty() && queue.front().place <= clock[stream]) {
      ready.push_back(std::move(queue.front()));
      queue.pop_front();
    }
  }
  std::sort(ready.begin(), ready.end(), [](const Task& a, const Task& b) { return a.order < b.order; });
  for (auto& task : ready) make_visible(task);
  join(host_, clock);
}

void Machine::show_on(const at::Tensor& host, const Clock& clock) {
  for (size_t stream = 0; stream < staged_.size(); ++stream) {
    auto& queue = staged_[stream];
    const bool meets = std::any_of(queue.begin(), queue.end(), [&](const Task& task) {
      return task.place <= clock[stream] && task.host.storage().data_ptr().get() == host.storage().data_ptr().get();
    });
    while (meets && !queue.empty() && queue.front().place <= clock[stream]) {
      make_visible(queue.front());
      queue.pop_front();
    }
  }
}

// ----------------------------------------------------------------------------------------------------------------- order

bool Machine::done(const Clock& clock) const {
  for (size_t i = 0; i < clock.size(); ++i)
    if (clock[i] > host_[i]) return false;
  return true;
}

void Machine::record(Event& event, const c10::Stream& stream) {
  Locked lock(*this);
  enter(stream.device_index());
  auto& clock = clocks_[ordinal(stream)];
  join(clock, host_);
  event.seen = clock;
  event.asked = 0;
  event.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Machine::block(const Event& event, const c10::Stream& stream) {
  Locked lock(*this);
  enter(stream.device_index());
  join(clocks_[ordinal(stream)], event.seen);
}

// Asking for an event goes by the thread's current device, as in CUDA, whatever device the event is of.
bool Machine::query(Event& event) {
  Locked lock(*this);
  enter(t_device);
  if (!done(event.seen) && event.asked++) show(event.seen);  // "not yet" the first time
  return done(event.seen);
}

void Machine::wait(const Event& event) {
  Locked lock(*this);
  enter(t_device);
  show(event.seen);
}

bool Machine::query(const c10::Stream& stream) {
  Locked lock(*this);
  enter(stream.device_index());
  return done(clocks_[ordinal(stream)]);
}

void Machine::wait(const c10::Stream& stream) {
  Locked lock(*this);
  enter(stream.device_index());
  show(Clock(clocks_[ordinal(stream)]));
}

void Machine::wait_current() {
  Locked lock(*this);
  show(Clock(clocks_[current()]));
}

void Machine::wait_device(int device) {
  Locked lock(*this);
  enter(device);
  for (int stream = device * kStreams; stream < (device + 1) * kStreams; ++stream) show(Clock(clocks_[stream]));
}

double Machine::elapsed(const Event& first, const Event& second) {
  Locked lock(*this);
  TORCH_CHECK(done(first.seen) && done(second.seen), "both events must be completed before the time between them is asked for");
  return second.milliseconds - first.milliseconds;
}

// ------------------------------------------------------------------------------------------------------------ complaints

void Machine::complain(const std::string& text, bool raise) {
  complaints_.push_back(text);
  TORCH_CHECK(!raise, "pretend accelerator: ", text);
  kept_ = text;
}

void Machine::raise_kept() {
  std::string text;
  std::swap(text, kept_);
  TORCH_CHECK(text.empty(), "pretend accelerator: ", text);
}

std::vector<std::string> Machine::take_complaints() {
  Locked lock(*this);
  kept_.clear();
  return std::exchange(complaints_, {});
}

int64_t Machine::counter(const std::string& name) {
  Locked lock(*this);
  const std::map<std::string, int64_t> counters = {
      {"late", late_},     {"pageable", pageable_}, {"operations", operations_},  {"recorded", recorded_},
      {"locked", locked_}, {"locked_peak", locked_peak_}, {"contexts", contexts_}};
  return counters.at(name);
}

}  // namespace pretend
