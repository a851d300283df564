// Large pages for large tensors, where the system gives them on request alone.
//
// An update of scattered rows needs another page for each row and each state, and with pages of 4 KiB the
// processor looks most of them up in memory.
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
constexpr int64_t kWorth = 4 << 20;  // bytes: below, few whole large pages lie inside
constexpr uintptr_t kLarge = 2 << 20, kSmallest = 4096;

// The whole pages of a tensor of the CPU, as addresses that are multiples of `page`; false if that is not worth it.
bool pages_of(PyObject* tensor, uintptr_t page, uintptr_t* begin, uintptr_t* end) {
    View view;
    if (!look(tensor, &view, true) || view.device.type != kCpu || dense_bytes(view) < kWorth) return false;
    const uintptr_t first = reinterpret_cast<uintptr_t>(view.data) + view.byte_offset;
    *begin = (first + page - 1) / page * page;
    *end = (first + static_cast<uintptr_t>(dense_bytes(view))) / page * page;
    return *begin < *end;
}

// Whether all small pages of a large one are in memory.
bool resident(uintptr_t large) {
    unsigned char small[kLarge / kSmallest];
    const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    if (mincore(reinterpret_cast<void*>(large), kLarge, small) != 0) return false;
    return std::all_of(small, small + kLarge / size, [](unsigned char one) { return one & 1; });
}

// Bytes of memory that nobody uses.
uint64_t unused() {
    return static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}
#endif

bool one_argument(Py_ssize_t count) {
    if (count != 1) PyErr_SetString(PyExc_TypeError, "a tensor is needed");
    return count == 1;
}

}  // namespace

// large_pages(tensor): ask for them in the memory of a new tensor of the CPU; what is in it stays.
PyObject* large_pages(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!one_argument(count)) return nullptr;
#if defined(MADV_HUGEPAGE)
    uintptr_t begin, end;
    if (pages_of(args[0], static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), &begin, &end))
        madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish: an error changes nothing
#endif
    Py_RETURN_NONE;
}

// gather_pages(tensor): have the system put small pages of a tensor of the CPU together into large ones: those that
// are all in memory, so that it needs no more than before, and where there is much more memory, for until it is
// done, and for longer where another process shares the small ones, both are there.
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
