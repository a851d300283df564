#include "engine.h"

#include <mutex>

#include "sorted.h"

namespace keyedopt {
namespace {

constexpr int64_t kCheckEach = 32768;       // lookups that one task checks
constexpr int64_t kWorthThreads = 1 << 16;  // fewer floats are read faster by one thread
constexpr int64_t kKeep = 16 << 20;         // largest buffer, in bytes, that a thread keeps between calls
const char kNoMemory[] = "out of memory";

int64_t size_of_work(const std::vector<Table>& tables, const std::vector<Lookup>& lookups) {
  int64_t work = 0;
  for (const Lookup& lookup : lookups) work += lookup.count * tables[static_cast<size_t>(lookup.table)].dim;
  return work;
}

// The error of the first task that failed, in the order of the tasks: the same for any number of threads.
class First {
 public:
  void refuse(int64_t task, const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (task_ >= 0 && task_ <= task) return;
    task_ = task;
    text_ = text;
  }
  const std::string& text() const { return text_; }

 private:
  std::mutex mutex_;
  int64_t task_ = -1;
  std::string text_;
};

std::string not_a_row(const char* of, int64_t number, int64_t value, int64_t rows) {
  return std::string(of) + " " + std::to_string(number) + " must be row numbers from 0 to " +
         std::to_string(rows - 1) + ", and " + std::to_string(value) + " is not";
}

std::string check_offsets(int64_t number, const Lookup& lookup) {
  const std::string name = "offsets of lookup " + std::to_string(number);
  const int64_t* offsets = lookup.offsets;
  if (offsets[0] != lookup.first || offsets[lookup.bags] != lookup.first + lookup.count)
    return name + " must go from 0 to the number of values, " + std::to_string(lookup.count);
  bool falling = false;
  for (int64_t b = 0; b < lookup.bags; ++b) falling |= offsets[b] > offsets[b + 1];
  return falling ? name + " must not fall" : "";
}

// Check before the first write that no lookup is outside its table.
Refusal check(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const Run& run) {
  std::vector<int64_t> begins(1, 0);
  for (const Lookup& lookup : lookups) begins.push_back(begins.back() + lookup.count / kCheckEach + 1);
  First first;
  const bool done = parallel(run.threads, begins.back(), [&](int64_t task) {
    const size_t l =
        static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), task) - begins.begin() - 1);
    const Lookup& lookup = lookups[l];
    const int64_t begin = (task - begins[l]) * kCheckEach, end = std::min(lookup.count, begin + kCheckEach);
    if (begin == 0 && lookup.offsets) {
      const std::string wrong = check_offsets(static_cast<int64_t>(l), lookup);
      if (!wrong.empty()) {
        first.refuse(task, wrong);
        return;
      }
    }
    const int64_t rows = tables[static_cast<size_t>(lookup.table)].rows;
    const int64_t* values = lookup.values + lookup.first;
    const int64_t bad = run.kernels->outside(values, begin, end, rows);
    if (bad < end) first.refuse(task, not_a_row("values of lookup", static_cast<int64_t>(l), values[bad], rows));
  });
  return done ? first.text() : kNoMemory;
}

// Return whether all threads should share this table; otherwise each thread works on a table of its own.
bool shared(const Group& group, int64_t all, int threads) {
  return threads > 1 && group.count >= 4096 && group.count * 2 * threads > all;
}

Sorted& kept_sorted() {
  thread_local Sorted sorted;
  return sorted;
}

}  // namespace

const Kernels* kernels_named(const std::string& name) {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  const bool two =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool five = two && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  const bool two = false, five = false;
#endif
  if (five && (name.empty() || name == "avx512")) return kernels_avx512();
  if (two && (name.empty() || name == "avx2")) return kernels_avx2();
  return name.empty() || name == "plain" ? kernels_plain() : nullptr;
}

Refusal look_up(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const Run& asked) {
  Run run = asked;
  if (size_of_work(tables, lookups) < kWorthThreads) run.threads = 1;
  const Refusal refusal = check(tables, lookups, run);
  if (!refusal.empty()) return refusal;
  const int64_t each = 256;
  std::vector<int64_t> begins(1, 0);
  for (const Lookup& lookup : lookups) begins.push_back(begins.back() + (lookup.bags + each - 1) / each);
  const bool done = parallel(run.threads, begins.back(), [&](int64_t task) {
    const size_t l =
        static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), task) - begins.begin() - 1);
    const int64_t begin = (task - begins[l]) * each;
    const Table& table = tables[static_cast<size_t>(lookups[l].table)];
    run.kernels->look_up(table, lookups[l], begin, std::min(lookups[l].bags, begin + each),
                         scratch_for(table.dim));
  });
  return done ? "" : kNoMemory;
}

Refusal update(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const Rule& rule,
               const Run& asked) {
  Run run = asked;
  if (size_of_work(tables, lookups) < kWorthThreads) run.threads = 1;
  const Refusal refusal = check(tables, lookups, run);
  if (!refusal.empty()) return refusal;
  const std::vector<Group> groups = group_by_table(tables, lookups);
  int64_t all = 0;
  for (const Group& group : groups) all += group.count;
  const auto job_of = [&](const Group& group) {
    return Job{group.table, &rule,  update_of(*run.kernels, rule, *group.table), nullptr, 64, 0, false,
               nullptr,     nullptr};
  };
  std::vector<const Group*> alone;
  for (const Group& group : groups) {
    if (!shared(group, all, run.threads)) {
      alone.push_back(&group);
      continue;
    }
    Sorted sorted;
    sorted.sort(group, run.threads);
    sorted.cut(8 * run.threads);
    const bool done = parallel(run.threads, sorted.parts(),
                               [&](int64_t part) { sorted.run(*run.kernels, job_of(group), part, true); });
    if (!done || !sorted.finish(*run.kernels, job_of(group), run.threads)) return kNoMemory;
  }
  // Largest table first. Among equal tables the last: the forward pass may have left it in the caches.
  std::reverse(alone.begin(), alone.end());
  std::stable_sort(alone.begin(), alone.end(),
                   [](const Group* a, const Group* b) { return a->count > b->count; });
  const bool done = parallel(run.threads, static_cast<int64_t>(alone.size()), [&](int64_t i) {
    const Group& group = *alone[static_cast<size_t>(i)];
    Sorted& sorted = kept_sorted();
    sorted.sort(group, 1);
    sorted.cut(1);
    sorted.run(*run.kernels, job_of(group), 0, false);
    if (sorted.bytes() > kKeep) sorted.drop();
  });
  return done ? "" : kNoMemory;
}

Refusal update_rows(const std::vector<Table>& tables, const std::vector<Summed>& gradients, const Rule& rule,
                    const Run& asked) {
  Run run = asked;
  int64_t work = 0, number = 0;
  for (const Summed& summed : gradients) {
    const Table& table = tables[static_cast<size_t>(summed.table)];
    work += summed.count * table.dim;
    const int64_t bad = run.kernels->outside(summed.rows, 0, summed.count, table.rows);
    if (bad < summed.count) return not_a_row("rows of gradient", number, summed.rows[bad], table.rows);
    bool falling = false;
    for (int64_t i = 1; i < summed.count; ++i) falling |= summed.rows[i] <= summed.rows[i - 1];
    if (falling) return "rows of gradient " + std::to_string(number) + " must be distinct, and ascend";
    ++number;
  }
  if (work < kWorthThreads) run.threads = 1;
  const int64_t each = 512;
  std::vector<int64_t> begins(1, 0);
  for (const Summed& summed : gradients) begins.push_back(begins.back() + (summed.count + each - 1) / each);
  const bool done = parallel(run.threads, begins.back(), [&](int64_t task) {
    const size_t g =
        static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), task) - begins.begin() - 1);
    const Summed& summed = gradients[g];
    const Table& table = tables[static_cast<size_t>(summed.table)];
    const int64_t begin = (task - begins[g]) * each;
    run.kernels->update_rows(rule, table, update_of(*run.kernels, rule, table), summed.rows, summed.grads,
                             summed.stride, begin, std::min(summed.count, begin + each),
                             scratch_for(table.dim));
  });
  return done ? "" : kNoMemory;
}

Coalescing::Coalescing() = default;
Coalescing::~Coalescing() {
  for (Sorted* one : sorted) delete one;
}

Refusal sort_lookups(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const Run& asked,
                     Coalescing* result) {
  Run run = asked;
  if (size_of_work(tables, lookups) < kWorthThreads) run.threads = 1;
  const Refusal refusal = check(tables, lookups, run);
  if (!refusal.empty()) return refusal;
  for (const Group& group : group_by_table(tables, lookups)) {
    std::unique_ptr<Sorted> sorted(new Sorted);
    const int threads = group.count >= 4096 ? run.threads : 1;
    sorted->sort(group, threads);
    sorted->drop_spare();
    sorted->cut(threads > 1 ? 8 * threads : 1);
    parallel(threads, sorted->parts(), [&](int64_t part) { sorted->count_distinct(part); });
    result->tables.push_back(group.table - tables.data());
    result->distinct.push_back(sorted->number_rows());
    result->sorted.push_back(sorted.release());
  }
  return "";
}

Refusal sum_lookups(const Coalescing& coalescing, const std::vector<int64_t*>& rows,
                    const std::vector<float*>& grads, const Run& run) {
  for (size_t i = 0; i < coalescing.sorted.size(); ++i) {
    Sorted& sorted = *coalescing.sorted[i];
    const Job job{sorted.table(), nullptr, nullptr, nullptr, 64, 0, false, rows[i], grads[i]};
    const bool share = run.threads > 1 && sorted.parts() > 1;
    const bool done = parallel(run.threads, sorted.parts(),
                               [&](int64_t part) { sorted.run(*run.kernels, job, part, share); });
    if (!done || !sorted.finish(*run.kernels, job, run.threads)) return kNoMemory;
  }
  return "";
}

}  // namespace keyedopt
