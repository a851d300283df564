// The sum of the squares of all elements of many tensors, at the speed of memory.
#pragma once

#include <cstdint>
#include <vector>

#include "machine.h"

namespace keyedopt {

struct Stretch { const float* begin; int64_t count; };

// The result has the same bits for any number of threads and any machine. False if memory ran out.
bool sum_squares(const std::vector<Stretch>& stretches, int threads, Machine machine, double* total);

}  // namespace keyedopt
