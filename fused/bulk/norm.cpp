// The sum of the squares of all elements of CPU tensors.
#include <new>

#include "squares.h"
#include "tensors.h"

namespace keyedopt {

// square_sum(tensors, threads, instruction_set): return None if a tensor is not contiguous float32 on the CPU.
PyObject* square_sum(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 3 || !PyList_CheckExact(args[0]) || !PyLong_CheckExact(args[1]) || !PyUnicode_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "a list, a number of threads and a name are needed");
        return nullptr;
    }
    const int threads = threads_of(args[1]);
    const char* const name = PyUnicode_AsUTF8(args[2]);
    if (!threads || !name) return nullptr;
    const Machine machine = machine_of(name);
    if (machine == Machine::unknown) Py_RETURN_NONE;
    double total;
    bool done = false;
    try {
        std::vector<Stretch> stretches;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
            fetch_soon(args[0], i);
            View view;
            const bool plain = look(PyList_GET_ITEM(args[0], i), &view);
            if (!plain || view.device.type != kCpu || view.dtype.code != kFloat || view.dtype.bits != 32) Py_RETURN_NONE;
            const int64_t bytes = dense_bytes(view);
            if (bytes < 0) Py_RETURN_NONE;
            const auto* begin = reinterpret_cast<const float*>(static_cast<const char*>(view.data) + view.byte_offset);
            stretches.push_back({begin, bytes / static_cast<int64_t>(sizeof(float))});
        }
        Py_BEGIN_ALLOW_THREADS;
        done = sum_squares(stretches, threads, machine, &total);
        Py_END_ALLOW_THREADS;
    } catch (const std::bad_alloc&) {
    }
    return done ? PyFloat_FromDouble(total) : PyErr_NoMemory();
}

}  // namespace keyedopt
