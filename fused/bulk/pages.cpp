// Large pages for large tensors, where the system gives them on request alone.
//
// An update of scattered rows needs another page for each row and each state, and with pages of 4 KiB the
// processor looks most of them up in memory.
#include "tensors.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace keyedopt {

// large_pages(tensor): ask for them in the memory of a new tensor of the CPU; what is in it stays.
PyObject* large_pages(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 1) {
        PyErr_SetString(PyExc_TypeError, "a tensor is needed");
        return nullptr;
    }
#if defined(MADV_HUGEPAGE)
    View view;
    constexpr int64_t kWorth = 4 << 20;  // bytes: below, few whole large pages lie inside
    if (look(args[0], &view) && view.device.type == kCpu && dense_bytes(view) >= kWorth) {
        const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        const uintptr_t begin = reinterpret_cast<uintptr_t>(view.data) + view.byte_offset;
        const uintptr_t first = (begin + page - 1) / page * page;
        const uintptr_t last = (begin + static_cast<uintptr_t>(dense_bytes(view))) / page * page;
        madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a wish: an error changes nothing
    }
#endif
    Py_RETURN_NONE;
}

}  // namespace keyedopt
