// Sum gathered rows in registers. Long sums are made of blocks and chunks, so that the rounding error is small and the
// order does not depend on threads. Included inside the namespace of an instruction set, after its vectors.

// A vector is two registers in AVX2; a call, which GCC may prefer, would pass both through memory.
#define KEYEDOPT_INLINE __attribute__((always_inline))

// Load sixteen columns from column c on, or unless `whole` the last n, of each row; multiply by its scale if kScaled.
template <class Pointer, bool kScaled>
struct Column {
  Pointer* rows;
  const float* scale;
  int64_t c, n;
  bool whole;  // a constant, once loops are unrolled

  KEYEDOPT_INLINE vf at(int64_t i) const { return whole ? load(rows[i] + c) : load(rows[i] + c, n); }
  KEYEDOPT_INLINE vf one(int64_t i) const { return kScaled ? at(i) * set1(scale[i]) : at(i); }
  KEYEDOPT_INLINE vf two(int64_t i) const {
    return kScaled ? fma(at(i + 1), set1(scale[i + 1]), one(i)) : one(i) + at(i + 1);
  }
  KEYEDOPT_INLINE vf four(int64_t i) const { return two(i) + two(i + 2); }
};

// Prefetch columns [c, c + 16 kVectors) of a row that comes after row i, if `rows` knows the rows to come.
template <int kVectors, class T>
KEYEDOPT_INLINE inline void touch(const T* const*, int64_t, int64_t) {}
template <int kVectors, class Rows>
KEYEDOPT_INLINE inline void touch(const Rows& rows, int64_t i, int64_t c) {
  prefetch(rows.later(i) + c, 0, 16 * kVectors * static_cast<int64_t>(sizeof(rows[0][0])));
}

// Sum columns [c, c + 16 kVectors) of `count` rows; unless kWhole the last vector has n columns. Four rows are summed
// pairwise: the error then grows with a quarter of the number of rows, and several loads overlap. Prefetches stand
// between the sums, because a processor waits after a few of them.
template <int kVectors, bool kScaled, bool kWhole = true, class Pointers>
inline void strip(const Pointers& rows, const float* scale, int64_t count, int64_t c, int64_t n, float* out) {
  vf sum[kVectors];
#define KEYEDOPT_ADD(terms, number)                                                                     \
  {                                                                                                     \
    decltype(&rows[0][0]) at[number];                                                                   \
    _Pragma("GCC unroll 4") for (int r = 0; r < number; ++r) at[r] = rows[i + r];                       \
    _Pragma("GCC unroll 8") for (int k = 0; k < kVectors; ++k) {                                        \
      _Pragma("GCC unroll 4") for (int r = number * k / kVectors; r < number * (k + 1) / kVectors; ++r) \
          touch<kVectors>(rows, i + r, c);                                                              \
      const Column<decltype(&rows[0][0]), kScaled> column{at, kScaled ? scale + i : scale, c + 16 * k,  \
                                                          n, kWhole || k + 1 < kVectors};               \
      sum[k] = sum[k] + column.terms(0);                                                                \
    }                                                                                                   \
    i += number;                                                                                        \
  }
  int64_t i = 0;
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) sum[k] = set1(-0.0f);  // -0 + x has the bits of x, also for x = -0
  if (count & 1) KEYEDOPT_ADD(one, 1)
  if (count & 2) KEYEDOPT_ADD(two, 2)
  while (i < count) KEYEDOPT_ADD(four, 4)
#undef KEYEDOPT_ADD
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) put(out + c + 16 * k, sum[k], kWhole || k + 1 < kVectors ? 16 : n);
}

template <bool kScaled, class Pointers>
inline void block_of(const Pointers& rows, const float* scale, int64_t count, int64_t dim, float* out) {
  int64_t c = 0;
  for (; c + 128 <= dim; c += 128) strip<8, kScaled>(rows, scale, count, c, 16, out);
  if (c + 64 <= dim) {
    strip<4, kScaled>(rows, scale, count, c, 16, out);
    c += 64;
  }
  if (c + 32 <= dim) {
    strip<2, kScaled>(rows, scale, count, c, 16, out);
    c += 32;
  }
  if (c + 16 < dim) {
    strip<2, kScaled, false>(rows, scale, count, c, dim - c - 16, out);
  } else if (c < dim) {
    strip<1, kScaled, false>(rows, scale, count, c, dim - c, out);
  }
}

// Sum 1 to kBlock rows, each times its scale unless `scale` is null. rows[i] is a pointer.
template <class Pointers>
inline void block(const Pointers& rows, const float* scale, int64_t count, int64_t dim, float* out) {
  if (scale) {
    block_of<true>(rows, scale, count, dim, out);
  } else {
    block_of<false>(rows, nullptr, count, dim, out);
  }
}

// Prefetch scattered rows.
template <class T>
__attribute__((always_inline)) inline void prefetch_each(const T* const* rows, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; ++i) prefetch<kFar>(rows[i], 0, dim * static_cast<int64_t>(sizeof(T)));
}

// Long sums are in double precision, which costs little: only sums of blocks are added.
struct Total {
  double* sum;
  int64_t dim;

  Total(double* memory, int64_t width) : sum(memory), dim(width) {
    std::memset(sum, 0, static_cast<size_t>(dim) * sizeof(double));
  }
  void add(const float* row) const {
    for (int64_t c = 0; c < dim; ++c) sum[c] += static_cast<double>(row[c]);
  }
  void round(float* out) const {
    for (int64_t c = 0; c < dim; ++c) out[c] = static_cast<float>(sum[c]);
  }
};

// Sum the rows of `blocks`, block by block: fill(i, n, rows, scale) stores n rows from row i on, far() returns whether
// to prefetch them.
template <class Blocks>
inline void sum_of(const Blocks& blocks, int64_t count, int64_t dim, bool scaled, Scratch& scratch,
                   float* out) {
  const float* rows[2][kBlock];
  float scales[2][kBlock];
  const auto scale = [&](int of) { return scaled ? scales[of] : nullptr; };
  int64_t some = count < kBlock ? count : kBlock;
  blocks.fill(0, some, rows[0], scale(0));
  if (count == some) {
    block(rows[0], scale(0), count, dim, out);
    return;
  }
  const Total total(scratch.blocks, dim);
  for (int64_t i = 0, of = 0; i < count; i += kBlock, of = 1 - of) {
    const int64_t left = count - i - some, next = left < kBlock ? left : kBlock;
    blocks.fill(i + some, next, rows[1 - of], scale(1 - of));
    if (blocks.far()) prefetch_each(rows[1 - of], next, dim);
    block(rows[of], scale(of), some, dim, scratch.leaf);
    total.add(scratch.leaf);
    some = next;
  }
  total.round(out);
}

inline void combine(const float* sums, int64_t count, int64_t dim, Scratch& scratch, float* out) {
  const Total total(scratch.chunks, dim);
  for (int64_t i = 0; i < count; ++i) total.add(sums + i * dim);
  total.round(out);
}
