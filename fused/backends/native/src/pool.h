// Threads that wait for work, shared by all calls.
#pragma once

#include <cstdint>

namespace keyedopt {

// Run body(context, i) for every i of [0, tasks), on up to `threads` threads, this one among them; return
// when all are done. If the threads are busy with another call, the calling thread runs all tasks. False: a
// body ran out of memory.
bool run_tasks(int threads, int64_t tasks, void (*body)(void*, int64_t), void* context);

template <class Body>
bool parallel(int threads, int64_t tasks, const Body& body) {
  return run_tasks(
      threads, tasks, [](void* context, int64_t i) { (*static_cast<const Body*>(context))(i); },
      const_cast<Body*>(&body));
}

}  // namespace keyedopt
