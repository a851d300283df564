// Sums of rows that lie anywhere, in registers: of bags in float, long ones by halves, so that the error stays
// small; of gradients in double. The order does not depend on threads. Included inside the namespace of an
// instruction set, after its vectors.

// Sum columns [c, c + 16 kVectors) of `count` rows.
template <class T, int kVectors, bool kScaled>
inline void strip(const T* const* rows, const float* scale, int64_t count, int64_t c, float* out) {
  vf sum[kVectors];
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) {
    sum[k] = load(rows[0] + c + 16 * k);
    if (kScaled) sum[k] = sum[k] * set1(scale[0]);
  }
  for (int64_t i = 1; i < count; ++i) {
    const T* row = rows[i] + c;
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) {
      const vf x = load(row + 16 * k);
      sum[k] = kScaled ? fma(x, set1(scale[i]), sum[k]) : sum[k] + x;
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) store(out + c + 16 * k, sum[k]);
}

template <class T, bool kScaled>
inline void block_of(const T* const* rows, const float* scale, int64_t count, int64_t dim, float* out) {
  int64_t c = 0;
  for (; c + 128 <= dim; c += 128) strip<T, 8, kScaled>(rows, scale, count, c, out);
  if (c + 64 <= dim) {
    strip<T, 4, kScaled>(rows, scale, count, c, out);
    c += 64;
  }
  if (c + 32 <= dim) {
    strip<T, 2, kScaled>(rows, scale, count, c, out);
    c += 32;
  }
  if (c + 16 <= dim) {
    strip<T, 1, kScaled>(rows, scale, count, c, out);
    c += 16;
  }
  if (c == dim) return;
  const int64_t n = dim - c;
  vf sum = load(rows[0] + c, n);
  if (kScaled) sum = sum * set1(scale[0]);
  for (int64_t i = 1; i < count; ++i) {
    const vf x = load(rows[i] + c, n);
    sum = kScaled ? fma(x, set1(scale[i]), sum) : sum + x;
  }
  store(out + c, sum, n);
}

// Sum of 1 to kBlock rows, each times its scale unless that is null.
template <class T>
inline void block(const T* const* rows, const float* scale, int64_t count, int64_t dim, float* out) {
  if (scale) {
    block_of<T, true>(rows, scale, count, dim, out);
  } else {
    block_of<T, false>(rows, nullptr, count, dim, out);
  }
}

inline void add_row(float* to, const float* from, int64_t dim) {
  int64_t c = 0;
  for (; c + 16 <= dim; c += 16) store(to + c, load(to + c) + load(from + c));
  if (c < dim) store(to + c, load(to + c, dim - c) + load(from + c, dim - c), dim - c);
}

// A binary counter of sums: level k holds the sum of 2^k leaves, or nothing.
struct Tree {
  float* levels;
  int64_t dim;
  uint64_t used;

  // Add a full leaf; its memory is used up.
  void push(float* leaf) {
    int level = 0;
    for (; used >> level & 1u; ++level) add_row(leaf, levels + level * dim, dim);
    std::memcpy(levels + level * dim, leaf, static_cast<size_t>(dim) * sizeof(float));
    used = (used >> level | 1u) << level;
  }
  // All of it, and a leaf that is not full (or null), from the smallest up.
  void fold(const float* rest, float* out) const {
    bool begun = rest != nullptr;
    if (begun && rest != out) std::memcpy(out, rest, static_cast<size_t>(dim) * sizeof(float));
    for (int level = 0; used >> level; ++level) {
      if (!(used >> level & 1u)) continue;
      if (begun) {
        add_row(out, levels + level * dim, dim);
      } else {
        std::memcpy(out, levels + level * dim, static_cast<size_t>(dim) * sizeof(float));
        begun = true;
      }
    }
  }
};

// Sum what `blocks` gives, block by block: blocks(i, n, rows, scale) fills in n rows from row i on.
template <class T, class Blocks>
inline void sum_of(const Blocks& blocks, int64_t count, int64_t dim, bool scaled, Scratch& scratch,
                   float* levels, float* out) {
  const T* rows[kBlock];
  float scales[kBlock];
  float* scale = scaled ? scales : nullptr;
  if (count <= kBlock) {
    blocks.fill(0, count, rows, scale);
    block<T>(rows, scale, count, dim, out);
    return;
  }
  Tree tree{levels, dim, 0};
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    blocks.fill(i, kBlock, rows, scale);
    block<T>(rows, scale, kBlock, dim, scratch.leaf);
    tree.push(scratch.leaf);
  }
  if (i < count) {
    blocks.fill(i, count - i, rows, scale);
    block<T>(rows, scale, count - i, dim, scratch.leaf);
  }
  tree.fold(i < count ? scratch.leaf : nullptr, out);
}

// Sums of gradients, in double: rounded once, at the end, whatever their number.

inline int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

// What a sum in double goes into: a row of floats of its own, or a longer sum of doubles, padded.
inline vd begun(const float*) { return zero_d(); }
inline vd begun(const double* out) { return load(out); }
inline void finished(float* out, vd sum, int64_t n) {
  if (n == 16) {
    store(out, narrowed(sum));
  } else {
    store(out, narrowed(sum), n);
  }
}
inline void finished(double* out, vd sum, int64_t) { store(out, sum); }

template <int kVectors, bool kScaled, class To>
inline void wide_strip(const float* const* rows, const float* scale, int64_t count, int64_t c, To* out) {
  vd sum[kVectors];
#pragma GCC unroll 2
  for (int k = 0; k < kVectors; ++k) sum[k] = begun(out + c + 16 * k);
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 2
    for (int k = 0; k < kVectors; ++k) {
      const vd x = widened(load(rows[i] + c + 16 * k));
      sum[k] = sum[k] + (kScaled ? x * static_cast<double>(scale[i]) : x);  // the product is exact
    }
  }
#pragma GCC unroll 2
  for (int k = 0; k < kVectors; ++k) finished(out + c + 16 * k, sum[k], 16);
}

template <bool kScaled, class To>
inline void wide_block_of(const float* const* rows, const float* scale, int64_t count, int64_t dim, To* out) {
  int64_t c = 0;
  for (; c + 32 <= dim; c += 32) wide_strip<2, kScaled>(rows, scale, count, c, out);
  if (c + 16 <= dim) {
    wide_strip<1, kScaled>(rows, scale, count, c, out);
    c += 16;
  }
  if (c == dim) return;
  const int64_t n = dim - c;
  vd sum = begun(out + c);
  for (int64_t i = 0; i < count; ++i) {
    const vd x = widened(load(rows[i] + c, n));
    sum = sum + (kScaled ? x * static_cast<double>(scale[i]) : x);
  }
  finished(out + c, sum, n);
}

template <class To>
inline void wide_block(const float* const* rows, const float* scale, int64_t count, int64_t dim, To* out) {
  if (scale) {
    wide_block_of<true>(rows, scale, count, dim, out);
  } else {
    wide_block_of<false>(rows, nullptr, count, dim, out);
  }
}

// Sum at most kBlock gradients; one or two are rounded once in float as well.
template <class Blocks>
inline void sum_few(const Blocks& blocks, int64_t count, int64_t dim, bool scaled, float* out) {
  const float* rows[kBlock];
  float scales[kBlock];
  float* scale = scaled ? scales : nullptr;
  blocks.fill(0, count, rows, scale);
  if (count == 1 || (count == 2 && !scaled)) {
    block<float>(rows, scale, count, dim, out);
  } else {
    wide_block(rows, scale, count, dim, out);
  }
}

// Sum any number of gradients into a padded row of doubles.
template <class Blocks>
inline void sum_many(const Blocks& blocks, int64_t count, int64_t dim, bool scaled, double* out) {
  const float* rows[kBlock];
  float scales[kBlock];
  float* scale = scaled ? scales : nullptr;
  std::memset(out, 0, static_cast<size_t>(padded(dim)) * sizeof(double));
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t n = count - i < kBlock ? count - i : kBlock;
    blocks.fill(i, n, rows, scale);
    wide_block(rows, scale, n, dim, out);
  }
}

inline void add_wide(double* to, const double* from, int64_t dim) {
  for (int64_t c = 0; c < dim; c += 16) store(to + c, load(to + c) + load(from + c));
}

inline void round_row(const double* from, int64_t dim, float* to) {
  for (int64_t c = 0; c < dim; c += 16) finished(to + c, load(from + c), dim - c < 16 ? dim - c : 16);
}

inline void combine(double* sums, int64_t count, int64_t dim, float* out) {
  for (int64_t i = 1; i < count; ++i) add_wide(sums, sums + i * padded(dim), dim);
  round_row(sums, dim, out);
}
