// The instruction sets that functions are compiled for, and which of them is used.
#pragma once

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define FOR_EACH_MACHINE 1
#define FOR_AVX2 __attribute__((target("avx2")))
#define FOR_AVX512 __attribute__((target("avx512f,avx512dq,prefer-vector-width=512")))
#endif
#define INLINE __attribute__((always_inline)) inline

namespace keyedopt {

// Prefetch into the second cache, which accepts more requests at a time than the first.
constexpr int kFar = 2;

enum class Machine { plain, avx2, avx512, unknown };

inline bool runs(Machine machine) {
#ifdef FOR_EACH_MACHINE
    if (machine == Machine::avx512) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    if (machine == Machine::avx2) return __builtin_cpu_supports("avx2");
#endif
    return machine == Machine::plain;
}

// Return the instruction set of a name, or the best for an empty name; unknown if this machine lacks it.
inline Machine machine_of(const char* name) {
    constexpr struct { const char* name; Machine machine; } kBestFirst[] = {
        {"avx512", Machine::avx512}, {"avx2", Machine::avx2}, {"plain", Machine::plain}};
    for (const auto& one : kBestFirst)
        if ((!*name || std::strcmp(name, one.name) == 0) && runs(one.machine)) return one.machine;
    return Machine::unknown;
}

}  // namespace keyedopt
