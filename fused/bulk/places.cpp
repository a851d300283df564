// Notice that a tensor was moved, changed or replaced: a step of many tables asks for a thousand of them.
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

// held(modules, name, tensors): whether the parameter `name` of each module of a dict is the tensor in the list.
PyObject* held(PyObject*, PyObject* const* args, Py_ssize_t count) {
    static PyObject* const parameters_name = PyUnicode_InternFromString("_parameters");
    if (count != 3 || !PyDict_Check(args[0]) || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "a dict of modules, a name and a list of tensors are needed");
        return nullptr;
    }
    PyObject *key, *module;
    Py_ssize_t place = 0, i = 0;
    const Py_ssize_t size = PyList_GET_SIZE(args[2]);
    bool same = PyDict_GET_SIZE(args[0]) == size;
    while (same && i < size && PyDict_Next(args[0], &place, &key, &module)) {
        PyObject* parameters = PyObject_GetAttr(module, parameters_name);
        if (!parameters) return nullptr;
        same = PyDict_Check(parameters) &&
               PyDict_GetItemWithError(parameters, args[1]) == PyList_GET_ITEM(args[2], i++);
        Py_DECREF(parameters);
        if (PyErr_Occurred()) return nullptr;
    }
    return PyBool_FromLong(same && i == size);
}

// count_trained(tensors): how many of the tensors require a gradient.
PyObject* count_trained(PyObject*, PyObject* const* args, Py_ssize_t count) {
    static PyObject* const requires_name = PyUnicode_InternFromString("requires_grad");
    if (count != 1 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a list of tensors is needed");
        return nullptr;
    }
    long number = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
        PyObject* one = PyObject_GetAttr(PyList_GET_ITEM(args[0], i), requires_name);
        if (!one) return nullptr;
        number += one == Py_True;
        Py_DECREF(one);
    }
    return PyLong_FromLong(number);
}

}  // namespace keyedopt
