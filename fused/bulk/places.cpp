// Where tensors are, to notice that one has moved: a step of many tables asks for a thousand of them.
#include "tensors.h"

namespace keyedopt {

// places(tensors): return address and number of elements of each tensor, as bytes to compare with; None if one is not a
// plain tensor or parameter with memory.
PyObject* places(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 1 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a list of tensors is needed");
        return nullptr;
    }
    const Py_ssize_t size = PyList_GET_SIZE(args[0]);
    PyObject* made = PyBytes_FromStringAndSize(nullptr, size * static_cast<Py_ssize_t>(2 * sizeof(int64_t)));
    if (!made) return nullptr;
    char* out = PyBytes_AS_STRING(made);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]) && i < size; ++i) {
        View view;
        fetch_soon(args[0], i);
        if (!look(PyList_GET_ITEM(args[0], i), &view, true)) {
            Py_DECREF(made);
            Py_RETURN_NONE;
        }
        int64_t elements = 1;
        for (int32_t dim = 0; dim < view.ndim; ++dim) elements *= view.shape[dim];
        const int64_t found[2] = {static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data) + view.byte_offset), elements};
        out = std::copy_n(reinterpret_cast<const char*>(found), sizeof(found), out);
    }
    return made;
}

}  // namespace keyedopt
