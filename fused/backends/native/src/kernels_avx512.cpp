// The kernels for machines with AVX-512.
#include "kernels.h"
#include "rounding.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// Standard headers are included before the instruction set is switched on: the linker keeps one copy of their inline
// functions for all files, and this copy must run on every machine.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

namespace keyedopt {
namespace {
#include "vec_avx512.h"
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
const Kernels* kernels_avx512() { return &kernels; }
}  // namespace keyedopt
#else
namespace keyedopt {
const Kernels* kernels_avx512() { return nullptr; }
}  // namespace keyedopt
#endif
