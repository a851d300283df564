// Request large pages for large tensors, on systems that provide them only on request.
//
// An update of scattered rows accesses another page for each row and each state. With pages of 4 KiB most of these
// accesses miss the TLB.
#include "tensors.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; others refuse it
#endif
#endif

namespace keyedopt {
namespace {

#if defined(MADV_HUGEPAGE)
constexpr int64_t kWorth = 4 << 20;  // bytes: smaller tensors contain few whole large pages
constexpr uintptr_t kLarge = 2 << 20, kSmallest = 4096;

// Return the range of whole pages in a CPU tensor, at multiples of `page`; false if the tensor is too small.
bool pages_of(PyObject* tensor, uintptr_t page, uintptr_t* begin, uintptr_t* end) {
    View view;
    if (!look(tensor, &view, true) || view.device.type != kCpu || dense_bytes(view) < kWorth) return false;
    const uintptr_t first = reinterpret_cast<uintptr_t>(view.data) + view.byte_offset;
    *begin = (first + page - 1) / page * page;
    *end = (first + static_cast<uintptr_t>(dense_bytes(view))) / page * page;
    return *begin < *end;
}

// Return whether all small pages of a large page are in memory.
bool resident(uintptr_t large) {
    unsigned char small[kLarge / kSmallest];
    const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    if (mincore(reinterpret_cast<void*>(large), kLarge, small) != 0) return false;
    return std::all_of(small, small + kLarge / size, [](unsigned char one) { return one & 1; });
}

// Return the number of free bytes of memory.
uint64_t unused() {
    return static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}
#endif

bool one_argument(Py_ssize_t count) {
    if (count != 1) PyErr_SetString(PyExc_TypeError, "a tensor is needed");
    return count == 1;
}

}  // namespace

// large_pages(tensor): request large pages for the memory of a new CPU tensor. Values do not change.
PyObject* large_pages(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!one_argument(count)) return nullptr;
#if defined(MADV_HUGEPAGE)
    uintptr_t begin, end;
    if (pages_of(args[0], static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), &begin, &end))
        madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only a hint: an error changes nothing
#endif
    Py_RETURN_NONE;
}

// gather_pages(tensor): ask the system to replace small pages of a CPU tensor by large pages, only if all small pages
// of a large page are in memory (so that the tensor needs no more memory than before) and only if there is much free
// memory: both copies exist during the call, and longer if another process shares the small pages.
PyObject* gather_pages(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!one_argument(count)) return nullptr;
#if defined(MADV_HUGEPAGE)
    uintptr_t begin, end;
    if (pages_of(args[0], kLarge, &begin, &end) && sysconf(_SC_PAGESIZE) >= static_cast<long>(kSmallest) &&
        end - begin <= unused() / 8) {
        Py_BEGIN_ALLOW_THREADS;
        for (; begin < end; begin += kLarge)
            if (resident(begin) && madvise(reinterpret_cast<void*>(begin), kLarge, MADV_COLLAPSE) != 0) break;
        Py_END_ALLOW_THREADS;
    }
#endif
    Py_RETURN_NONE;
}

}  // namespace keyedopt
