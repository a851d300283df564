// Access tensors through DLPack's C interface (torch.Tensor.__dlpack_c_exchange_api__), without torch's headers and
// library.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>

#include "../backends/native/src/storage.h"

namespace keyedopt {

// The part of DLPack's binary interface (major version 1) that this extension uses.
struct Device { int32_t type; int32_t id; };
struct DataType { uint8_t code; uint8_t bits; uint16_t lanes; };
struct View {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct ExchangeApi {
    struct { uint32_t major, minor; } version;
    void* previous;
    void* allocate;
    void* export_owned;
    void* import_owned;
    int (*view)(void* tensor, View* out);  // borrows; 0, or -1 with a Python error
    void* current_stream;
};
constexpr int32_t kCpu = 1;
constexpr uint8_t kInt = 0, kFloat = 2, kComplex = 5;

extern const ExchangeApi* api;
extern PyObject* tensor_type;
extern PyObject* parameter_type;  // torch.nn.Parameter: its tensors have the layout of plain ones
extern PyObject* is_neg;

// False, without a Python error, unless the object is a plain strided tensor, or a parameter if accepted, whose memory
// has not been freed. Every function that reads or writes memory gets the address from here.
inline bool look(PyObject* tensor, View* view, bool parameters = false) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if (type != tensor_type && !(parameters && type == parameter_type)) return false;
    if (api->view(tensor, view) == 0)
        return has_memory(tensor, reinterpret_cast<uintptr_t>(view->data) + view->byte_offset);
    PyErr_Clear();
    return false;
}

// Prefetch the memory of a tensor some items ahead: the object, then the memory that it points to and the memory just
// before. Tensors of a large state are scattered over memory, and cache misses take most of the time. This is only a
// hint: nothing but the object is read, so the layout of torch's tensor does not matter.
inline void fetch_soon(PyObject* list, Py_ssize_t at) {
    constexpr Py_ssize_t kObject = 24, kTensor = 12;
    const Py_ssize_t size = PyList_GET_SIZE(list);
    if (at + kObject < size) __builtin_prefetch(PyList_GET_ITEM(list, at + kObject));
    if (at + kTensor >= size) return;
    PyObject* const item = PyList_GET_ITEM(list, at + kTensor);
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(item));
    if (type != tensor_type && type != parameter_type) return;
    const uintptr_t tensor = *reinterpret_cast<const uintptr_t*>(item + 1);
    for (uintptr_t line = 0; line < 512; line += 64) __builtin_prefetch(reinterpret_cast<const void*>(tensor - 256 + line));
}

inline bool same_form(const View& a, const View& b) {
    return a.dtype.code == b.dtype.code && a.dtype.bits == b.dtype.bits && a.dtype.lanes == b.dtype.lanes &&
           a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

// Return the size in bytes of a contiguous tensor, or -1.
inline int64_t dense_bytes(const View& view) {
    int64_t count = 1;
    for (int32_t dim = view.ndim; dim-- > 0;) {
        if (view.shape[dim] != 1 && view.strides[dim] != count) {
            const bool empty = std::count(view.shape, view.shape + view.ndim, 0) > 0;
            return empty ? 0 : -1;
        }
        count *= view.shape[dim];
    }
    return count * ((int64_t(view.dtype.bits) * view.dtype.lanes + 7) / 8);
}

// Complex tensors may be stored conjugated. A real view of the imaginary parts then has the opposite sign; a view of
// more than one element is not contiguous.
inline bool stored_as_is(PyObject* tensor, const View& view, int64_t bytes) {
    if (view.dtype.code == kComplex) return false;
    const auto address = reinterpret_cast<uintptr_t>(view.data) + view.byte_offset;
    if (bytes * 8 != view.dtype.bits || address % (2 * bytes) == 0) return true;
    PyObject* negated = PyObject_CallOneArg(is_neg, tensor);
    const bool plain = negated == Py_False;
    Py_XDECREF(negated);
    PyErr_Clear();
    return plain;
}

// Return a number of threads from a Python integer, from 1 to 1024; 0, with a Python error, if invalid.
inline int threads_of(PyObject* number) {
    const long threads = PyLong_AsLong(number);
    return threads == -1 && PyErr_Occurred() ? 0 : static_cast<int>(std::clamp(threads, 1L, 1024L));
}

// Functions of the module, with METH_FASTCALL arguments.
PyObject* alike(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* pairs(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* copies(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* copy(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* square_sum(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* gradients(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* gathered(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* outside(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* listed(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* places(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* held(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* count_trained(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* large_pages(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* gather_pages(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* step(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace keyedopt
