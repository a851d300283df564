// Conversion of half precision, with the same bits on every machine, and stochastic rounding.
#pragma once

#include "kernels.h"

namespace keyedopt {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float widen(bfloat x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

inline float widen(half x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, size = x.bits & 0x7fffu;
  if (size >= 0x7c00u) return float_of(sign | 0x7f800000u | (size & 0x3ffu) << 13);  // infinity, NaN
  if (size >= 0x400u) return float_of(sign | ((size << 13) + (112u << 23)));
  return float_of(sign | bits_of(static_cast<float>(size) * 0x1p-24f));
}

inline bfloat nearest(float x, bfloat) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline half nearest(float x, half) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u;
  uint32_t size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (size >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // from 65520 on: infinity
  if (size < 0x38800000u)  // subnormal: at 0.5 the last place of a float is the quantum, 2^-24
    return {static_cast<uint16_t>(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000u))};
  size += 0xfffu + ((size >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((size - (112u << 23)) >> 13))};
}

// Round away from zero with a probability equal to the dropped fraction; exact numbers do not change.
inline bfloat stochastic(float x, uint32_t random, bfloat like) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return nearest(x, like);
  return {static_cast<uint16_t>((bits + (random & 0xffffu)) >> 16)};
}

inline half stochastic(float x, uint32_t random, half like) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  if (size >= 0x477fe000u) return nearest(x, like);  // the largest number, infinity, NaN
  if (size < 0x38800000u) {
    const float fraction = static_cast<float>(random & 0x1fffu) * 0x1p-13f;  // 13 bits, so that the sum is exact
    return {static_cast<uint16_t>(sign | static_cast<uint32_t>(float_of(size) * 0x1p24f + fraction))};
  }
  return {static_cast<uint16_t>(sign | ((size + (random & 0x1fffu) - (112u << 23)) >> 13))};
}

inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The random bits of an element depend only on seed, table, row and column, not on threads.
inline uint64_t row_key(const Rule& rule, const Table& table, int64_t row) {
  return mix(mix(rule.seed ^ mix(static_cast<uint64_t>(table.number))) + static_cast<uint64_t>(row));
}

inline uint32_t random_bits(uint64_t key, uint32_t column) {
  uint32_t x = static_cast<uint32_t>(key) + column * 0x9e3779b9u;
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13) ^ static_cast<uint32_t>(key >> 32)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

}  // namespace keyedopt
