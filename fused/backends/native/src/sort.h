// Stable radix sort of lookups by row, over the bits that the row numbers of the table need, with 32-bit entries if
// they fit.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace keyedopt {

constexpr int kMaxDigit = 11;

inline int bits_for(uint64_t largest) {
  int bits = 0;
  while (bits < 64 && largest >> bits) ++bits;
  return bits;
}

struct Digits {
  int passes;
  int width;
};

inline Digits digits_for(int bits, int64_t count) {
  const int most = count < 4096 ? 8 : kMaxDigit;
  const int passes = std::max(1, (bits + most - 1) / most);
  return {passes, std::max(1, (bits + passes - 1) / passes)};
}

// Sort `count` entries on one thread; return the buffer with the result, `from` or `to`.
template <class K>
Entry<K>* sort_entries(Entry<K>* from, Entry<K>* to, int64_t count, int bits) {
  if (count <= 32) {
    for (int64_t i = 1; i < count; ++i) {
      const Entry<K> entry = from[i];
      int64_t j = i;
      for (; j > 0 && from[j - 1].key > entry.key; --j) from[j] = from[j - 1];
      from[j] = entry;
    }
    return from;
  }
  const Digits digits = digits_for(bits, count);
  const K mask = static_cast<K>((1u << digits.width) - 1u);
  int64_t starts[8][1 << kMaxDigit];  // 128 KiB of stack
  for (int pass = 0; pass < digits.passes; ++pass)
    std::memset(starts[pass], 0, sizeof(int64_t) << digits.width);
  for (int64_t i = 0; i < count; ++i)
    for (int pass = 0; pass < digits.passes; ++pass)
      ++starts[pass][from[i].key >> (pass * digits.width) & mask];
  for (int pass = 0; pass < digits.passes; ++pass) {
    int64_t* start = starts[pass];
    const int shift = pass * digits.width;
    if (start[from[0].key >> shift & mask] == count) continue;  // all entries have the same digit
    int64_t sum = 0;
    for (int64_t d = 0; d <= static_cast<int64_t>(mask); ++d) {
      const int64_t number = start[d];
      start[d] = sum;
      sum += number;
    }
    for (int64_t i = 0; i < count; ++i) to[start[from[i].key >> shift & mask]++] = from[i];
    std::swap(from, to);
  }
  return from;
}

// The same on many threads: each pass sorts parts of the input. Null if memory ran out.
template <class K>
Entry<K>* sort_entries(Entry<K>* from, Entry<K>* to, int64_t count, int bits, int threads) {
  const Digits digits = digits_for(bits, count);
  const K mask = static_cast<K>((1u << digits.width) - 1u);
  const int64_t bins = static_cast<int64_t>(mask) + 1, parts = threads > 1 ? 2 * threads : 1;
  std::vector<int64_t> starts(static_cast<size_t>(parts * bins));
  const auto edge = [&](int64_t part) { return count / parts * part + std::min(count % parts, part); };
  for (int pass = 0; pass < digits.passes; ++pass) {
    const int shift = pass * digits.width;
    bool done = parallel(threads, parts, [&](int64_t part) {
      int64_t* start = starts.data() + part * bins;
      std::memset(start, 0, static_cast<size_t>(bins) * sizeof(int64_t));
      for (int64_t i = edge(part); i < edge(part + 1); ++i) ++start[from[i].key >> shift & mask];
    });
    int64_t sum = 0;
    for (int64_t d = 0; d < bins; ++d)
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t number = starts[static_cast<size_t>(part * bins + d)];
        starts[static_cast<size_t>(part * bins + d)] = sum;
        sum += number;
      }
    done &= parallel(threads, parts, [&](int64_t part) {
      int64_t* start = starts.data() + part * bins;
      for (int64_t i = edge(part); i < edge(part + 1); ++i)
        to[start[from[i].key >> shift & mask]++] = from[i];
    });
    if (!done) return nullptr;
    std::swap(from, to);
  }
  return from;
}

}  // namespace keyedopt
