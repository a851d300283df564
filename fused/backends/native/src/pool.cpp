#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#endif

namespace keyedopt {
namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Rounding mode and flushing of denormals are settings of each thread: all threads use the settings of the caller.
inline unsigned float_mode() {
#if defined(__x86_64__)
  return __builtin_ia32_stmxcsr();
#else
  return 0;
#endif
}

inline void set_float_mode(unsigned mode) {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(mode);
#else
  (void)mode;
#endif
}

class Pool {
 public:
  bool run(int threads, int64_t tasks, void (*body)(void*, int64_t), void* context) {
    std::unique_lock<std::mutex> mine(busy_, std::defer_lock);
    if (threads <= 1 || tasks <= 1 || !mine.try_lock()) {
      for (int64_t i = 0; i < tasks; ++i) body(context, i);
      return true;
    }
    {
      std::lock_guard<std::mutex> lock(state_);
      while (workers_ < threads - 1 && start()) ++workers_;
      body_ = body;
      context_ = context;
      tasks_ = tasks;
      mode_ = float_mode();
      next_.store(0, std::memory_order_relaxed);
      failed_.store(false, std::memory_order_relaxed);
      places_ = threads - 1 < tasks - 1 ? threads - 1 : static_cast<int>(tasks - 1);
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
      if (sleeping_ > 0) wake_.notify_all();
    }
    work();
    {
      std::lock_guard<std::mutex> lock(state_);
      open_ = false;
    }
    for (int spins = 0; active_.load(std::memory_order_acquire) > 0; ++spins) {
      if (spins < 4000) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
    return !failed_.load(std::memory_order_relaxed);
  }

 private:
  bool start() {
    try {
      std::thread([this] { live(); }).detach();
      return true;
    } catch (...) {  // the system starts no more threads: the others do the work
      return false;
    }
  }

  void work() {
    for (;;) {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= tasks_) return;
      try {
        body_(context_, i);
      } catch (...) {
        failed_.store(true, std::memory_order_relaxed);
      }
    }
  }

  void live() {
    uint64_t seen = 0;
    for (;;) {
      for (int spins = 0; spins < 2000 && generation_.load(std::memory_order_acquire) == seen; ++spins)
        relax();
      {
        std::unique_lock<std::mutex> lock(state_);
        ++sleeping_;
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
        --sleeping_;
        seen = generation_.load(std::memory_order_relaxed);
        if (!open_ || places_ == 0) continue;
        --places_;
        active_.fetch_add(1, std::memory_order_relaxed);
      }
      set_float_mode(mode_);
      work();
      active_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex busy_;   // locked by the call that uses the threads
  std::mutex state_;  // guards the members below
  std::condition_variable wake_;
  int workers_ = 0, sleeping_ = 0, places_ = 0;
  bool open_ = false;
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
  unsigned mode_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int> active_{0};
  std::atomic<bool> failed_{false};
  std::atomic<uint64_t> generation_{0};
};

// Never destroyed, because threads may still wait for work when the process ends.
std::atomic<Pool*> the_pool{nullptr};
std::atomic<bool> forked{false};

// A forked process has none of the threads and may inherit a locked mutex: give it a new pool.
void in_child() {
  forked.store(true, std::memory_order_relaxed);
  the_pool.store(new Pool, std::memory_order_release);
}

// Registered when the module is loaded, because a process may fork before its first call.
[[maybe_unused]] const bool told_of_forks = [] {
  the_pool.store(new Pool, std::memory_order_release);
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork(nullptr, nullptr, in_child);
#endif
  return true;
}();

// --- torch's threads ---------------------------------------------------------------------------

// If torch uses GNU's OpenMP, its threads spin for milliseconds after their work and would compete with our threads for
// the processors. So the threads of OpenMP do our work, too: GOMP_parallel(function, data, threads, flags).
using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);

Team find_team() {
#if defined(__linux__)
  const char* const policy = std::getenv("OMP_WAIT_POLICY");
  if (policy && (*policy == 'p' || *policy == 'P')) return nullptr;  // passive: they sleep, and our threads wake sooner
  return reinterpret_cast<Team>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#else
  return nullptr;
#endif
}

// The tasks of a call, for all threads that take part.
struct Shared {
  void (*body)(void*, int64_t);
  void* context;
  int64_t tasks;
  unsigned mode;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};

  static void work(void* of) {
    Shared& shared = *static_cast<Shared*>(of);
    const unsigned before = float_mode();
    set_float_mode(shared.mode);
    for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.tasks;) {
      try {
        shared.body(shared.context, i);
      } catch (...) {
        shared.failed.store(true, std::memory_order_relaxed);
      }
    }
    set_float_mode(before);
  }
};

}  // namespace

bool run_tasks(int threads, int64_t tasks, void (*body)(void*, int64_t), void* context) {
  try {
    if (threads <= 1 || tasks <= 1) {
      for (int64_t i = 0; i < tasks; ++i) body(context, i);
      return true;
    }
    static const Team team = find_team();
    if (team && !forked.load(std::memory_order_relaxed)) {
      Shared shared{body, context, tasks, float_mode()};
      team(Shared::work, &shared, static_cast<unsigned>(threads < tasks ? threads : tasks), 0);
      return !shared.failed.load();
    }
    return the_pool.load(std::memory_order_acquire)->run(threads, tasks, body, context);
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace keyedopt
