// Describe parameters with sparse gradients by addresses and sizes, for the kernels of the native backend.
//
// A step with small gradients takes microseconds, so the common case must not run Python code.
#include "tensors.h"

namespace keyedopt {
namespace {

constexpr uint8_t kBfloat = 4;

unsigned long long address(const View& view) {
    return reinterpret_cast<uintptr_t>(view.data) + view.byte_offset;
}

bool on_cpu(const View& view) { return view.device.type == kCpu && view.dtype.lanes == 1; }

bool is_float(const View& view) { return view.dtype.code == kFloat && view.dtype.bits == 32; }

// The number of a dtype in kernels.h (float32, float16, bfloat16), or -1.
int number_of(const DataType& dtype) {
    if (dtype.code == kFloat && dtype.bits == 32) return 0;
    if (dtype.bits != 16) return -1;
    return dtype.code == kFloat ? 1 : dtype.code == kBfloat ? 2 : -1;
}

int64_t numbers_in(const View& view) {
    int64_t count = 1;
    for (int32_t dim = 0; dim < view.ndim; ++dim) count *= view.shape[dim];
    return count;
}

bool contiguous(const View& view) { return on_cpu(view) && dense_bytes(view) >= 0; }

// A parameter (rows, ...) and up to two states of the same shape; null for other input.
PyObject* table(PyObject* param, PyObject* states, Py_ssize_t i, int64_t* rows, int64_t* dim) {
    View view, state;
    if (!look(param, &view, true) || !contiguous(view) || view.ndim < 1 || number_of(view.dtype) < 0) return nullptr;
    *rows = view.shape[0];
    if (*rows < 1 || numbers_in(view) < 1) return nullptr;
    *dim = numbers_in(view) / *rows;
    unsigned long long at[2] = {0, 0};
    long long width[2] = {0, 0};
    for (Py_ssize_t s = 0; s < PyList_GET_SIZE(states); ++s) {
        PyObject* some = PyList_GET_ITEM(states, s);
        if (s >= 2 || !PyList_CheckExact(some) || i >= PyList_GET_SIZE(some)) return nullptr;
        if (!look(PyList_GET_ITEM(some, i), &state) || !contiguous(state) || !is_float(state)) return nullptr;
        if (state.ndim != view.ndim || !std::equal(view.shape, view.shape + view.ndim, state.shape)) return nullptr;
        at[s] = address(state);
        width[s] = *dim;
    }
    return Py_BuildValue("(KLLiKLKLK)", address(view), static_cast<long long>(*rows), static_cast<long long>(*dim),
                         number_of(view.dtype), at[0], width[0], at[1], width[1], 0ULL);
}

// Row numbers (1, N) and float32 gradients (N, ...); null for other input.
PyObject* lookup(PyObject* indices, PyObject* values, Py_ssize_t i, int64_t dim) {
    View rows, grads;
    if (!look(indices, &rows) || !contiguous(rows) || rows.ndim != 2 || rows.shape[0] != 1) return nullptr;
    if (rows.dtype.code != kInt || rows.dtype.bits != 64) return nullptr;
    if (!look(values, &grads) || !contiguous(grads) || !is_float(grads)) return nullptr;
    const long long count = rows.shape[1];
    if (grads.ndim < 1 || grads.shape[0] != count || numbers_in(grads) != count * dim) return nullptr;
    return Py_BuildValue("(nKLKLKiKL)", i, address(rows), count, 0ULL, count, 0ULL, 0, address(grads),
                         static_cast<long long>(dim));
}

}  // namespace

// listed(params, states, indices, values): return the tables and lookups for the native backend, or None if a tensor
// is not supported. The caller must keep the tensors alive. `states` has a list for each state.
PyObject* listed(PyObject*, PyObject* const* args, Py_ssize_t count) {
    for (Py_ssize_t arg = 0; arg < 4; ++arg) {
        const bool fits = count == 4 && PyList_CheckExact(args[arg]) &&
                          (arg == 1 || PyList_GET_SIZE(args[arg]) == PyList_GET_SIZE(args[0]));
        if (fits) continue;
        PyErr_SetString(PyExc_TypeError, "lists are needed: params, states, indices, values");
        return nullptr;
    }
    const Py_ssize_t size = PyList_GET_SIZE(args[0]);
    PyObject *tables = PyList_New(size), *lookups = PyList_New(size);
    bool fits = tables && lookups;
    for (Py_ssize_t i = 0; fits && i < size; ++i) {
        int64_t rows, dim;
        PyObject* one = table(PyList_GET_ITEM(args[0], i), args[1], i, &rows, &dim);
        if (one) PyList_SET_ITEM(tables, i, one);
        PyObject* other = one ? lookup(PyList_GET_ITEM(args[2], i), PyList_GET_ITEM(args[3], i), i, dim) : nullptr;
        if (other) PyList_SET_ITEM(lookups, i, other);
        fits = one && other;
    }
    PyObject* result = fits ? PyTuple_Pack(2, tables, lookups) : nullptr;
    Py_XDECREF(tables);
    Py_XDECREF(lookups);
    if (fits || PyErr_Occurred()) return result;
    Py_RETURN_NONE;
}

}  // namespace keyedopt
