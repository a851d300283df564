// Functions that both files of the fuzzer use.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

// Print the error and the seed that reproduces it, and end the run.
inline void expect(bool good, const char* what, uint64_t seed) {
  if (good) return;
  std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), what);
  std::exit(1);
}

// Call each function of fused/bulk once.
void bulk_once(uint64_t seed);
