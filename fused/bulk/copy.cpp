// Compare and copy thousands of small tensors in one call.
//
// A load of ten thousand state tensors spends its time on Python attributes and on the dispatch of each copy.
// For unsupported input functions return False or None, and the caller uses its general path.
#include <new>

#include "copies.h"
#include "tensors.h"

namespace keyedopt {
namespace {

bool two_lists(PyObject* const* args, Py_ssize_t count, Py_ssize_t wanted = 2) {
    if (count == wanted && PyList_CheckExact(args[0]) && PyList_CheckExact(args[1]) &&
        PyList_GET_SIZE(args[0]) == PyList_GET_SIZE(args[1]))
        return true;
    PyErr_SetString(PyExc_TypeError, "two lists of the same length are needed");
    return false;
}

// Return the value of a key, or null. Only strings: comparing other keys may run Python code.
PyObject* value_of(PyObject* dict, PyObject* key) {
    return PyUnicode_CheckExact(key) ? PyDict_GetItemWithError(dict, key) : nullptr;
}

constexpr Py_ssize_t kSome = 512;  // tensors that fit in the caches of a core

// Prefetch the memory of a dict some items ahead: the object, then its table, then its values. Only a hint, like
// `fetch_soon`.
void fetch_dict_soon(PyObject* const* dicts, Py_ssize_t size, Py_ssize_t at) {
    constexpr Py_ssize_t kObject = 24, kTable = 16, kValues = 8;
    if (at + kObject < size) __builtin_prefetch(dicts[at + kObject]);
    if (at + kTable < size && PyDict_CheckExact(dicts[at + kTable])) {
        const char* const table = reinterpret_cast<char*>(reinterpret_cast<PyDictObject*>(dicts[at + kTable])->ma_keys);
        for (int line = 0; line < 192; line += 64) __builtin_prefetch(table + line);
    }
    if (at + kValues >= size || !PyDict_CheckExact(dicts[at + kValues])) return;
    PyObject *key, *value;
    for (Py_ssize_t inside = 0; PyDict_Next(dicts[at + kValues], &inside, &key, &value);) __builtin_prefetch(value);
}

}  // namespace

// alike(live, new): return whether the tensors of each pair are plain and have the same shape and dtype.
PyObject* alike(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!two_lists(args, count)) return nullptr;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
        fetch_soon(args[0], i);
        fetch_soon(args[1], i);
        View live, came;
        if (!look(PyList_GET_ITEM(args[0], i), &live) || !look(PyList_GET_ITEM(args[1], i), &came) ||
            !same_form(live, came))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

// pairs(live, new): return the values of two dicts of dicts as two lists, or None unless the dicts and the dicts
// inside have the same keys.
PyObject* pairs(PyObject*, PyObject* const* args, Py_ssize_t count) try {
    if (count != 2 || !PyDict_CheckExact(args[0]) || !PyDict_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "two dicts are needed");
        return nullptr;
    }
    PyObject *have = PyList_New(0), *came = PyList_New(0);
    bool fits = have && came && PyDict_GET_SIZE(args[0]) == PyDict_GET_SIZE(args[1]);
    std::vector<PyObject*> entries, others;
    PyObject *name, *entry, *key, *value;
    for (Py_ssize_t at = 0; fits && PyDict_Next(args[0], &at, &name, &entry);) {
        entries.push_back(entry);
        others.push_back(value_of(args[1], name));
        fits = others.back();
    }
    const auto size = static_cast<Py_ssize_t>(entries.size());
    for (Py_ssize_t i = 0; fits && i < size; ++i) {
        fetch_dict_soon(entries.data(), size, i);
        fetch_dict_soon(others.data(), size, i);
        fits = PyDict_CheckExact(entries[i]) && PyDict_CheckExact(others[i]) &&
               PyDict_GET_SIZE(entries[i]) == PyDict_GET_SIZE(others[i]);
        for (Py_ssize_t inside = 0; fits && PyDict_Next(entries[i], &inside, &key, &value);) {
            PyObject* other = value_of(others[i], key);
            fits = other && PyList_Append(have, value) == 0 && PyList_Append(came, other) == 0;
        }
    }
    PyObject* result = nullptr;
    if (fits) result = PyTuple_Pack(2, have, came);
    Py_XDECREF(have);
    Py_XDECREF(came);
    if (fits || PyErr_Occurred()) return result;
    Py_RETURN_NONE;
} catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
}

// copies(entries, types): return a copy of each entry, or None unless all are dicts with only values of these types.
PyObject* copies(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || !PyList_CheckExact(args[0]) || !PyTuple_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a list and a tuple are needed");
        return nullptr;
    }
    const Py_ssize_t size = PyList_GET_SIZE(args[0]);
    PyObject* result = PyList_New(size);
    bool fits = result;
    for (Py_ssize_t i = 0; fits && i < size; ++i) {
        PyObject *entry = PyList_GET_ITEM(args[0], i), *key, *value;
        fits = PyDict_CheckExact(entry);
        for (Py_ssize_t at = 0; fits && PyDict_Next(entry, &at, &key, &value);) {
            fits = false;
            for (Py_ssize_t t = 0; !fits && t < PyTuple_GET_SIZE(args[1]); ++t)
                fits = reinterpret_cast<PyObject*>(Py_TYPE(value)) == PyTuple_GET_ITEM(args[1], t);
        }
        if (!fits) break;
        PyObject* copied = PyDict_Copy(entry);
        fits = copied;
        if (copied) PyList_SET_ITEM(result, i, copied);
    }
    if (fits) return result;
    Py_XDECREF(result);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

// copy(live, new, written): compare and fill CPU tensors, call `written` with all of them, some at a time, and return
// True. Write nothing and return False if a tensor is not contiguous, not on the CPU, differs from its source in shape
// or dtype, or shares memory with another tensor.
PyObject* copy(PyObject*, PyObject* const* args, Py_ssize_t count) try {
    if (!two_lists(args, count, 3)) return nullptr;
    const Py_ssize_t size = PyList_GET_SIZE(args[0]);
    std::vector<Copy> copies;
    copies.reserve(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject *to = PyList_GET_ITEM(args[0], i), *from = PyList_GET_ITEM(args[1], i);
        fetch_soon(args[0], i);
        fetch_soon(args[1], i);
        View live, came;
        if (!look(to, &live)) Py_RETURN_FALSE;
        if (to == from) continue;
        if (!look(from, &came) || !same_form(live, came)) Py_RETURN_FALSE;
        const int64_t bytes = dense_bytes(live);
        if (live.device.type != kCpu || came.device.type != kCpu || bytes < 0 || dense_bytes(came) != bytes ||
            !stored_as_is(to, live, bytes) || !stored_as_is(from, came, bytes))
            Py_RETURN_FALSE;
        if (bytes > 0)
            copies.push_back({static_cast<char*>(live.data) + live.byte_offset,
                              static_cast<const char*>(came.data) + came.byte_offset, bytes});
    }
    if (overlap(copies)) Py_RETURN_FALSE;
    make(copies);
    for (Py_ssize_t i = 0; i < size; i += kSome) {
        PyObject* some = PyList_GetSlice(args[0], i, i + kSome);
        for (Py_ssize_t k = 0; some && k < PyList_GET_SIZE(some); ++k) fetch_soon(some, k);
        PyObject* done = some ? PyObject_CallOneArg(args[2], some) : nullptr;
        Py_XDECREF(some);
        if (!done) return nullptr;
        Py_DECREF(done);
    }
    Py_RETURN_TRUE;
} catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
}

}  // namespace keyedopt
