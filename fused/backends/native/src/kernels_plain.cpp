// The kernels for any machine.
#include "kernels.h"
#include "rounding.h"

namespace keyedopt {
namespace {
#include "vec_plain.h"
#include "rules.h"
#include "sums.h"
#include "batches.h"
#include "segments.h"
}  // namespace

const Kernels* kernels_plain() { return &kernels; }
}  // namespace keyedopt
