// Check all parameters with dense gradients, then update all of them with the loops of dense.cpp.
#include <vector>

#include "dense.h"
#include "spans.h"
#include "tensors.h"

namespace keyedopt {
namespace {

constexpr int kStates[] = {1, 1, 2};  // number of states of each algorithm; SGD's is the momentum

bool is_float(PyObject* tensor, View* view, bool parameter = false, int bits = 32) {
    if (!look(tensor, view, parameter) || view->device.type != kCpu) return false;
    if (view->dtype.code != kFloat || view->dtype.bits != bits || view->dtype.lanes != 1) return false;
    const int64_t bytes = dense_bytes(*view);
    return bytes >= 0 && stored_as_is(tensor, *view, bytes);
}

float* numbers(const View& view) {
    return reinterpret_cast<float*>(static_cast<char*>(view.data) + view.byte_offset);
}

void add_span(std::vector<Span>* spans, const void* begin, int64_t bytes) {
    const auto at = reinterpret_cast<uintptr_t>(begin);
    if (bytes > 0) spans->push_back({at, at + static_cast<uintptr_t>(bytes)});
}

struct Plan {
    std::vector<Param> params;
    std::vector<float*> counts;  // step counts to increment after the update
    std::vector<double*> wide_counts;
    std::vector<Span> spans;
};

// Return the step count of a parameter, and plan its increment; negative if the tensor is not a count.
double take_count(PyObject* tensor, Plan* plan) {
    View view;
    const bool narrow = is_float(tensor, &view);
    if ((!narrow && !is_float(tensor, &view, false, 64)) || view.ndim != 0) return -1.0;
    char* const at = static_cast<char*>(view.data) + view.byte_offset;
    add_span(&plan->spans, at, narrow ? sizeof(float) : sizeof(double));
    if (narrow) {
        plan->counts.push_back(reinterpret_cast<float*>(at));
        return static_cast<double>(*plan->counts.back());
    }
    plan->wide_counts.push_back(reinterpret_cast<double*>(at));
    return *plan->wide_counts.back();
}

bool is_list(PyObject* list, Py_ssize_t size) { return PyList_CheckExact(list) && PyList_GET_SIZE(list) == size; }

// Options in the order of fused/dense/cpu_dense_steps.py; false with a Python error.
bool read_options(PyObject* from, Options* o) {
    int maximize, decoupled, nesterov, first;
    if (!PyTuple_CheckExact(from) ||
        !PyArg_ParseTuple(from, "ippppdddddddddd", &o->algorithm, &maximize, &decoupled, &nesterov, &first, &o->factor,
                          &o->limit, &o->lr, &o->beta1, &o->beta2, &o->eps, &o->weight_decay, &o->momentum,
                          &o->dampening, &o->lr_decay)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "options are a tuple");
        return false;
    }
    o->maximize = maximize, o->decoupled = decoupled, o->nesterov = nesterov, o->first = first;
    const bool known = o->algorithm >= kSgd && o->algorithm <= kAdam;
    if (!known) PyErr_SetString(PyExc_ValueError, "no such algorithm");
    return known;
}

// Add the parameters of a group; false, without a Python error, if a tensor is not supported.
bool add_group(PyObject* group, Plan* plan) {
    PyObject *options, *params, *grads, *states, *counts;
    if (!PyTuple_CheckExact(group) || !PyArg_ParseTuple(group, "OOOOO", &options, &params, &grads, &states, &counts)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a group is a tuple");
        return false;
    }
    Options o;
    if (!read_options(options, &o)) return false;
    const Py_ssize_t size = PyList_CheckExact(params) ? PyList_GET_SIZE(params) : -1;
    const int wanted = o.algorithm == kSgd && o.momentum == 0.0 ? 0 : kStates[o.algorithm];
    bool fits = size >= 0 && is_list(grads, size) && is_list(states, wanted) &&
                (PyFloat_CheckExact(counts) || is_list(counts, size));
    for (int s = 0; fits && s < wanted; ++s) fits = is_list(PyList_GET_ITEM(states, s), size);
    if (!fits) {
        PyErr_SetString(PyExc_TypeError, "lists of one length are needed: params, grads, each of states, counts");
        return false;
    }
    Rule rule{};
    if (PyFloat_CheckExact(counts)) rule = rule_of(o, PyFloat_AS_DOUBLE(counts));
    double before = -1.0;  // unknown
    for (Py_ssize_t i = 0; i < size; ++i) {
        fetch_soon(params, i);
        fetch_soon(grads, i);
        for (int s = 0; s < wanted; ++s) fetch_soon(PyList_GET_ITEM(states, s), i);
        if (!PyFloat_CheckExact(counts)) fetch_soon(counts, i);
        View weight, other;
        Param param{};
        if (!is_float(PyList_GET_ITEM(params, i), &weight, true)) return false;
        if (!is_float(PyList_GET_ITEM(grads, i), &other) || !same_form(weight, other)) return false;
        param.weight = numbers(weight);
        param.grad = numbers(other);
        const int64_t bytes = dense_bytes(weight);
        param.count = bytes / static_cast<int64_t>(sizeof(float));
        for (int s = 0; s < wanted; ++s) {
            if (!is_float(PyList_GET_ITEM(PyList_GET_ITEM(states, s), i), &other)) return false;
            if (!same_form(weight, other)) return false;
            param.states[s] = numbers(other);
            add_span(&plan->spans, param.states[s], bytes);
        }
        add_span(&plan->spans, param.weight, bytes);
        add_span(&plan->spans, param.grad, bytes);
        if (!PyFloat_CheckExact(counts)) {
            const double count = take_count(PyList_GET_ITEM(counts, i), plan);
            if (!(count >= 0.0)) return false;
            if (count != before) rule = rule_of(o, count + 1.0);
            before = count;
        }
        param.rule = rule;
        plan->params.push_back(param);
    }
    return true;
}

}  // namespace

// step(groups, threads, instruction_set): update and return True; or write nothing and return False if a tensor is not
// contiguous float32 on the CPU, differs in shape from its parameter, or shares memory with another tensor.
PyObject* step(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 3 || !PyList_CheckExact(args[0]) || !PyLong_CheckExact(args[1]) || !PyUnicode_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "a list of groups, a number of threads and a name are needed");
        return nullptr;
    }
    const int threads = threads_of(args[1]);
    const char* const name = PyUnicode_AsUTF8(args[2]);
    if (!threads || !name) return nullptr;
    const Machine machine = machine_of(name);
    if (machine == Machine::unknown) Py_RETURN_FALSE;
    try {
        Plan plan;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
            if (add_group(PyList_GET_ITEM(args[0], i), &plan)) continue;
            if (PyErr_Occurred()) return nullptr;
            Py_RETURN_FALSE;
        }
        if (any_overlap(plan.spans)) Py_RETURN_FALSE;
        bool done;
        Py_BEGIN_ALLOW_THREADS;
        done = step_all(plan.params, threads, machine);
        Py_END_ALLOW_THREADS;
        if (!done) return PyErr_NoMemory();
        for (float* const one : plan.counts) *one += 1.0f;
        for (double* const one : plan.wide_counts) *one += 1.0;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    Py_RETURN_TRUE;
}

}  // namespace keyedopt
