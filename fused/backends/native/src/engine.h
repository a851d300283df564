// The functions of the module without Python, so that sanitizers can test them separately.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace keyedopt {

// The kernels and the number of threads. Results do not depend on the number of threads.
struct Run {
  const Kernels* kernels;
  int threads;
};

// The result of every function: empty, or the reason why the function wrote nothing.
using Refusal = std::string;

// Return the kernels of an instruction set ("plain", "avx2", "avx512"), or the fastest for an empty name; null if
// this machine or this build lacks it.
const Kernels* kernels_named(const std::string& name);

Refusal look_up(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const Run& run);
Refusal update(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const Rule& rule,
               const Run& run);

// Summed gradients of a table: distinct rows in ascending order.
struct Summed {
  int64_t table;
  int64_t* rows;
  float* grads;
  int64_t count;
  int64_t stride;
};
Refusal update_rows(const std::vector<Table>& tables, const std::vector<Summed>& gradients, const Rule& rule,
                    const Run& run);

// Sorted lookups of one call, between counting the distinct rows of each table and summing their gradients.
class Sorted;
struct Coalescing {
  Coalescing();
  ~Coalescing();
  std::vector<Table> described;   // all tables of the call; `sorted` points to them
  std::vector<Sorted*> sorted;    // one for each table with lookups
  std::vector<int64_t> tables;    // their numbers in the call
  std::vector<int64_t> distinct;  // their numbers of distinct rows
};
Refusal sort_lookups(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const Run& run,
                     Coalescing* result);
// Write rows (U,) and sums (U, dim) of each table in the order of `result->tables`.
Refusal sum_lookups(const Coalescing& coalescing, const std::vector<int64_t*>& rows,
                    const std::vector<float*>& grads, const Run& run);

}  // namespace keyedopt
