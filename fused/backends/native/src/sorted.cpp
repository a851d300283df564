#include "sorted.h"

namespace keyedopt {
namespace {

struct ThreadMemory {
  Buffer rows, sums;
  Scratch scratch;
};

// Return whether the gradients of the values of a bag differ: the lookups are weighted and pooled.
bool by_value(const Lookup& lookup) { return lookup.weights && lookup.offsets; }

}  // namespace

Scratch& scratch_for(int64_t dim) {
  thread_local ThreadMemory memory;
  const int64_t row = padded(dim);
  const int64_t some = together(dim) * row;
  float* rows = memory.rows.array<float>(some + 3 * row + 16);
  rows += (64 - reinterpret_cast<uintptr_t>(rows) % 64) % 64 / sizeof(float);  // one cache line per vector
  memory.scratch.sums = rows;
  memory.scratch.sum = rows + some;
  memory.scratch.work = memory.scratch.sum + row;
  memory.scratch.leaf = memory.scratch.work + row;
  memory.scratch.blocks = memory.sums.array<double>(2 * row);
  memory.scratch.chunks = memory.scratch.blocks + row;
  return memory.scratch;
}

std::vector<Group> group_by_table(const std::vector<Table>& tables, const std::vector<Lookup>& lookups) {
  std::vector<Group> by_table(tables.size());
  for (const Lookup& lookup : lookups) {
    Group& group = by_table[static_cast<size_t>(lookup.table)];
    group.lookups.push_back(&lookup);
    group.count += lookup.count;
    group.bags += lookup.bags;
    group.scaled |= lookup.weights != nullptr || (lookup.mean && lookup.offsets);
  }
  std::vector<Group> groups;
  for (size_t t = 0; t < tables.size(); ++t) {
    Group& group = by_table[t];
    if (!group.count) continue;
    group.table = &tables[t];
    group.bits = bits_for(static_cast<uint64_t>(tables[t].rows - 1));
    int64_t largest = 0;
    for (const Lookup* lookup : group.lookups)
      largest = std::max(largest, by_value(*lookup) ? lookup->count : lookup->bags);
    const int numbers = bits_for(static_cast<uint64_t>(largest));
    const int places = numbers + bits_for(group.lookups.size() - 1);
    group.wide = group.bits > 32 || places > 32;
    group.shift = group.lookups.size() == 1 ? 64 : numbers;
    groups.push_back(std::move(group));
  }
  return groups;
}

void Sorted::make_sources(const Group& group) {
  int64_t bytes = 0;
  for (const Lookup* lookup : group.lookups) {
    if (by_value(*lookup)) bytes += lookup->count * 4;
    if (lookup->mean && lookup->offsets) bytes += (lookup->weights ? lookup->count : lookup->bags) * 4;
  }
  char* extra = static_cast<char*>(extra_.get(bytes));
  sources_.clear();
  for (const Lookup* lookup : group.lookups) {
    Source source{lookup->grad, lookup->stride, nullptr,
                  lookup->weights ? lookup->weights + lookup->first : nullptr};
    if (by_value(*lookup)) {
      source.row = reinterpret_cast<uint32_t*>(extra);
      extra += lookup->count * 4;
    }
    if (lookup->mean && lookup->offsets) {
      source.scale = reinterpret_cast<float*>(extra);
      extra += (lookup->weights ? lookup->count : lookup->bags) * 4;
    }
    sources_.push_back(source);
  }
}

// Write the entries of bags [begin, end), each with the number of its bag.
template <class K>
void Sorted::generate(const Lookup& lookup, int64_t number, Entry<K>* entries, int64_t begin,
                      int64_t end) const {
  const Source& source = sources_[static_cast<size_t>(number)];
  const uint64_t high = shift_ < 64 ? static_cast<uint64_t>(number) << shift_ : 0;
  const int64_t* values = lookup.values + lookup.first;
  if (!lookup.offsets) {
    for (int64_t i = begin; i < end; ++i)
      entries[i] = {static_cast<K>(values[i]), static_cast<K>(high | static_cast<uint64_t>(i))};
    return;
  }
  uint32_t* row = const_cast<uint32_t*>(source.row);
  float* scale = lookup.mean ? const_cast<float*>(source.scale) : nullptr;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t from = lookup.offsets[b] - lookup.first, to = lookup.offsets[b + 1] - lookup.first;
    const float share = 1.0f / static_cast<float>(to - from > 0 ? to - from : 1);
    if (!row) {
      for (int64_t i = from; i < to; ++i)
        entries[i] = {static_cast<K>(values[i]), static_cast<K>(high | static_cast<uint64_t>(b))};
      if (scale) scale[b] = share;
      continue;
    }
    for (int64_t i = from; i < to; ++i) {
      entries[i] = {static_cast<K>(values[i]), static_cast<K>(high | static_cast<uint64_t>(i))};
      row[i] = static_cast<uint32_t>(b);
      if (scale) scale[i] = lookup.weights[lookup.first + i] * share;
    }
  }
}

template <class K>
void Sorted::sort_as(const Group& group, int threads) {
  Entry<K>* first = first_.array<Entry<K>>(count_);
  Entry<K>* second = second_.array<Entry<K>>(count_);
  make_sources(group);
  int64_t before = 0, number = 0;
  for (const Lookup* lookup : group.lookups) {
    const int64_t each = threads > 1 ? 1024 : lookup->bags;
    parallel(threads, each ? (lookup->bags + each - 1) / each : 0, [&](int64_t task) {
      generate(*lookup, number, first + before, task * each, std::min(lookup->bags, (task + 1) * each));
    });
    before += lookup->count;
    ++number;
  }
  entries_ = threads > 1 ? sort_entries(first, second, count_, group.bits, threads)
                         : sort_entries(first, second, count_, group.bits);
  if (!entries_) throw std::bad_alloc();
}

void Sorted::sort(const Group& group, int threads) {
  table_ = group.table;
  wide_ = group.wide;
  scaled_ = group.scaled;
  shift_ = group.shift;
  count_ = group.count;
  bags_ = group.bags;
  if (wide_) {
    sort_as<uint64_t>(group, threads);
  } else {
    sort_as<uint32_t>(group, threads);
  }
}

template <class K>
void Sorted::cut_as(int64_t parts) {
  const Entry<K>* entries = static_cast<const Entry<K>*>(entries_);
  for (int64_t part = 1; part < parts; ++part) {
    const int64_t at = std::max(count_ / parts * part, cuts_.back());
    if (at == 0 || at >= count_) continue;
    const K before = entries[at - 1].key;
    const auto other = std::upper_bound(entries + at, entries + count_, before,
                                        [](K key, const Entry<K>& entry) { return key < entry.key; });
    const int64_t begin = other - entries;
    if (begin > cuts_.back() && begin < count_) cuts_.push_back(begin);
  }
  cuts_.push_back(count_);
}

void Sorted::cut(int64_t parts) {
  cuts_.assign(1, 0);
  if (wide_) {
    cut_as<uint64_t>(parts);
  } else {
    cut_as<uint32_t>(parts);
  }
  begins_.assign(cuts_.size(), 0);
  hot_.assign(cuts_.size(), {});
}

Job Sorted::complete(Job job) const {
  job.table = table_;
  job.sources = sources_.data();
  job.shift = shift_;
  job.mask = shift_ < 64 ? (uint64_t{1} << shift_) - 1 : ~uint64_t{0};
  job.scaled = scaled_;
  job.far = bags_ * table_->dim * 4 > kCached;
  return job;
}

void Sorted::run(const Kernels& kernels, Job job, int64_t part, bool share) {
  const size_t p = static_cast<size_t>(part);
  const int64_t begin = cuts_[p], end = cuts_[p + 1];
  std::vector<Hot>& hot = hot_[p];
  if (share) hot.assign(static_cast<size_t>((end - begin) / kHot + 1), Hot{-1, -1, -1});
  job = complete(job);
  Scratch& scratch = scratch_for(table_->dim);
  Hot* leave = share ? hot.data() : nullptr;
  if (wide_) {
    kernels.segment64(job, static_cast<const Entry<uint64_t>*>(entries_), begin, end, begins_[p], scratch,
                      leave);
  } else {
    kernels.segment32(job, static_cast<const Entry<uint32_t>*>(entries_), begin, end, begins_[p], scratch,
                      leave);
  }
}

bool Sorted::finish(const Kernels& kernels, Job job, int threads) {
  std::vector<Hot> runs;
  std::vector<int64_t> begins(1, 0);
  for (const std::vector<Hot>& some : hot_)
    for (const Hot& run : some) {
      if (run.begin < 0) continue;
      runs.push_back(run);
      begins.push_back(begins.back() + (run.end - run.begin + kChunk - 1) / kChunk);
    }
  if (runs.empty()) return true;
  job = complete(job);
  const int64_t dim = table_->dim;
  Buffer memory;
  float* sums = memory.array<float>(begins.back() * dim);
  const auto entry = [&](int64_t i) { return static_cast<char*>(entries_) + i * (wide_ ? 16 : 8); };
  const bool summed = parallel(threads, begins.back(), [&](int64_t chunk) {
    const size_t r =
        static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), chunk) - begins.begin() - 1);
    const int64_t from = runs[r].begin + (chunk - begins[r]) * kChunk;
    const int64_t count = std::min(kChunk, runs[r].end - from);
    Scratch& scratch = scratch_for(dim);
    if (wide_) {
      kernels.chunk64(job, reinterpret_cast<Entry<uint64_t>*>(entry(from)), count, scratch,
                      sums + chunk * dim);
    } else {
      kernels.chunk32(job, reinterpret_cast<Entry<uint32_t>*>(entry(from)), count, scratch,
                      sums + chunk * dim);
    }
  });
  return summed && parallel(threads, static_cast<int64_t>(runs.size()), [&](int64_t i) {
           const size_t r = static_cast<size_t>(i);
           Scratch& scratch = scratch_for(dim);
           float* out = job.rule ? scratch.sum : job.grads + runs[r].out * dim;
           kernels.combine(sums + begins[r] * dim, begins[r + 1] - begins[r], dim, scratch, out);
           const void* at = entry(runs[r].begin);
           const int64_t row = wide_ ? static_cast<int64_t>(static_cast<const Entry<uint64_t>*>(at)->key)
                                     : static_cast<int64_t>(static_cast<const Entry<uint32_t>*>(at)->key);
           if (job.rule) {
             job.update(*job.rule, *table_, {&row, out, 0, 1, nullptr, 0}, scratch.work);
           } else {
             job.rows[runs[r].out] = row;
           }
         });
}

void Sorted::count_distinct(int64_t part) {
  const auto count = [&](const auto* entries) {
    int64_t rows = 1;
    for (int64_t i = cuts_[static_cast<size_t>(part)] + 1; i < cuts_[static_cast<size_t>(part) + 1]; ++i)
      rows += entries[i].key != entries[i - 1].key;
    return rows;
  };
  begins_[static_cast<size_t>(part) + 1] = wide_ ? count(static_cast<const Entry<uint64_t>*>(entries_))
                                                 : count(static_cast<const Entry<uint32_t>*>(entries_));
}

int64_t Sorted::number_rows() {
  for (size_t p = 1; p < begins_.size(); ++p) begins_[p] += begins_[p - 1];
  return begins_.back();
}

void Sorted::drop() {
  first_.drop();
  second_.drop();
  extra_.drop();
}

void Sorted::drop_spare() { (entries_ == first_.get(0) ? second_ : first_).drop(); }

}  // namespace keyedopt
