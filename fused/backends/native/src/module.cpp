// The Python module: it takes addresses and sizes, works without the interpreter's lock, and raises exceptions.
#include <new>

#include "parse.h"

namespace {

using namespace keyedopt;

// Run without the interpreter's lock; convert an error to a Python exception.
template <class Work>
bool without_lock(const Work& work) {
  Refusal refusal;
  bool memory = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    refusal = work();
  } catch (const std::bad_alloc&) {
    memory = false;
  }
  Py_END_ALLOW_THREADS;
  if (!memory || refusal == "out of memory") {
    PyErr_NoMemory();
    return false;
  }
  if (!refusal.empty()) PyErr_SetString(PyExc_ValueError, refusal.c_str());
  return refusal.empty();
}

PyObject* look_up_py(PyObject*, PyObject* args) {
  PyObject *table_items, *lookup_items;
  int threads;
  const char* name;
  if (!PyArg_ParseTuple(args, "OOis", &table_items, &lookup_items, &threads, &name)) return nullptr;
  std::vector<Table> tables;
  std::vector<Lookup> lookups;
  Run run;
  if (!parse_tables(table_items, &tables) || !parse_lookups(lookup_items, tables, &lookups) ||
      !parse_run(threads, name, &run))
    return nullptr;
  if (!without_lock([&] { return look_up(tables, lookups, run); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* update_py(PyObject*, PyObject* args) {
  PyObject *table_items, *lookup_items, *rule_item;
  int threads;
  const char* name;
  if (!PyArg_ParseTuple(args, "OOOis", &table_items, &lookup_items, &rule_item, &threads, &name))
    return nullptr;
  std::vector<Table> tables;
  std::vector<Lookup> lookups;
  Rule rule;
  Run run;
  if (!parse_tables(table_items, &tables) || !parse_lookups(lookup_items, tables, &lookups) ||
      !parse_rule(rule_item, tables, &rule) || !parse_run(threads, name, &run))
    return nullptr;
  if (!without_lock([&] { return update(tables, lookups, rule, run); })) return nullptr;
  Py_RETURN_NONE;
}

// Gradients are (table, rows, grads, count, stride).
PyObject* update_rows_py(PyObject*, PyObject* args) {
  PyObject *table_items, *gradient_items, *rule_item;
  int threads;
  const char* name;
  if (!PyArg_ParseTuple(args, "OOOis", &table_items, &gradient_items, &rule_item, &threads, &name))
    return nullptr;
  std::vector<Table> tables;
  std::vector<Summed> gradients;
  Rule rule;
  Run run;
  const auto parse = [&](PyObject* item) {
    unsigned long long rows, grads;
    long long table, count, stride;
    if (!PyArg_ParseTuple(item, "LKKLL", &table, &rows, &grads, &count, &stride)) return false;
    if (table < 0 || static_cast<size_t>(table) >= tables.size() || count < 0) {
      PyErr_SetString(PyExc_ValueError, "a gradient is of a table of the call");
      return false;
    }
    gradients.push_back({table, pointer<int64_t>(rows), pointer<float>(grads), count, stride});
    return true;
  };
  if (!parse_tables(table_items, &tables) || !each(gradient_items, parse) ||
      !parse_rule(rule_item, tables, &rule) || !parse_run(threads, name, &run))
    return nullptr;
  if (!without_lock([&] { return update_rows(tables, gradients, rule, run); })) return nullptr;
  Py_RETURN_NONE;
}

constexpr char kCapsule[] = "keyedopt.coalescing";

void delete_coalescing(PyObject* capsule) {
  delete static_cast<Coalescing*>(PyCapsule_GetPointer(capsule, kCapsule));
}

// (tables, lookups, threads, name) -> (capsule, [(table, distinct rows), ...])
PyObject* sort_py(PyObject*, PyObject* args) {
  PyObject *table_items, *lookup_items;
  int threads;
  const char* name;
  if (!PyArg_ParseTuple(args, "OOis", &table_items, &lookup_items, &threads, &name)) return nullptr;
  Coalescing* coalescing = new (std::nothrow) Coalescing;
  if (!coalescing) return PyErr_NoMemory();
  PyObject* capsule = PyCapsule_New(coalescing, kCapsule, delete_coalescing);
  if (!capsule) {
    delete coalescing;
    return nullptr;
  }
  std::vector<Lookup> lookups;
  Run run;
  if (!parse_tables(table_items, &coalescing->described) ||
      !parse_lookups(lookup_items, coalescing->described, &lookups) ||
      !parse_run(threads, name, &run) ||
      !without_lock([&] { return sort_lookups(coalescing->described, lookups, run, coalescing); })) {
    Py_DECREF(capsule);
    return nullptr;
  }
  PyObject* list = PyList_New(0);
  for (size_t i = 0; list && i < coalescing->tables.size(); ++i) {
    PyObject* pair = Py_BuildValue("LL", static_cast<long long>(coalescing->tables[i]),
                                   static_cast<long long>(coalescing->distinct[i]));
    if (!pair || PyList_Append(list, pair) != 0) Py_CLEAR(list);
    Py_XDECREF(pair);
  }
  if (!list) {
    Py_DECREF(capsule);
    return nullptr;
  }
  return Py_BuildValue("NN", capsule, list);
}

// (capsule, [(rows, grads), ...], threads, name): write the distinct rows and summed gradients of the sorted lookups.
PyObject* sum_py(PyObject*, PyObject* args) {
  PyObject *capsule, *items;
  int threads;
  const char* name;
  if (!PyArg_ParseTuple(args, "OOis", &capsule, &items, &threads, &name)) return nullptr;
  const Coalescing* coalescing = static_cast<Coalescing*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (!coalescing) return nullptr;
  std::vector<int64_t*> rows;
  std::vector<float*> grads;
  Run run;
  const auto parse = [&](PyObject* item) {
    unsigned long long row_address, grad_address;
    if (!PyArg_ParseTuple(item, "KK", &row_address, &grad_address)) return false;
    rows.push_back(pointer<int64_t>(row_address));
    grads.push_back(pointer<float>(grad_address));
    return true;
  };
  if (!each(items, parse) || !parse_run(threads, name, &run)) return nullptr;
  if (rows.size() != coalescing->sorted.size()) {
    PyErr_SetString(PyExc_ValueError, "memory is needed for every table that was sorted");
    return nullptr;
  }
  if (!without_lock([&] { return sum_lookups(*coalescing, rows, grads, run); })) return nullptr;
  Py_RETURN_NONE;
}

PyObject* instruction_sets_py(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  for (const char* name : {"avx512", "avx2", "plain"}) {
    if (!list || !kernels_named(name)) continue;
    PyObject* text = PyUnicode_FromString(name);
    if (!text || PyList_Append(list, text) != 0) Py_CLEAR(list);
    Py_XDECREF(text);
  }
  return list;
}

PyMethodDef methods[] = {
    {"versions", versions_py, METH_VARARGS,
     "versions([tensor or None, ...], ...) -> how often they were changed in place, together"},
    {"simple_bags", simple_bags_py, METH_VARARGS,
     "simple_bags(features, names, classes, tensor_class, int64) -> [(values, offsets, None) or None]"},
    {"parse_tables", parse_tables_py, METH_O,
     "parse_tables(tables) -> parsed tables, which every call accepts instead of tuples"},
    {"cache_layout", cache_layout_py, METH_VARARGS,
     "cache_layout(tables, means, keys, columns, number_of_keys, width) -> the lookups of a packed input"},
    {"look_up_rows", look_up_py, METH_VARARGS, "look_up_rows(tables, lookups, threads, instruction_set)"},
    {"update", update_py, METH_VARARGS, "update(tables, lookups, rule, threads, instruction_set)"},
    {"update_rows", update_rows_py, METH_VARARGS,
     "update_rows(tables, gradients, rule, threads, instruction_set)"},
    {"sort", sort_py, METH_VARARGS,
     "sort(tables, lookups, threads, instruction_set) -> (sorted, [(table, rows)])"},
    {"sum", sum_py, METH_VARARGS, "sum(sorted, [(rows, grads)], threads, instruction_set)"},
    {"instruction_sets", instruction_sets_py, METH_NOARGS,
     "instruction_sets() -> those of this machine, best first"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_kernels",
                          "Kernels of keyedopt.fused for the CPU.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() { return PyModule_Create(&definition); }
