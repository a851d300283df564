// The kernels for machines with AVX2, FMA and F16C.
#include "kernels.h"
#include "rounding.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// Standard headers are included before the instruction set is switched on: the linker keeps one copy of their inline
// functions for all files, and this copy must run on every machine.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace keyedopt {
namespace {
#include "vec_avx2.h"
#include "rules.h"
#include "sums.h"
#include "batches.h"
#include "segments.h"
}  // namespace
}  // namespace keyedopt

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace keyedopt {
const Kernels* kernels_avx2() { return &kernels; }
}  // namespace keyedopt
#else
namespace keyedopt {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace keyedopt
#endif
