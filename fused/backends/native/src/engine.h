// The functions of the module without Python, so that sanitizers can test them alone.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace keyedopt {

// Which kernels, and on how many threads. Results do not depend on the number of threads.
struct Run {
  const Kernels* kernels;
  int threads;
};

// The result of every function: empty, or the reason why nothing was written.
using Refusal = std::string;

// The kernels of an instruction set ("plain", "avx2", "avx512"), or the best for an empty name; null if this
// machine or this build does not have it.
const Kernels* kernels_named(const std::string& name);

Refusal look_up(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const Run& run);
Refusal update(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const Rule& rule,
               const Run& run);

// Summed gradients of a table: distinct rows, ascending.
struct Summed {
  int64_t table;
  int64_t* rows;
  float* grads;
  int64_t count;
  int64_t stride;
};
Refusal update_rows(const std::vector<Table>& tables, const std::vector<Summed>& gradients, const Rule& rule,
                    const Run& run);

// Sorted lookups of one table, between counting its distinct rows and summing their gradients.
class Sorted;
struct Coalescing {
  Coalescing();
  ~Coalescing();
  std::vector<Table> described;   // all of the call; what is sorted points to them
  std::vector<Sorted*> sorted;    // one a table that was looked up
  std::vector<int64_t> tables;    // which
  std::vector<int64_t> distinct;  // how many rows
};
Refusal sort_lookups(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const Run& run,
                     Coalescing* result);
// Write rows (U,) and sums (U, dim) of each table in the order of `result->tables`.
Refusal sum_lookups(const Coalescing& coalescing, const std::vector<int64_t*>& rows,
                    const std::vector<float*>& grads, const Run& run);

}  // namespace keyedopt
