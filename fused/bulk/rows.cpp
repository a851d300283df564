// Check the row numbers of a sparse gradient in one pass on the calling thread.
//
// torch's minimum and maximum start torch's threads, which then spin and compete with the threads of the update.
#include "rows.h"

#include "tensors.h"

namespace keyedopt {

// outside(indices, sizes): return None if the numbers in each row of indices (dimensions, N) are in [0, size), else
// (size, number) of the first invalid number; False if the tensor is not supported.
PyObject* outside(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a tensor and a tuple of sizes are needed");
        return nullptr;
    }
    View view;
    if (!look(args[0], &view) || view.device.type != kCpu || view.dtype.code != kInt || view.dtype.bits != 64 ||
        view.dtype.lanes != 1 || view.ndim != 2 || view.shape[0] > PyTuple_GET_SIZE(args[1]) || dense_bytes(view) < 0)
        Py_RETURN_FALSE;
    const auto* numbers = reinterpret_cast<const int64_t*>(static_cast<const char*>(view.data) + view.byte_offset);
    for (int64_t dim = 0; dim < view.shape[0]; ++dim) {
        const int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(args[1], dim));
        if (size == -1 && PyErr_Occurred()) return nullptr;
        const int64_t* bad = first_outside(numbers + dim * view.shape[1], view.shape[1], size);
        if (bad) return Py_BuildValue("LL", static_cast<long long>(size), static_cast<long long>(*bad));
    }
    Py_RETURN_NONE;
}

}  // namespace keyedopt
