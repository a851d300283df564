// Sums of rows that lie anywhere, in registers; long ones by halves, so that the error stays small and the
// order does not depend on threads. Included inside the namespace of an instruction set, after its vectors.

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

inline void combine(float* sums, int64_t count, bool last_is_full, int64_t dim, Scratch& scratch,
                    float* out) {
  Tree tree{scratch.tree, dim, 0};
  for (int64_t i = 0; i + 1 < count; ++i) tree.push(sums + i * dim);
  float* last = sums + (count - 1) * dim;
  if (last_is_full) tree.push(last);
  tree.fold(last_is_full ? nullptr : last, out);
}
