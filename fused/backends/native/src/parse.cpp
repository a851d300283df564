#include "parse.h"

#include "storage.h"

namespace keyedopt {

bool parse_tables(PyObject* items, std::vector<Table>* tables) {
  if (PyCapsule_CheckExact(items)) {
    const auto* parsed = static_cast<std::vector<Table>*>(PyCapsule_GetPointer(items, kTables));
    if (parsed) *tables = *parsed;
    return parsed != nullptr;
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

namespace {

// The sequences of one call, all of the same length.
class Sequences {
 public:
  ~Sequences() {
    for (PyObject* one : held_) Py_DECREF(one);
  }
  // Return the items of a list or tuple, or null for None. If it is too short, `good` is false with an exception set.
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

// Parse lookups given as columns: (numbers of tables, values, offsets or None, weights or None, means, outputs or
// gradients). The caller has checked dtypes, devices and strides of these tensors; sizes are checked here.
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
    PyObject* const factors_of = weight && weight[i] != Py_None ? weight[i] : nullptr;
    if (factors_of) {
      if (!ask(weight[i], methods.data_ptr, &factors) || !ask(weight[i], methods.numel, &numbers_given))
        return false;
      if (numbers_given != count) bags = -1;
    }
    if (!ask(row[i], methods.data_ptr, &row_at) || !ask(row[i], methods.numel, &numbers_given)) return false;
    PyObject* step = PyObject_CallMethodOneArg(row[i], methods.stride, methods.zero);
    if (!step) return false;
    stride = PyLong_AsLongLong(step);
    Py_DECREF(step);
    if (!has_memory(value[i], static_cast<unsigned long long>(at)) ||
        (offset && !has_memory(offset[i], static_cast<unsigned long long>(begin))) ||
        (factors_of && !has_memory(factors_of, static_cast<unsigned long long>(factors))) ||
        !has_memory(row[i], static_cast<unsigned long long>(row_at))) {
      PyErr_Format(PyExc_RuntimeError, "the memory of the input or output of lookup %zd has been freed", i);
      return false;
    }
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

// Read the address and the number of elements of a tensor; raise RuntimeError if its memory has been freed.
bool ask_memory(PyObject* tensor, const char* what, long long* address, long long* count) {
  const Methods& methods = methods_of_tensors();
  if (!ask(tensor, methods.data_ptr, address) || !ask(tensor, methods.numel, count)) return false;
  if (has_memory(tensor, static_cast<unsigned long long>(*address))) return true;
  PyErr_Format(PyExc_RuntimeError, "the memory of the %s of a packed input has been freed", what);
  return false;
}

// Parse lookups given as a packed input. The caller has checked dtypes, devices and strides; sizes, and where the values
// of each key begin and end, are checked here.
bool parse_packed(PyObject* packed, const std::vector<Table>& tables, std::vector<Lookup>* lookups) {
  PyObject *capsule, *values, *offsets, *weights, *joined;
  long long bags;
  if (!PyArg_ParseTuple(packed, "OOOOLO", &capsule, &values, &offsets, &weights, &bags, &joined)) return false;
  const auto* layout = static_cast<const PackedLayout*>(PyCapsule_GetPointer(capsule, kLayout));
  if (!layout) return false;
  long long at, count, edges_at, edges, factors = 0, factor_count, joined_at, elements, stride = 0;
  if (!ask_memory(values, "values", &at, &count) || !ask_memory(offsets, "offsets", &edges_at, &edges) ||
      !ask_memory(joined, "output", &joined_at, &elements))
    return false;
  if (weights == Py_None) {
    factor_count = count;
  } else if (!ask_memory(weights, "weights", &factors, &factor_count)) {
    return false;
  }
  PyObject* step = PyObject_CallMethodOneArg(joined, methods_of_tensors().stride, methods_of_tensors().zero);
  if (!step) return false;
  stride = PyLong_AsLongLong(step);
  Py_DECREF(step);
  const auto* begins = pointer<const int64_t>(static_cast<unsigned long long>(edges_at));
  if (bags < 1 || bags > 0xffffffffLL || edges != layout->keys * bags + 1 || factor_count != count ||
      elements != bags * layout->width || begins[0] != 0 || begins[edges - 1] != count) {
    PyErr_SetString(PyExc_ValueError,
                    "a packed input must have one offset more than all keys have bags, from 0 to the number of "
                    "values, a weight for each value, and a joined row for each bag");
    return false;
  }
  lookups->reserve(layout->lookups.size());
  for (const PackedLayout::One& one : layout->lookups) {
    const int64_t* own = begins + one.key * bags;
    if (one.table >= static_cast<int64_t>(tables.size()) || own[0] < 0 || own[0] > own[bags] || own[bags] > count ||
        one.column + tables[static_cast<size_t>(one.table)].dim > layout->width) {
      PyErr_Format(PyExc_ValueError, "the offsets of key %lld must not fall, and its output must fit in the columns",
                   static_cast<long long>(one.key));
      return false;
    }
    float* row = pointer<float>(static_cast<unsigned long long>(joined_at)) + one.column;
    lookups->push_back({one.table, pointer<const int64_t>(static_cast<unsigned long long>(at)), own[bags] - own[0], own,
                        bags, pointer<const float>(static_cast<unsigned long long>(factors)), one.mean, row, stride,
                        row, own[0]});
  }
  return true;
}

}  // namespace

bool parse_lookups(PyObject* items, const std::vector<Table>& tables, std::vector<Lookup>* lookups) {
  if (PyTuple_CheckExact(items)) {
    const bool packed = PyTuple_GET_SIZE(items) && PyCapsule_CheckExact(PyTuple_GET_ITEM(items, 0));
    return (packed ? parse_packed : parse_columns)(items, tables, lookups);
  }
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

bool parse_rule(PyObject* item, const std::vector<Table>& tables, Rule* rule) {
  double lr, rate, eps, sign, weight_decay, momentum, dampening, eta, beta1, beta2, max_norm, count;
  double l1, l2, l2_shrinkage, beta;
  int nesterov, first, before, stochastic;
  unsigned long long seed;
  if (!PyTuple_Check(item)) {
    PyErr_SetString(PyExc_TypeError, "a rule is a tuple");
    return false;
  }
  if (!PyArg_ParseTuple(item, "iippppddddddddddddddddK", &rule->algorithm, &rule->decay, &nesterov, &first,
                        &before, &stochastic, &lr, &rate, &eps, &sign, &weight_decay, &momentum, &dampening,
                        &eta, &beta1, &beta2, &max_norm, &count, &l1, &l2, &l2_shrinkage, &beta, &seed))
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
      if (table.rows && !table.state[i]) {  // an empty tensor may have a null address
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
  rule->l1 = static_cast<float>(l1);
  rule->ridge = static_cast<float>(beta / lr + 2.0 * l2);
  rule->shrinkage = static_cast<float>(2.0 * l2_shrinkage);
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

}  // namespace keyedopt
