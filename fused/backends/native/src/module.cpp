// The Python module: addresses and sizes in, work without the interpreter's lock, errors as exceptions.
//
// A table is (weight, rows, dim, dtype, state0, width0, state1, width1, counter). A lookup is (table, values,
// count, offsets, bags, weights, mean, grad or out, stride). Addresses are integers, 0 for none. Who calls
// has checked that the sizes are those of the memory; what the memory holds is checked here. Where there are
// many small tables, to make these tuples takes longer than the work: tables can be held, and lookups given
// as a tuple of columns.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>

#include "engine.h"

namespace {

using namespace keyedopt;

template <class T>
T* pointer(unsigned long long address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// The items of a list or tuple, each a tuple, by `parse`; false with an exception set.
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

// What a method of a tensor without arguments returns, an address or a size; false with an exception set.
bool ask(PyObject* tensor, PyObject* method, long long* answer) {
  PyObject* number = PyObject_CallMethodNoArgs(tensor, method);
  if (!number) return false;
  *answer = PyLong_AsLongLong(number);
  Py_DECREF(number);
  return *answer != -1 || !PyErr_Occurred();
}

// The names of methods and attributes, made once.
struct Methods {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* zero = PyLong_FromLong(0);
};
const Methods& methods_of_tensors() {
  static const Methods methods;
  return methods;
}

// Tables, and the tensors whose memory they name, as they were then.
struct Held {
  struct Known {
    PyObject *tensor, *dtype;
    long long address, size;
  };
  std::vector<Table> tables;
  std::vector<Known> known;
  ~Held() {
    for (const Known& one : known) {
      Py_DECREF(one.tensor);
      Py_XDECREF(one.dtype);
    }
  }
};
constexpr char kTables[] = "keyedopt.tables";

void delete_tables(PyObject* capsule) {
  delete static_cast<Held*>(PyCapsule_GetPointer(capsule, kTables));
}

// Tables as tuples, or as `hold_tables` has returned them.
bool parse_tables(PyObject* items, std::vector<Table>* tables) {
  if (PyCapsule_CheckExact(items)) {
    const auto* held = static_cast<Held*>(PyCapsule_GetPointer(items, kTables));
    if (held) *tables = held->tables;
    return held != nullptr;
  }
  return each(items, [&](PyObject* item) {
    unsigned long long weight, state0, state1, counter;
    long long rows, dim, width0, width1;
    int dtype;
    if (!PyArg_ParseTuple(item, "KLLiKLKLK", &weight, &rows, &dim, &dtype, &state0, &width0, &state1, &width1,
                          &counter))
      return false;
    if (rows < 0 || dim < 1 || dtype < 0 || dtype > 2) {
      PyErr_SetString(PyExc_ValueError, "a table needs rows, at least one column, and a dtype from 0 to 2");
      return false;
    }
    tables->push_back({pointer<void>(weight),
                       rows,
                       dim,
                       dtype,
                       {pointer<float>(state0), pointer<float>(state1)},
                       {width0, width1},
                       pointer<int64_t>(counter),
                       static_cast<int64_t>(tables->size())});
    return true;
  });
}

bool parse_columns(PyObject* columns, const std::vector<Table>& tables, std::vector<Lookup>* lookups);

// Lookups as a list of tuples, or as a tuple of columns.
bool parse_lookups(PyObject* items, const std::vector<Table>& tables, std::vector<Lookup>* lookups) {
  if (PyTuple_CheckExact(items)) return parse_columns(items, tables, lookups);
  return each(items, [&](PyObject* item) {
    unsigned long long values, offsets, weights, rows;
    long long table, count, bags, stride;
    int mean;
    if (!PyArg_ParseTuple(item, "LKLKLKpKL", &table, &values, &count, &offsets, &bags, &weights, &mean, &rows,
                          &stride))
      return false;
    if (table < 0 || static_cast<size_t>(table) >= tables.size() || count < 0 || bags < 0 || bags > 0xffffffffLL ||
        (!offsets && bags != count)) {
      PyErr_SetString(PyExc_ValueError,
                      "a lookup is of a table of the call, and of as many values as it says");
      return false;
    }
    lookups->push_back({table, pointer<const int64_t>(values), count, pointer<const int64_t>(offsets), bags,
                        pointer<const float>(weights), mean != 0, pointer<const float>(rows), stride,
                        pointer<float>(rows)});
    return true;
  });
}

// The sequences of one call, each as long as the first.
class Sequences {
 public:
  ~Sequences() {
    for (PyObject* one : held_) Py_DECREF(one);
  }
  // Items of a list or tuple, or null for None; `good` is false, with an exception set, if it is too short.
  PyObject** items(PyObject* object, bool* good) {
    if (object == Py_None || !*good) return nullptr;
    PyObject* sequence = PySequence_Fast(object, "a list or tuple is needed");
    *good = sequence != nullptr;
    if (!sequence) return nullptr;
    held_.push_back(sequence);
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    if (held_.size() == 1) count_ = count;
    *good = count == count_;
    if (!*good) PyErr_SetString(PyExc_ValueError, "columns of lookups are of one length");
    return PySequence_Fast_ITEMS(sequence);
  }
  Py_ssize_t count() const { return count_; }

 private:
  std::vector<PyObject*> held_;
  Py_ssize_t count_ = 0;
};

// Lookups as columns: (numbers of tables, values, offsets or None, weights or None, means, outputs or
// gradients). What these tensors are was checked by who calls, but for their sizes.
bool parse_columns(PyObject* columns, const std::vector<Table>& tables, std::vector<Lookup>* lookups) {
  PyObject *numbers, *values, *offsets, *weights, *means, *rows;
  if (!PyArg_ParseTuple(columns, "OOOOOO", &numbers, &values, &offsets, &weights, &means, &rows))
    return false;
  const Methods& methods = methods_of_tensors();
  Sequences sequences;
  bool good = true;
  PyObject** number = sequences.items(numbers, &good);
  PyObject** value = sequences.items(values, &good);
  PyObject** offset = sequences.items(offsets, &good);
  PyObject** weight = sequences.items(weights, &good);
  PyObject** mean = sequences.items(means, &good);
  PyObject** row = sequences.items(rows, &good);
  if (!good) return false;
  if (!number || !value || !mean || !row) {
    PyErr_SetString(PyExc_TypeError, "only offsets and weights may be None");
    return false;
  }
  lookups->reserve(static_cast<size_t>(sequences.count()));
  for (Py_ssize_t i = 0; i < sequences.count(); ++i) {
    const long long table = PyLong_AsLongLong(number[i]);
    if (table == -1 && PyErr_Occurred()) return false;
    long long at = 0, count = 0, begin = 0, bags = 0, factors = 0, numbers_given = 0, row_at = 0, stride = 0;
    if (!ask(value[i], methods.data_ptr, &at) || !ask(value[i], methods.numel, &count)) return false;
    bags = count;
    if (offset) {
      if (!ask(offset[i], methods.data_ptr, &begin) || !ask(offset[i], methods.numel, &bags)) return false;
      --bags;
    }
    if (weight && weight[i] != Py_None) {
      if (!ask(weight[i], methods.data_ptr, &factors) || !ask(weight[i], methods.numel, &numbers_given))
        return false;
      if (numbers_given != count) bags = -1;
    }
    if (!ask(row[i], methods.data_ptr, &row_at) || !ask(row[i], methods.numel, &numbers_given)) return false;
    PyObject* step = PyObject_CallMethodOneArg(row[i], methods.stride, methods.zero);
    if (!step) return false;
    stride = PyLong_AsLongLong(step);
    Py_DECREF(step);
    if (table < 0 || static_cast<size_t>(table) >= tables.size() || bags < 0 || bags > 0xffffffffLL ||
        numbers_given != bags * tables[static_cast<size_t>(table)].dim) {
      PyErr_Format(PyExc_ValueError,
                   "lookup %zd must be of a table of the call, with an offset more than it has bags, "
                   "a weight for each value and a row for each bag",
                   i);
      return false;
    }
    lookups->push_back({table, pointer<const int64_t>(static_cast<unsigned long long>(at)), count,
                        offset ? pointer<const int64_t>(static_cast<unsigned long long>(begin)) : nullptr,
                        bags, pointer<const float>(static_cast<unsigned long long>(factors)),
                        PyObject_IsTrue(mean[i]) == 1,
                        pointer<const float>(static_cast<unsigned long long>(row_at)), stride,
                        pointer<float>(static_cast<unsigned long long>(row_at))});
  }
  return true;
}

bool parse_rule(PyObject* item, const std::vector<Table>& tables, Rule* rule) {
  double lr, rate, eps, sign, weight_decay, momentum, dampening, eta, beta1, beta2, max_norm, count;
  int nesterov, first, before, stochastic;
  unsigned long long seed;
  if (!PyTuple_Check(item)) {
    PyErr_SetString(PyExc_TypeError, "a rule is a tuple");
    return false;
  }
  if (!PyArg_ParseTuple(item, "iippppddddddddddddK", &rule->algorithm, &rule->decay, &nesterov, &first,
                        &before, &stochastic, &lr, &rate, &eps, &sign, &weight_decay, &momentum, &dampening,
                        &eta, &beta1, &beta2, &max_norm, &count, &seed))
    return false;
  if (rule->algorithm < 0 || rule->algorithm >= kAlgorithms || rule->decay < kNoDecay ||
      rule->decay > kDecoupled) {
    PyErr_SetString(PyExc_ValueError, "no such algorithm or decay");
    return false;
  }
  const int needed =
      rule->algorithm == kSgd                                                                         ? 0
      : rule->algorithm == kAdagrad || rule->algorithm == kRowwiseAdagrad || rule->algorithm == kLars ? 1
                                                                                                      : 2;
  for (const Table& table : tables)
    for (int i = 0; i < needed; ++i)
      if (table.rows && !table.state[i]) {  // memory of no bytes may be nowhere
        PyErr_SetString(PyExc_ValueError, "a table has too few states for the algorithm");
        return false;
      }
  rule->nesterov = nesterov;
  rule->first = first;
  rule->before_correction = before;
  rule->stochastic = stochastic;
  rule->lr = static_cast<float>(lr);
  rule->rate = static_cast<float>(rate);
  rule->eps = static_cast<float>(eps);
  rule->sign = static_cast<float>(sign);
  rule->weight_decay = static_cast<float>(weight_decay);
  rule->momentum = static_cast<float>(momentum);
  rule->undamped = static_cast<float>(1.0 - dampening);
  rule->eta = static_cast<float>(eta);
  split(beta1, &rule->beta1, &rule->low1);
  rule->rest1 = static_cast<float>(1.0 - beta1);
  split(beta2, &rule->beta2, &rule->low2);
  split(1.0 - beta2, &rule->rest2, &rule->rest_low2);
  rule->exact_beta1 = beta1;
  rule->exact_beta2 = beta2;
  rule->max_norm = static_cast<float>(max_norm);
  rule->seed = seed;
  correct(*rule, count, &rule->gain, &rule->spread);
  return true;
}

bool parse_run(int threads, const char* name, Run* run) {
  run->kernels = kernels_named(name);
  run->threads = threads < 1 ? 1 : threads > 1024 ? 1024 : threads;
  if (!run->kernels)
    PyErr_Format(PyExc_ValueError, "no kernels for %s on this machine or in this build", name);
  return run->kernels != nullptr;
}

// Do it without the lock; what went wrong becomes an exception.
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

// (tables, [tensor, ...]) -> what may stand for the tables in all calls, as long as `are_current` says so
PyObject* hold_tables_py(PyObject*, PyObject* args) {
  PyObject *items, *tensors;
  if (!PyArg_ParseTuple(args, "OO!", &items, &PyList_Type, &tensors)) return nullptr;
  Held* held = new (std::nothrow) Held;
  if (!held) return PyErr_NoMemory();
  const Methods& methods = methods_of_tensors();
  bool good = parse_tables(items, &held->tables);
  for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* tensor = PyList_GET_ITEM(tensors, i);
    Py_INCREF(tensor);
    held->known.push_back({tensor, PyObject_GetAttr(tensor, methods.dtype), 0, 0});
    Held::Known& one = held->known.back();
    good = one.dtype && ask(tensor, methods.data_ptr, &one.address) && ask(tensor, methods.numel, &one.size);
  }
  PyObject* capsule = good ? PyCapsule_New(held, kTables, delete_tables) : nullptr;
  if (!capsule) delete held;
  return capsule;
}

// Whether the tensors of what `hold_tables` has returned have the memory that they had.
PyObject* are_current_py(PyObject*, PyObject* capsule) {
  const auto* held = static_cast<Held*>(PyCapsule_GetPointer(capsule, kTables));
  if (!held) return nullptr;
  const Methods& methods = methods_of_tensors();
  for (const Held::Known& one : held->known) {
    long long address, size;
    if (!ask(one.tensor, methods.data_ptr, &address) || !ask(one.tensor, methods.numel, &size)) return nullptr;
    PyObject* dtype = PyObject_GetAttr(one.tensor, methods.dtype);
    Py_XDECREF(dtype);  // which torch holds
    if (!dtype) return nullptr;
    if (address != one.address || size != one.size || dtype != one.dtype) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
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

// (capsule, [(rows, grads), ...], threads, name): write what was sorted, summed.
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

// Whether a method without arguments, or an attribute, is this object; an error is a no.
bool is_object(PyObject* found, PyObject* wanted) {
  if (!found) PyErr_Clear();
  Py_XDECREF(found);  // None, True, False and dtypes are held elsewhere
  return found == wanted;
}

// A vector of int64 on the CPU, without strides.
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

// (features, names, classes of a feature, class of a tensor, torch.int64) -> for each name (values, offsets,
// None) if it is a tuple of two plain vectors, or None, so that somebody looks at it.
PyObject* plain_bags_py(PyObject*, PyObject* args) {
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

// ([tensor or None, ...], ...) -> how often all of them together were changed in place
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

PyMethodDef methods[] = {
    {"versions", versions_py, METH_VARARGS,
     "versions([tensor or None, ...], ...) -> how often they were changed in place, together"},
    {"plain_bags", plain_bags_py, METH_VARARGS,
     "plain_bags(features, names, classes, tensor_class, int64) -> [(values, offsets, None) or None]"},
    {"hold_tables", hold_tables_py, METH_VARARGS,
     "hold_tables(tables, tensors) -> what may stand for the tables in all calls"},
    {"are_current", are_current_py, METH_O, "are_current(held) -> whether the tensors are where they were"},
    {"look_up", look_up_py, METH_VARARGS, "look_up(tables, lookups, threads, instruction_set)"},
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
