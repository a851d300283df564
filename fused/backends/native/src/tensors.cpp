// What is parsed once and kept, and features that are read at once. In Python this takes longer than a small step.
#include <new>

#include "parse.h"

namespace keyedopt {

bool ask(PyObject* tensor, PyObject* method, long long* answer) {
  PyObject* number = PyObject_CallMethodNoArgs(tensor, method);
  if (!number) return false;
  *answer = PyLong_AsLongLong(number);
  Py_DECREF(number);
  return *answer != -1 || !PyErr_Occurred();
}

const Methods& methods_of_tensors() {
  static const Methods methods;
  return methods;
}

namespace {

void delete_tables(PyObject* capsule) {
  delete static_cast<std::vector<Table>*>(PyCapsule_GetPointer(capsule, kTables));
}

void delete_layout(PyObject* capsule) {
  delete static_cast<PackedLayout*>(PyCapsule_GetPointer(capsule, kLayout));
}

// Return whether an attribute, or the result of a method, is this object; false after an error.
bool is_object(PyObject* found, PyObject* wanted) {
  if (!found) PyErr_Clear();
  Py_XDECREF(found);  // None, True, False and dtypes have other references
  return found == wanted;
}

// Return whether a tensor is a contiguous vector of int64 on the CPU.
bool is_plain_vector(PyObject* tensor, PyObject* type, PyObject* int64) {
  static PyObject* const is_cpu = PyUnicode_InternFromString("is_cpu");
  static PyObject* const is_contiguous = PyUnicode_InternFromString("is_contiguous");
  static PyObject* const dim = PyUnicode_InternFromString("dim");
  const Methods& methods = methods_of_tensors();
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != type) return false;
  if (!is_object(PyObject_GetAttr(tensor, methods.dtype), int64)) return false;
  if (!is_object(PyObject_GetAttr(tensor, is_cpu), Py_True)) return false;
  PyObject* dims = PyObject_CallMethodNoArgs(tensor, dim);
  const bool vector = dims && PyLong_AsLong(dims) == 1;
  if (!dims) PyErr_Clear();
  Py_XDECREF(dims);
  return vector && is_object(PyObject_CallMethodNoArgs(tensor, is_contiguous), Py_True);
}

}  // namespace

// tables -> parsed tables. Every call accepts them instead of tuples, as long as their tensors keep their memory.
PyObject* parse_tables_py(PyObject*, PyObject* items) {
  auto* tables = new (std::nothrow) std::vector<Table>;
  if (!tables) return PyErr_NoMemory();
  PyObject* capsule = parse_tables(items, tables) ? PyCapsule_New(tables, kTables, delete_tables) : nullptr;
  if (!capsule) delete tables;
  return capsule;
}

// (numbers of tables, means, keys, first columns, number of keys, width) -> the lookups of a packed input.
PyObject* cache_layout_py(PyObject*, PyObject* args) {
  PyObject *numbers, *means, *keys, *columns;
  long long count, width;
  if (!PyArg_ParseTuple(args, "O!O!O!O!LL", &PyTuple_Type, &numbers, &PyTuple_Type, &means, &PyTuple_Type, &keys,
                        &PyTuple_Type, &columns, &count, &width))
    return nullptr;
  const Py_ssize_t size = PyTuple_GET_SIZE(numbers);
  bool good = PyTuple_GET_SIZE(means) == size && PyTuple_GET_SIZE(keys) == size && PyTuple_GET_SIZE(columns) == size;
  PackedLayout* layout = new (std::nothrow) PackedLayout{{}, count, width};
  if (!layout) return PyErr_NoMemory();
  for (Py_ssize_t i = 0; good && i < size; ++i) {
    const long long table = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, i));
    const long long key = PyLong_AsLongLong(PyTuple_GET_ITEM(keys, i));
    const long long column = PyLong_AsLongLong(PyTuple_GET_ITEM(columns, i));
    good = table >= 0 && key >= 0 && key < count && column >= 0 && column < width;
    layout->lookups.push_back({table, key, column, PyObject_IsTrue(PyTuple_GET_ITEM(means, i)) == 1});
  }
  PyObject* capsule = good ? PyCapsule_New(layout, kLayout, delete_layout) : nullptr;
  if (!capsule) delete layout;
  if (!good && !PyErr_Occurred())
    PyErr_SetString(PyExc_ValueError, "a lookup needs a table, a key of the input, and columns of the output");
  return capsule;
}

// (features, names, classes of a feature, class of a tensor, torch.int64) -> for each name (values, offsets,
// None) if it is a tuple of two contiguous int64 vectors, else None: Python then parses the feature.
PyObject* simple_bags_py(PyObject*, PyObject* args) {
  PyObject *features, *names, *classes, *type, *int64;
  if (!PyArg_ParseTuple(args, "O!O!O!OO", &PyDict_Type, &features, &PyList_Type, &names, &PyTuple_Type,
                        &classes, &type, &int64))
    return nullptr;
  PyObject* result = PyList_New(PyList_GET_SIZE(names));
  for (Py_ssize_t i = 0; result && i < PyList_GET_SIZE(names); ++i) {
    PyObject* given = PyDict_GetItemWithError(features, PyList_GET_ITEM(names, i));
    bool plain = given && PyTuple_Check(given) && PyTuple_GET_SIZE(given) >= 2;
    bool known = false;
    for (Py_ssize_t c = 0; plain && c < PyTuple_GET_SIZE(classes); ++c)
      known |= reinterpret_cast<PyObject*>(Py_TYPE(given)) == PyTuple_GET_ITEM(classes, c);
    const Py_ssize_t parts = plain ? PyTuple_GET_SIZE(given) : 0;
    plain = plain && known && (parts == 2 || (parts == 3 && PyTuple_GET_ITEM(given, 2) == Py_None)) &&
            is_plain_vector(PyTuple_GET_ITEM(given, 0), type, int64) &&
            is_plain_vector(PyTuple_GET_ITEM(given, 1), type, int64);
    PyObject* item = nullptr;
    if (plain) {
      item = PyTuple_Pack(3, PyTuple_GET_ITEM(given, 0), PyTuple_GET_ITEM(given, 1), Py_None);
    } else if (!PyErr_Occurred()) {
      item = Py_None;
      Py_INCREF(item);
    }
    if (item) {
      PyList_SET_ITEM(result, i, item);
    } else {
      Py_CLEAR(result);
    }
  }
  return result;
}

// ([tensor or None, ...], ...) -> the sum of the version counters, which every change in place increases.
PyObject* versions_py(PyObject*, PyObject* args) {
  static PyObject* const version = PyUnicode_InternFromString("_version");
  long long sum = 0;
  for (Py_ssize_t a = 0; a < PyTuple_GET_SIZE(args); ++a) {
    PyObject* list = PyTuple_GET_ITEM(args, a);
    if (!PyList_Check(list)) continue;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      PyObject* tensor = PyList_GET_ITEM(list, i);
      if (tensor == Py_None) continue;
      PyObject* number = PyObject_GetAttr(tensor, version);
      if (!number) return nullptr;
      sum += PyLong_AsLongLong(number);
      Py_DECREF(number);
    }
  }
  return PyLong_FromLongLong(sum);
}

}  // namespace keyedopt
