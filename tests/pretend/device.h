// A pretend accelerator: its memory is host memory behind addresses that no host code can use, its streams are counters.
//
// Operations run at once, in the order in which the host issues them, which is one of the orders a device may choose. What another
// order would break is found out by clocks: every stream counts its operations, events carry what a stream has seen, and every block
// of memory remembers who read and wrote which bytes. An operation that touches bytes which another stream may still be writing (or
// reading, when it writes) is an error. Copies from and to page-locked memory run as late as a device may run them: the host sees
// stale bytes until it waits, and a buffer that is overwritten too early is copied as it is then.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace pretend {

constexpr int kStreams = 16;  // of a device, the default stream (0) included; more are handed out in turn, as CUDA does
constexpr uintptr_t kFar = uintptr_t{1} << 60;  // makes an address that faults when the host uses it
constexpr auto kType = c10::DeviceType::PrivateUse1;

using Clock = std::vector<uint64_t>;  // per stream of all devices: how many of its operations have been waited for

struct Access {
  int stream;
  uint64_t place;  // in the order of the stream
  size_t begin, end;  // bytes
  bool write;
  std::string name;  // of the operation
};

struct Block {
  char* memory = nullptr;
  size_t bytes = 0;
  int device = 0;
  int stream = 0;  // current when it was allocated: the one for which the allocator may use it again
  std::vector<Access> accesses;
  std::set<int> recorded;  // streams named by record_stream
  ~Block();
};

// A tensor's geometry in a block, without a reference that would keep the block from being freed.
struct Region {
  std::shared_ptr<Block> block;
  caffe2::TypeMeta type;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  size_t bytes = 0;  // of the storage
  at::Tensor on_host() const;  // the same memory as a CPU tensor
};

// A copy that has been issued and not run.
struct Task {
  uint64_t order;  // of issue, over all streams
  uint64_t place;
  Clock needs;
  bool to_host;
  Region region;
  at::Tensor host;  // torch's page-locked memory is kept by its allocator until the copy is done; nobody keeps what was only registered
  at::Tensor staged;  // to_host: what has left the device and is not visible yet
};

struct Event {
  Clock seen;
  double milliseconds = 0;
  int asked = 0;
};

struct Stats {
  int64_t now = 0, peak = 0, allocations = 0;
  int64_t reserved = 0, reserved_peak = 0;  // what a caching allocator would have taken from the device
};

// Memory that was given back and cannot be used again before the host knows that other streams have come so far.
struct Returning {
  int stream;
  size_t bytes;
  Clock needs;
};

class Machine {
 public:
  static Machine& get();

  int devices() const { return devices_; }
  int ordinal(const c10::Stream& stream) const;
  int current() const;  // stream of this thread on its device

  // Memory.
  c10::DataPtr allocate(size_t bytes, int device);
  void free(std::shared_ptr<Block> block);
  void record_stream(const c10::DataPtr& data, const c10::Stream& stream);
  Stats stats(int device);
  void reset_peak(int device);
  void empty_cache();
  size_t total_bytes() const { return total_; }

  // A driver makes a context, some hundred MiB, on the device that is current when a thread calls it.
  void enter(int device) { contexts_ |= uint64_t{1} << device; }
  bool entered(int device) const { return contexts_ >> device & 1; }
  void reset_counters();  // peaks of locked memory, and who has entered which device

  // Host memory that copies may use beside the computation.
  c10::DataPtr allocate_pinned(size_t bytes);
  void add_pinned(void* memory, size_t bytes, bool registered);
  bool remove_pinned(void* memory);
  bool is_pinned(const void* memory);
  bool is_registered(const void* memory);

  // Operations.
  void begin(const std::string& name);  // of the current stream: runs what it must have seen
  void touch(const at::Tensor& tensor, bool write, const std::string& name);
  void copy_later(const at::Tensor& device_side, const at::Tensor& host, bool to_host);
  void count_pageable() { ++pageable_; }

  // Order.
  void record(Event& event, const c10::Stream& stream);
  void block(const Event& event, const c10::Stream& stream);
  bool query(Event& event);
  void wait(const Event& event);
  bool query(const c10::Stream& stream);
  void wait(const c10::Stream& stream);
  void wait_device(int device);
  void wait_current();
  double elapsed(const Event& first, const Event& second);

  void complain(const std::string& text, bool raise);
  std::vector<std::string> take_complaints();
  int64_t counter(const std::string& name);

 private:
  struct Pinned {
    size_t bytes;
    bool registered;  // by its owner, rather than allocated here
  };

  Machine();
  const Pinned* find_pinned(const void* memory) const;
  bool done(const Clock& clock) const;  // the host knows
  void run_until(const Clock& clock);
  void run(Task& task);
  void show(const Clock& clock);
  void show_on(const at::Tensor& host, const Clock& clock);
  void make_visible(Task& task);
  void touch(Block& block, int stream, uint64_t place, size_t begin, size_t end, bool write, const std::string& name, bool raise = true);
  void use_again(int device, int stream);
  void reserve(Stats& stats, int stream, size_t bytes);
  void lock_bytes(int64_t bytes);
  void raise_kept();

  friend class Locked;
  std::recursive_mutex mutex_;
  int depth_ = 0;  // how often this thread has locked it
  std::vector<at::Tensor> dead_;
  int devices_;
  size_t total_;
  uint64_t issued_ = 0;
  Clock host_;
  std::vector<Clock> clocks_;
  std::vector<uint64_t> places_;
  std::vector<std::deque<Task>> waiting_, staged_;
  std::vector<std::shared_ptr<Block>> freed_;
  std::vector<Stats> stats_;
  std::vector<std::string> complaints_;
  std::string kept_;  // a complaint from where nothing can be raised
  std::vector<Returning> returning_;
  std::map<std::pair<int, size_t>, int> unused_;  // by stream and bytes: blocks that the caching allocator holds
  std::map<size_t, int> unused_pinned_;  // by bytes: what the allocator of page-locked memory holds
  int64_t locked_ = 0, locked_peak_ = 0;
  std::atomic<uint64_t> contexts_{0};
  std::atomic<int64_t> pageable_{0}, late_{0}, operations_{0}, recorded_{0};
  std::vector<std::pair<uintptr_t, Pinned>> pinned_;  // sorted by address
};

// Tells who asked (pretend_on_wait) that the host is about to wait for the device; called without the lock, the caller may want Python's.
void tell_wait(const std::string& what);

int current_device();
void set_current_device(int device);
int current_stream(int device);  // its number on the device
int exchange_stream(int device, int stream);
int new_stream(int device);

char* real(const void* far);  // the host address behind a device address
Region region_of(const at::Tensor& tensor);
std::shared_ptr<Block> block_of(const c10::DataPtr& data);
void resize_storage(c10::StorageImpl* storage, size_t bytes);
at::Tensor borrowed(const at::Tensor& host);  // the same memory, without a reference that would keep it
std::pair<size_t, size_t> extent(const at::Tensor& tensor);  // bytes from the beginning of its storage

}  // namespace pretend
