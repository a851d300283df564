// Return the gradients and states of many parameters in one call.
//
// A model runs between two steps, so the caches contain nothing of the optimizer. Most of the time of a step is
// then spent on cache misses for Python objects, most of all if Python code reads one object after the other.
#include "tensors.h"

#include <new>
#include <vector>

namespace keyedopt {
namespace {

// Return a new reference to the gradient of a plain tensor, or None. Null, possibly with an error, for other objects.
PyObject* grad_of(PyObject* param) {
    static PyObject* const name = PyUnicode_InternFromString("grad");
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(param));
    return type == tensor_type || type == parameter_type ? PyObject_GetAttr(param, name) : nullptr;
}

// The entries of a dict by parameter. Most dicts have the order of the parameters; a lookup by key calls Python.
class Entries {
  public:
    explicit Entries(PyObject* dict) : dict_(dict) {}

    // A borrowed reference; null, possibly with an error, if the entry is missing.
    PyObject* of(PyObject* param) {
        PyObject *key, *value;
        if (PyDict_Next(dict_, &at_, &key, &value) && key == param) return value;
        return PyDict_GetItemWithError(dict_, param);
    }

  private:
    PyObject* dict_;
    Py_ssize_t at_ = 0;
};

bool distinct(std::vector<PyObject*>* objects) {
    std::sort(objects->begin(), objects->end());
    return std::adjacent_find(objects->begin(), objects->end()) == objects->end();
}

PyObject* none_unless_error() {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

}  // namespace

// gradients(params): return all gradients, or None if a parameter is not a plain tensor or two share a gradient.
PyObject* gradients(PyObject*, PyObject* const* args, Py_ssize_t count) try {
    if (count != 1 || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a list is needed");
        return nullptr;
    }
    PyObject* result = PyList_New(0);
    std::vector<PyObject*> seen;
    bool fits = result;
    for (Py_ssize_t i = 0; fits && i < PyList_GET_SIZE(args[0]); ++i) {
        fetch_soon(args[0], i);
        PyObject* grad = grad_of(PyList_GET_ITEM(args[0], i));
        fits = grad && (grad == Py_None || PyList_Append(result, grad) == 0);
        if (grad && grad != Py_None) seen.push_back(grad);
        Py_XDECREF(grad);
    }
    if (fits && distinct(&seen)) return result;
    Py_XDECREF(result);
    return none_unless_error();
} catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
}

// gathered(params, state, names): return (parameters with a gradient, their gradients, a list of the states of each
// name), or None if a parameter is not a plain tensor or lacks a state.
PyObject* gathered(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 3 || !PyList_CheckExact(args[0]) || !PyDict_Check(args[1]) || !PyTuple_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "a list, a dict and a tuple of names are needed");
        return nullptr;
    }
    const Py_ssize_t names = PyTuple_GET_SIZE(args[2]);
    PyObject *params = PyList_New(0), *grads = PyList_New(0), *states = PyList_New(names);
    bool fits = params && grads && states;
    for (Py_ssize_t n = 0; fits && n < names; ++n) {
        PyObject* some = PyList_New(0);
        fits = some && PyUnicode_CheckExact(PyTuple_GET_ITEM(args[2], n));
        if (some) PyList_SET_ITEM(states, n, some);
    }
    Entries entries(args[1]);
    for (Py_ssize_t i = 0; fits && i < PyList_GET_SIZE(args[0]); ++i) {
        fetch_soon(args[0], i);
        PyObject* param = PyList_GET_ITEM(args[0], i);
        PyObject* grad = grad_of(param);
        fits = grad;
        if (fits && grad != Py_None) {
            PyObject* entry = names ? entries.of(param) : nullptr;
            fits = (!names || (entry && PyDict_CheckExact(entry))) && PyList_Append(params, param) == 0 &&
                   PyList_Append(grads, grad) == 0;
            for (Py_ssize_t n = 0; fits && n < names; ++n) {
                PyObject* value = PyDict_GetItemWithError(entry, PyTuple_GET_ITEM(args[2], n));
                fits = value && value != Py_None && PyList_Append(PyList_GET_ITEM(states, n), value) == 0;
            }
        }
        Py_XDECREF(grad);
    }
    PyObject* result = fits ? PyTuple_Pack(3, params, grads, states) : nullptr;
    Py_XDECREF(params);
    Py_XDECREF(grads);
    Py_XDECREF(states);
    return fits ? result : none_unless_error();
}

}  // namespace keyedopt
