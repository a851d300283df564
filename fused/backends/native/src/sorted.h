// The lookups of one table, sorted by row, so that kernels can sum and update them.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "engine.h"
#include "sort.h"

namespace keyedopt {

// Memory that grows when needed and is not cleared.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  void* get(int64_t bytes) {
    if (bytes > size_) {
      drop();
      data_ = std::malloc(static_cast<size_t>(bytes));
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }
  template <class T>
  T* array(int64_t count) {
    return static_cast<T*>(get(count * static_cast<int64_t>(sizeof(T))));
  }
  void drop() {
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
  }
  int64_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// The lookups of one table in one call.
struct Group {
  const Table* table;
  std::vector<const Lookup*> lookups;
  int64_t count = 0;  // number of values
  int bits = 0;       // of the largest row number
  int shift = 64;     // lowest bit of the lookup's number in a place; 64 if there is one lookup
  bool wide = false;  // 64-bit entries
  bool scaled = false;
  int64_t bags = 0;  // rows of gradients
};

std::vector<Group> group_by_table(const std::vector<Table>& tables, const std::vector<Lookup>& lookups);

// Return the working memory of this thread for kernels of this width.
Scratch& scratch_for(int64_t dim);

class Sorted {
 public:
  // Sort; on one thread by default. Throws std::bad_alloc.
  void sort(const Group& group, int threads);
  // Cut into parts of whole runs: part p holds the runs that begin in [cuts[p], cuts[p + 1]).
  void cut(int64_t parts);
  int64_t parts() const { return static_cast<int64_t>(cuts_.size()) - 1; }

  // Update the rows of a part, or write the sums to `rows` and `grads` of `job`. With `share`, runs longer than kHot
  // are left to `finish`.
  void run(const Kernels& kernels, Job job, int64_t part, bool share);
  // Sum and update the runs that `run` left, on all threads. False if memory ran out.
  bool finish(const Kernels& kernels, Job job, int threads);

  void count_distinct(int64_t part);
  // Set the output row of each part, after count_distinct of all parts; return the number of distinct rows.
  int64_t number_rows();

  const Table* table() const { return table_; }
  int64_t bytes() const { return first_.size() + second_.size() + extra_.size(); }
  void drop();
  void drop_spare();

 private:
  template <class K>
  void sort_as(const Group& group, int threads);
  template <class K>
  void generate(const Lookup& lookup, int64_t number, Entry<K>* entries, int64_t begin, int64_t end) const;
  void make_sources(const Group& group);
  template <class K>
  void cut_as(int64_t parts);
  Job complete(Job job) const;

  const Table* table_ = nullptr;
  bool wide_ = false, scaled_ = false;
  int shift_ = 64;
  int64_t count_ = 0, bags_ = 0;
  void* entries_ = nullptr;
  Buffer first_, second_, extra_;
  std::vector<Source> sources_;
  std::vector<int64_t> cuts_, begins_;  // begins_[p]: output row where part p begins
  std::vector<std::vector<Hot>> hot_;
};

}  // namespace keyedopt
