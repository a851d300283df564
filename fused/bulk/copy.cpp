// Compare and copy thousands of small tensors in one call.
//
// A load of ten thousand state tensors spends its time on Python attributes and on the dispatch of each copy.
// Whatever is unusual is answered by False or None, and the caller takes its general way.
#include <cstring>
#include <vector>

#include "tensors.h"

namespace keyedopt {
namespace {

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

}  // namespace

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

}  // namespace keyedopt
