// What the files of the fuzzer share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

// End the run with what is wrong, and the seed that shows it again.
inline void expect(bool good, const char* what, uint64_t seed) {
  if (good) return;
  std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), what);
  std::exit(1);
}

// A call of each function of fused/bulk.
void bulk_once(uint64_t seed);
