// Whether the memory of a tensor still exists.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace keyedopt {

// Return whether a tensor with this address has its memory. FSDP frees storage (`untyped_storage().resize_(0)`) that
// tensors still refer to: the address is then the offset in the storage, which is below all memory of most systems.
// Only for such addresses the storage is asked for its size, because that takes as long as the update of 100 elements.
// Like torch's operators this does not notice a storage that was made smaller, but not freed.
inline bool has_memory(PyObject* tensor, unsigned long long address) {
    constexpr unsigned long long kLowest = 1ULL << 40;
    if (address >= kLowest) return true;
    static PyObject* const storage_name = PyUnicode_InternFromString("untyped_storage");
    static PyObject* const bytes_name = PyUnicode_InternFromString("nbytes");
    static PyObject* const numel_name = PyUnicode_InternFromString("numel");
    PyObject* count = PyObject_CallMethodNoArgs(tensor, numel_name);
    const long long elements = count ? PyLong_AsLongLong(count) : -1;
    Py_XDECREF(count);
    PyObject* storage = elements > 0 ? PyObject_CallMethodNoArgs(tensor, storage_name) : nullptr;
    PyObject* bytes = storage ? PyObject_CallMethodNoArgs(storage, bytes_name) : nullptr;
    const long long size = bytes ? PyLong_AsLongLong(bytes) : 0;
    Py_XDECREF(storage);
    Py_XDECREF(bytes);
    PyErr_Clear();
    return elements == 0 || size > 0;
}

}  // namespace keyedopt
