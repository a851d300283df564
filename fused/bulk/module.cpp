// The Python module: operations on many tensors in one call.
#include "tensors.h"

namespace keyedopt {

const ExchangeApi* api = nullptr;
PyObject* tensor_type = nullptr;
PyObject* parameter_type = nullptr;
PyObject* is_neg = nullptr;

namespace {

constexpr long kRevision = 5;  // as in __init__.py

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
constexpr PyMethodDef method(const char* name, const char* text) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, text};
}

PyMethodDef functions[] = {
    method<alike>("alike", "alike(live, new): whether all pairs are plain tensors of the same shape and dtype"),
    method<pairs>("pairs", "pairs(live, new): the values of two dicts of dicts as lists, or None if keys differ"),
    method<copies>("copies", "copies(entries, types): a copy of each dict, or None if a value has another type"),
    method<copy>("copy", "copy(live, new, written): fill CPU tensors, or write nothing and return False"),
    method<square_sum>("square_sum", "square_sum(tensors, threads, instruction_set): of all elements, or None"),
    method<gradients>("gradients", "gradients(params): all gradients, or None if two parameters share one"),
    method<gathered>("gathered", "gathered(params, state, names): parameters, gradients and states, or None"),
    method<outside>("outside", "outside(indices, sizes): (size, number) of the first invalid number, or None"),
    method<places>("places", "places(tensors): address, dtype, shape and strides of each, as bytes, or None"),
    method<held>("held", "held(modules, name, tensors): whether these are the parameters `name` of the modules"),
    method<count_trained>("count_trained", "count_trained(tensors): how many require a gradient"),
    method<listed>("listed", "listed(params, states, indices, values): tables and lookups, or None"),
    method<large_pages>("large_pages", "large_pages(tensor): request large pages for a new tensor"),
    method<gather_pages>("gather_pages", "gather_pages(tensor): request to replace small pages by large ones"),
    method<step>("step", "step(groups, threads, instruction_set): update, or write nothing and return False"),
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_bulk", "Operations on many tensors in one call.", -1,
                      functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace keyedopt

PyMODINIT_FUNC PyInit__bulk() {
    using namespace keyedopt;
    PyObject* torch = PyImport_ImportModule("torch");
    tensor_type = torch ? PyObject_GetAttrString(torch, "Tensor") : nullptr;
    PyObject* nn = tensor_type ? PyObject_GetAttrString(torch, "nn") : nullptr;
    parameter_type = nn ? PyObject_GetAttrString(nn, "Parameter") : nullptr;
    Py_XDECREF(nn);
    Py_XDECREF(torch);
    is_neg = parameter_type ? PyObject_GetAttrString(tensor_type, "is_neg") : nullptr;
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
    PyObject* made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "revision", kRevision) < 0) Py_CLEAR(made);
    return made;
}
