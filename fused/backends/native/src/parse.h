// Conversion of Python objects to the structures of the engine; shared by the files of the module.
//
// A table is (weight, rows, dim, dtype, state0, width0, state1, width1, counter). A lookup is (table, values,
// count, offsets, bags, weights, mean, grad or out, stride). Addresses are integers, 0 for none. Callers
// check that the sizes are those of the memory; this code checks the contents of the memory. With many small
// tables, making these tuples takes longer than the update: tables can be cached, and lookups can be a tuple
// of columns.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine.h"

namespace keyedopt {

template <class T>
T* pointer(unsigned long long address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Convert the items of a list or tuple with `parse`; return false with an exception set if one is invalid.
template <class Parse>
bool each(PyObject* items, const Parse& parse) {
  PyObject* sequence = PySequence_Fast(items, "a list or tuple is needed");
  if (!sequence) return false;
  bool good = true;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
  for (Py_ssize_t i = 0; good && i < count; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(sequence, i);
    if (!PyTuple_Check(item)) {
      PyErr_SetString(PyExc_TypeError, "tuples are needed");
      good = false;
    } else {
      good = parse(item);
    }
  }
  Py_DECREF(sequence);
  return good;
}

// Call a method of a tensor that returns an address or a size; return false with an exception set if it fails.
bool ask(PyObject* tensor, PyObject* method, long long* answer);

// Names of methods and attributes as Python strings, created once.
struct Methods {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* zero = PyLong_FromLong(0);
};
const Methods& methods_of_tensors();

// Tables that Python keeps, from `parse_tables`.
constexpr char kTables[] = "keyedopt.tables";

// The lookups of every packed input of some keys, from `cache_layout`.
struct PackedLayout {
  struct One {
    int64_t table, key, column;  // column: where its output begins in the joined output
    bool mean;
  };
  std::vector<One> lookups;
  int64_t keys;   // of the input
  int64_t width;  // of the joined output
};
constexpr char kLayout[] = "keyedopt.layout";

// All return false with an exception set if the input is invalid. Tables are tuples, or the result of `parse_tables`.
// Lookups are a list of tuples, or a tuple of columns: (numbers of tables, values, offsets or None, weights or None,
// means, outputs or gradients); or a packed input: (result of `cache_layout`, values, offsets, weights or None, bags of
// each key, joined output or its gradient).
bool parse_tables(PyObject* items, std::vector<Table>* tables);
bool parse_lookups(PyObject* items, const std::vector<Table>& tables, std::vector<Lookup>* lookups);
bool parse_rule(PyObject* item, const std::vector<Table>& tables, Rule* rule);
bool parse_run(int threads, const char* name, Run* run);

// Functions of the module that read tensors.
PyObject* parse_tables_py(PyObject*, PyObject* items);
PyObject* cache_layout_py(PyObject*, PyObject* args);
PyObject* simple_bags_py(PyObject*, PyObject* args);
PyObject* versions_py(PyObject*, PyObject* args);

}  // namespace keyedopt
