// Threads that the library keeps, and the passes, norms and copies that they share with the caller. A caller from Python waits once,
// without its lock, however many they are. They look for the next job a little before they sleep: waking a processor of a virtual
// machine takes as long as a pass over some megabytes. A forked child starts its own. POSIX threads: C++'s would need its run-time library.

#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hf_zero_kernels.h"

namespace {

constexpr int kMostWorkers = 255;
// What a thread takes at a time; fewer bytes than two of these are not worth another thread.
constexpr int64_t kChunkBytes = 2 << 20;
constexpr int64_t kLookNanoseconds = 500000;
constexpr long kProcessorsToLook = 8;  // where there are fewer, somebody else needs them

struct Job {
  int32_t (*work)(const void* what, int64_t start, int64_t stop);
  const void* what;
  int64_t count, chunk;
  int64_t next;  // start of what nobody has taken
  int32_t status;
};

void take_chunks(Job* job) {
  for (;;) {
    const int64_t start = __atomic_fetch_add(&job->next, job->chunk, __ATOMIC_RELAXED);
    if (start >= job->count) return;
    const int64_t stop = job->count - start < job->chunk ? job->count : start + job->chunk;
    const int32_t status = job->work(job->what, start, stop);
    if (status != HFZ_OK) __atomic_store_n(&job->status, status, __ATOMIC_RELAXED);
  }
}

// One job at a time. All fields are read and written under `lock`, but for looks at `number` and `inside` without.
struct Pool {
  pthread_mutex_t turn;  // held by who has a job
  pthread_mutex_t lock;
  pthread_cond_t wake, done;
  int workers;
  uint64_t number;  // of jobs so far
  Job* job;
  int places;  // workers that may still join
  int inside;  // workers that have
};

#define HFZ_EMPTY_POOL \
  {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, nullptr, 0, 0}
Pool pool = HFZ_EMPTY_POOL;
bool looks;  // written once, before the first thread starts

void forget() {
  const Pool empty = HFZ_EMPTY_POOL;
  pool = empty;  // a child has none of the threads, and a lock that one of them held would never open
}

void prepare() {
  looks = sysconf(_SC_NPROCESSORS_ONLN) >= kProcessorsToLook;
  pthread_atfork(nullptr, nullptr, forget);
}

void pause_a_little() {
#if defined(HFZ_X86)
  __builtin_ia32_pause();
#endif
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

// Whether `value` is something else than `present` before the time is up.
template <class Value>
bool changes(const Value* value, Value present) {
  if (!looks) return false;
  for (const int64_t end = now() + kLookNanoseconds; now() < end;)
    for (int turn = 0; turn < 32; ++turn) {
      if (__atomic_load_n(value, __ATOMIC_ACQUIRE) != present) return true;
      pause_a_little();
    }
  return false;
}

void* serve(void* first) {
  uint64_t seen = (uint64_t)(uintptr_t)first;
  for (;;) {
    changes(&pool.number, seen);
    pthread_mutex_lock(&pool.lock);
    while (pool.number == seen || pool.places == 0) {
      seen = pool.number;
      pthread_cond_wait(&pool.wake, &pool.lock);
    }
    seen = pool.number;
    Job* job = pool.job;
    --pool.places;
    __atomic_add_fetch(&pool.inside, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&pool.lock);
    take_chunks(job);
    pthread_mutex_lock(&pool.lock);
    if (__atomic_sub_fetch(&pool.inside, 1, __ATOMIC_RELEASE) == 0) pthread_cond_signal(&pool.done);
    pthread_mutex_unlock(&pool.lock);
  }
  return nullptr;
}

void hire(int wanted) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, prepare);
  while (pool.workers < wanted) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, serve, (void*)(uintptr_t)pool.number) != 0) return;  // fewer do it too
    pthread_detach(thread);
    ++pool.workers;
  }
}

// `chunk` is a multiple of what a range has to begin at; the result does not depend on who takes which.
int32_t in_chunks(int64_t count, int64_t chunk, int32_t threads, int32_t (*work)(const void*, int64_t, int64_t), const void* what) {
  if (count < 0) return HFZ_BAD_SIZE;
  int64_t most = count / chunk;
  if (most > threads) most = threads;
  if (most > kMostWorkers + 1) most = kMostWorkers + 1;
  if (most <= 1) return work(what, 0, count);
  Job job{work, what, count, chunk, 0, HFZ_OK};
  pthread_mutex_lock(&pool.turn);
  pthread_mutex_lock(&pool.lock);
  hire((int)most - 1);
  pool.job = &job;
  pool.places = (int)most - 1;
  __atomic_add_fetch(&pool.number, 1, __ATOMIC_RELEASE);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
  take_chunks(&job);
  pthread_mutex_lock(&pool.lock);
  pool.places = 0;
  while (const int left = pool.inside) {
    pthread_mutex_unlock(&pool.lock);
    const bool fewer = changes(&pool.inside, left);
    pthread_mutex_lock(&pool.lock);
    if (!fewer && pool.inside) pthread_cond_wait(&pool.done, &pool.lock);
  }
  pool.job = nullptr;
  pthread_mutex_unlock(&pool.lock);
  pthread_mutex_unlock(&pool.turn);
  return job.status;
}

int64_t elements_of(int64_t bytes, int64_t step) { return (kChunkBytes / bytes + step - 1) / step * step; }
constexpr int64_t kStep = 4096;  // so that no chunk begins in the middle of a cache line of aligned memory

int64_t bytes_of(int32_t type) { return type == HFZ_F32 ? 4 : type == HFZ_NONE ? 0 : 2; }
char* at(const void* base, int64_t start, int32_t type) { return base ? (char*)base + start * bytes_of(type) : nullptr; }

struct PassJob {
  hfz_pass pass;
  float* master;
  const void* grad;
  int32_t grad_type;
  void *first, *second;
  int32_t state_type;
  void* low;
  int32_t low_type;
  const void* rule;
};

int32_t part_of_pass(const void* given, int64_t start, int64_t stop) {
  const PassJob& job = *(const PassJob*)given;
  return job.pass(stop - start, job.master + start, at(job.grad, start, job.grad_type), job.grad_type, at(job.first, start, job.state_type),
                  at(job.second, start, job.state_type), job.state_type, at(job.low, start, job.low_type), job.low_type, job.rule);
}

struct NormJob {
  hfz_norm norm;
  const void* values;
  int32_t type;
  double* sums;
};

int32_t part_of_norm(const void* given, int64_t start, int64_t stop) {
  const NormJob& job = *(const NormJob*)given;
  return job.norm(stop - start, at(job.values, start, job.type), job.type, job.sums + start / HFZ_BLOCK);
}

struct CopyJob {
  char* to;
  const char* from;
};

int32_t part_of_copy(const void* given, int64_t start, int64_t stop) {
  const CopyJob& job = *(const CopyJob*)given;
  memcpy(job.to + start, job.from + start, stop - start);
  return HFZ_OK;
}

}  // namespace

extern "C" int32_t hfz_threaded_pass(hfz_pass pass, int32_t threads, int64_t count, float* master, const void* grad, int32_t grad_type,
                                     void* first, void* second, int32_t state_type, void* low, int32_t low_type, const void* rule) {
  const PassJob job{pass, master, grad, grad_type, first, second, state_type, low, low_type, rule};
  return in_chunks(count, elements_of(28, kStep), threads, part_of_pass, &job);
}

extern "C" int32_t hfz_threaded_norm(hfz_norm norm, int32_t threads, int64_t count, const void* values, int32_t type, double* sums) {
  const NormJob job{norm, values, type, sums};
  return in_chunks(count, elements_of(type == HFZ_F32 ? 4 : 2, HFZ_BLOCK), threads, part_of_norm, &job);
}

extern "C" int32_t hfz_threaded_copy(int32_t threads, int64_t bytes, void* to, const void* from) {
  const CopyJob job{(char*)to, (const char*)from};
  return in_chunks(bytes, elements_of(1, kStep), threads, part_of_copy, &job);
}
