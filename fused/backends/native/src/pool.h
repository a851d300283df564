// Threads that wait for work, shared by all calls.
#pragma once

#include <cstdint>

namespace keyedopt {

// Run body(context, i) for every i of [0, tasks) on up to `threads` threads, including the calling thread. Return when
// all tasks are done; false if a body ran out of memory. If another call uses the threads, the calling thread runs all
// tasks.
bool run_tasks(int threads, int64_t tasks, void (*body)(void*, int64_t), void* context);

template <class Body>
bool parallel(int threads, int64_t tasks, const Body& body) {
  return run_tasks(
      threads, tasks, [](void* context, int64_t i) { (*static_cast<const Body*>(context))(i); },
      const_cast<Body*>(&body));
}

}  // namespace keyedopt
