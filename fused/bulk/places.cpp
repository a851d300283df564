// Where tensors are, to notice that one has moved or changed: a step of many tables asks for a thousand of them.
#include <vector>

#include "tensors.h"

namespace keyedopt {

// places(tensors): return address, dtype, shape and strides of each tensor, as bytes to compare with; None if one is not
// a plain tensor or parameter with memory.
PyObject* places(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 1 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a list of tensors is needed");
        return nullptr;
    }
    std::vector<int64_t> found;
    found.reserve(7 * PyList_GET_SIZE(args[0]));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
        View view;
        fetch_soon(args[0], i);
        if (!look(PyList_GET_ITEM(args[0], i), &view, true)) Py_RETURN_NONE;
        found.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data) + view.byte_offset));
        found.push_back(int64_t(view.ndim) << 32 | view.dtype.code << 8 | view.dtype.bits);
        found.insert(found.end(), view.shape, view.shape + view.ndim);
        found.insert(found.end(), view.strides, view.strides + view.ndim);
    }
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()),
                                     static_cast<Py_ssize_t>(found.size() * sizeof(int64_t)));
}

}  // namespace keyedopt
