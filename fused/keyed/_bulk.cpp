// Compare and copy thousands of small tensors in one call.
//
// A load of ten thousand state tensors spends its time on Python attributes and on the dispatch of each copy.
// Here tensors are looked at through the C interface that DLPack defines for them
// (torch.Tensor.__dlpack_c_exchange_api__), so that neither torch's headers nor its library are needed.
// Whatever is unusual is answered by False, and the caller takes its general way.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// The part of DLPack's binary interface (major version 1) that is used.
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
constexpr uint8_t kComplex = 5;

const ExchangeApi* api = nullptr;
PyObject* tensor_type = nullptr;
PyObject* is_neg = nullptr;

// False, without a Python error, for what is no plain strided tensor.
bool look(PyObject* tensor, View* view) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != tensor_type) return false;
    if (api->view(tensor, view) == 0) return true;
    PyErr_Clear();
    return false;
}

bool same_form(const View& a, const View& b) {
    return a.dtype.code == b.dtype.code && a.dtype.bits == b.dtype.bits && a.dtype.lanes == b.dtype.lanes &&
           a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

// The size in bytes of what lies in memory without gaps and in order; -1 for anything else.
int64_t dense_bytes(const View& view) {
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

// A complex number may be stored as its conjugate. A real one may then be the second half of it, stored with
// the opposite sign; the halves of several are not contiguous.
bool stored_as_is(PyObject* tensor, const View& view, int64_t bytes) {
    if (view.dtype.code == kComplex) return false;
    const auto address = reinterpret_cast<uintptr_t>(view.data) + view.byte_offset;
    if (bytes * 8 != view.dtype.bits || address % (2 * bytes) == 0) return true;
    PyObject* negated = PyObject_CallOneArg(is_neg, tensor);
    const bool plain = negated == Py_False;
    Py_XDECREF(negated);
    PyErr_Clear();
    return plain;
}

bool two_lists(PyObject* const* args, Py_ssize_t count) {
    if (count == 2 && PyList_CheckExact(args[0]) && PyList_CheckExact(args[1]) &&
        PyList_GET_SIZE(args[0]) == PyList_GET_SIZE(args[1]))
        return true;
    PyErr_SetString(PyExc_TypeError, "two lists of the same length are needed");
    return false;
}

// alike(live, new): whether all pairs are plain tensors of one shape and dtype each.
PyObject* alike(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!two_lists(args, count)) return nullptr;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
        View live, came;
        if (!look(PyList_GET_ITEM(args[0], i), &live) || !look(PyList_GET_ITEM(args[1], i), &came) ||
            !same_form(live, came))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

// pairs(live, new): the values of two lists of dicts, as two lists, or None unless each dict has the keys of
// the other one.
PyObject* pairs(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!two_lists(args, count)) return nullptr;
    PyObject *have = PyList_New(0), *came = PyList_New(0);
    bool fits = have && came;
    for (Py_ssize_t i = 0; fits && i < PyList_GET_SIZE(args[0]); ++i) {
        PyObject *live = PyList_GET_ITEM(args[0], i), *entry = PyList_GET_ITEM(args[1], i);
        fits = PyDict_CheckExact(live) && PyDict_CheckExact(entry) && PyDict_GET_SIZE(live) == PyDict_GET_SIZE(entry);
        PyObject *key, *value;
        for (Py_ssize_t at = 0; fits && PyDict_Next(live, &at, &key, &value);) {
            if (!PyUnicode_CheckExact(key)) {  // another key may run code of its own when it is compared
                fits = false;
                break;
            }
            PyObject* other = PyDict_GetItemWithError(entry, key);
            fits = other && PyList_Append(have, value) == 0 && PyList_Append(came, other) == 0;
        }
    }
    PyObject* result = nullptr;
    if (fits) result = PyTuple_Pack(2, have, came);
    Py_XDECREF(have);
    Py_XDECREF(came);
    if (fits || PyErr_Occurred()) return result;
    Py_RETURN_NONE;
}

struct Copy { char* to; const char* from; int64_t bytes; };
struct Span { uintptr_t begin; uintptr_t end; };

// Sort by where spans begin, eleven bits at a time: memory is scattered over few of all addresses.
void sort_spans(std::vector<Span>& spans) {
    uintptr_t least = UINTPTR_MAX, most = 0;
    for (const Span& span : spans) {
        least = std::min(least, span.begin);
        most = std::max(most, span.begin);
    }
    std::vector<Span> other(spans.size());
    for (int shift = 0; shift < 64 && ((most - least) >> shift) != 0; shift += 11) {
        size_t place[2049] = {0};
        for (const Span& span : spans) ++place[(((span.begin - least) >> shift) & 2047) + 1];
        for (int digit = 0; digit < 2048; ++digit) place[digit + 1] += place[digit];
        for (const Span& span : spans) other[place[((span.begin - least) >> shift) & 2047]++] = span;
        spans.swap(other);
    }
}

// Whether memory that is written to is also written or read for another tensor.
bool overlap(const std::vector<Copy>& copies) {
    std::vector<Span> spans;
    spans.reserve(2 * copies.size());
    for (const Copy& copy : copies) {
        const auto to = reinterpret_cast<uintptr_t>(copy.to), from = reinterpret_cast<uintptr_t>(copy.from);
        spans.push_back({to, to + copy.bytes});
        spans.push_back({from, from + copy.bytes});
    }
    sort_spans(spans);
    uintptr_t end = 0;
    for (const Span& span : spans) {
        if (span.begin < end) return true;
        end = std::max(end, span.end);
    }
    return false;
}

// copy(live, new): fill tensors of the CPU and return True; or write nothing and return False where one is
// not contiguous, not on the CPU, not alike, or shares memory with another.
PyObject* copy(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!two_lists(args, count)) return nullptr;
    const Py_ssize_t size = PyList_GET_SIZE(args[0]);
    std::vector<Copy> copies;
    copies.reserve(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject *to = PyList_GET_ITEM(args[0], i), *from = PyList_GET_ITEM(args[1], i);
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
    for (const Copy& one : copies) std::memcpy(one.to, one.from, one.bytes);
    Py_RETURN_TRUE;
}

PyMethodDef functions[] = {
    {"alike", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(alike)), METH_FASTCALL,
     "Return whether all pairs are plain tensors of one shape and dtype each."},
    {"pairs", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(pairs)), METH_FASTCALL,
     "Return the values of two lists of dicts, as two lists, or None if keys differ."},
    {"copy", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(copy)), METH_FASTCALL,
     "Fill tensors of the CPU and return True; return False, and write nothing, where a pair is unusual."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_bulk", "Compare and copy thousands of small tensors.", -1,
                      functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__bulk() {
    PyObject* torch = PyImport_ImportModule("torch");
    tensor_type = torch ? PyObject_GetAttrString(torch, "Tensor") : nullptr;
    Py_XDECREF(torch);
    is_neg = tensor_type ? PyObject_GetAttrString(tensor_type, "is_neg") : nullptr;
    PyObject* capsule = is_neg ? PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__") : nullptr;
    if (!capsule) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ImportError, "torch does not offer DLPack's exchange interface");
        return nullptr;
    }
    api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);  // torch's own table, which lives as long as torch
    if (!api) return nullptr;
    if (api->version.major != 1) {
        PyErr_SetString(PyExc_ImportError, "another major version of DLPack's exchange interface");
        return nullptr;
    }
    return PyModule_Create(&module);
}
