// The algorithms: update a row of a table by its summed gradient. Included inside the namespace of an instruction set,
// after its vectors. The formulas and their order are those of keyedopt.reference.rules, except that a factor of a
// whole row is computed once.

// Call a function for every sixteen columns. `n` is less than sixteen only for the last columns, and never if kWhole.
#define KEYEDOPT_COLUMNS(dim) \
  for (int64_t c = 0, n = 16; c < (dim) && (kWhole || (n = (dim) - c < 16 ? (dim) - c : 16) > 0); c += 16)

template <class W>
inline vf get(const W* p, int64_t n) {
  return n == 16 ? load(p) : load(p, n);
}
template <class W>
inline void put(W* p, vf x, int64_t n) {
  if (n == 16) {
    store(p, x);
  } else {
    store(p, x, n);
  }
}

// A row of weights, which is rounded when it is written.
template <class W>
struct Weights {
  W* p;
  uint64_t key;
  bool stochastic_rounding;

  Weights(const Rule& rule, const Table& table, int64_t row)
      : p(static_cast<W*>(table.weight) + row * table.dim), key(0), stochastic_rounding(rule.stochastic) {
    if (stochastic_rounding) key = row_key(rule, table, row);
  }
  vf read(int64_t c, int64_t n) const { return get(p + c, n); }
  void write(int64_t c, vf x, int64_t n) const {
    if (stochastic_rounding) {
      float all[16];
      store(all, x);
      for (int64_t i = 0; i < n; ++i)
        p[c + i] = stochastic(all[i], random_bits(key, static_cast<uint32_t>(c + i)), W());
    } else {
      put(p + c, x, n);
    }
  }
};

template <>
struct Weights<float> {
  float* p;

  Weights(const Rule&, const Table& table, int64_t row)
      : p(static_cast<float*>(table.weight) + row * table.dim) {}
  vf read(int64_t c, int64_t n) const { return get(p + c, n); }
  void write(int64_t c, vf x, int64_t n) const { put(p + c, x, n); }
};

// Return the gradient with L2 decay, negated if `maximize`.
inline vf gradient(const Rule& rule, vf w, const float* grad, int64_t c, int64_t n) {
  const vf g = get(grad + c, n) * set1(rule.sign);
  return rule.decay == kL2 ? fma(set1(rule.weight_decay), w, g) : g;
}

// Return w - lr * (direction + decoupled decay).
inline vf descend(const Rule& rule, vf w, vf direction) {
  if (rule.decay == kDecoupled) direction = fma(set1(rule.weight_decay), w, direction);
  return fnma(set1(rule.lr), direction, w);
}

constexpr int64_t kAheadBytes = 2048;  // bytes of a row to prefetch; the hardware prefetches the rest

// The cache to prefetch into. The first cache blocks after few requests at a time; the second cache accepts more.
constexpr int kNear = 3, kFar = 2;

// Prefetch bytes [begin, end) at p. Always inlined: GCC removes calls of functions that only prefetch.
template <int kWhere = kNear>
__attribute__((always_inline)) inline void prefetch(const void* p, int64_t begin, int64_t end) {
  const char* at = static_cast<const char*>(p);
  end = end < kAheadBytes ? end : kAheadBytes;
  for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(at + i, 0, kWhere);
}

template <int kWhere = kNear>
__attribute__((always_inline)) inline void prefetch_states(const Table& table, int64_t row) {
  for (int i = 0; i < 2; ++i)
    if (table.width[i]) prefetch<kWhere>(table.state[i] + row * table.width[i], 0, table.width[i] * 4);
  if (table.counter) __builtin_prefetch(table.counter + row, 0, kWhere);
}

// Prefetch the memory of rows early. A rule prefetches it again, into the first cache, shortly before use.
__attribute__((always_inline)) inline void prefetch_rows(const Table& table, const int64_t* rows, int64_t count) {
  const int64_t size = table.dim * (table.dtype == kFloat ? 4 : 2);
  for (int64_t r = 0; r < count; ++r) {
    prefetch<kFar>(static_cast<const char*>(table.weight) + rows[r] * size, 0, size);
    prefetch_states<kFar>(table, rows[r]);
  }
}

// Apply a rule for one row to several rows, and prefetch the memory of the next rows.
template <class W, void (*kRule)(const Rule&, const Table&, int64_t row, const float* grad, float* work)>
void each(const Rule& rule, const Table& table, const Rows& rows, float* work) {
  const int64_t last = rows.count > rows.coming ? rows.count : rows.coming;
  for (int64_t r = 0; r < last; ++r) {
    if (r < rows.coming) {
      const W* weight = static_cast<const W*>(table.weight) + rows.next[r] * table.dim;
      prefetch(weight, 0, table.dim * static_cast<int64_t>(sizeof(W)));
      prefetch_states(table, rows.next[r]);
    }
    if (r < rows.count) kRule(rule, table, rows.rows[r], rows.grads + r * rows.stride, work);
  }
}

template <class W, bool kWhole>
void sgd(const Rule& rule, const Table& table, int64_t row, const float* grad, float*) {
  const Weights<W> weights(rule, table, row);
  float* momentum = table.state[0] ? table.state[0] + row * table.dim : nullptr;
  KEYEDOPT_COLUMNS(table.dim) {
    const vf w = weights.read(c, n);
    vf direction = gradient(rule, w, grad, c, n);
    if (momentum) {
      const vf g = direction;
      const vf b = rule.first ? g : fma(set1(rule.undamped), g, set1(rule.momentum) * get(momentum + c, n));
      put(momentum + c, b, n);
      direction = rule.nesterov ? fma(set1(rule.momentum), b, g) : b;
    }
    weights.write(c, descend(rule, w, direction), n);
  }
}

template <class W, bool kWhole>
void adagrad(const Rule& rule, const Table& table, int64_t row, const float* grad, float*) {
  const Weights<W> weights(rule, table, row);
  float* sum = table.state[0] + row * table.dim;
  KEYEDOPT_COLUMNS(table.dim) {
    const vf w = weights.read(c, n), g = gradient(rule, w, grad, c, n);
    const vf s = fma(g, g, get(sum + c, n));
    put(sum + c, s, n);
    vf moved = fnma(set1(rule.rate), quotient(g, root(s) + set1(rule.eps)), w);
    if (rule.decay == kDecoupled) moved = fnma(set1(rule.lr), set1(rule.weight_decay) * w, moved);
    weights.write(c, moved, n);
  }
}

inline float norm(vd squares) { return static_cast<float>(std::sqrt(total(squares))); }
inline float trust(float numerator, float denominator) {
  return numerator == 0.0f || denominator == 0.0f ? 1.0f : numerator / denominator;
}

// Write a row of `work`, with these squares, scaled down to the largest norm if its norm exceeds it.
template <class W, bool kWhole>
inline void write_limited(const Rule& rule, const Weights<W>& weights, const float* work, int64_t dim, vd squares) {
  const float length = norm(squares);
  const bool longer = length > rule.max_norm;
  KEYEDOPT_COLUMNS(dim) {
    const vf moved = get(work + c, n);
    weights.write(c, longer ? moved * set1(rule.max_norm / length) : moved, n);
  }
}

// Update the row by a factor times its gradient, or by quotients if the factor may overflow and the quotients do not.
template <class W, bool kWhole>
inline void rowwise_step(const Rule& rule, const Table& table, int64_t row, const float* grad, float denominator,
                         float factor, float* work) {
  const Weights<W> weights(rule, table, row);
  const int64_t dim = table.dim;
  const bool small = denominator < 1e-30f;
  vd moved_squares = zero_d();
  KEYEDOPT_COLUMNS(dim) {
    const vf w = weights.read(c, n), g = gradient(rule, w, grad, c, n);
    vf moved = small ? fnma(set1(rule.rate), quotient(g, set1(denominator)), w) : fnma(set1(factor), g, w);
    if (rule.decay == kDecoupled) moved = fnma(set1(rule.lr), set1(rule.weight_decay) * w, moved);
    if (rule.max_norm >= 0.0f) {
      moved_squares = add_squares(moved_squares, moved);
      put(work + c, moved, n);
    } else {
      weights.write(c, moved, n);
    }
  }
  if (rule.max_norm >= 0.0f) write_limited<W, kWhole>(rule, weights, work, dim, moved_squares);
}

// Three passes, so that one vector operation computes the roots and divisions of all rows. Two passes prefetch the next
// rows, because a processor accepts few requests at a time. Simple: no decay and no limit of the norm.
template <class W, int kDim, bool kSimple>
inline void rowwise_adagrad_of(const Rule& rule, const Table& table, const Rows& rows, float* work) {
  constexpr bool kWhole = kDim > 0;
  const int64_t dim = kDim > 16 ? kDim : table.dim;
  const int64_t size = dim * static_cast<int64_t>(sizeof(W)), middle = size / 128 * 64;
  const W* const weight = static_cast<const W*>(table.weight);
  float* const state = table.state[0];
  float states[kTogether] = {}, sums[kTogether] = {}, factors[kTogether];
  for (int64_t r = 0; r < rows.count; ++r) {
    const Weights<W> weights(rule, table, rows.rows[r]);
    const float* grad = rows.grads + r * rows.stride;
    if (r < rows.coming) prefetch(weight + rows.next[r] * dim, 0, middle);
    vf squares = set1(0.0f);
    KEYEDOPT_COLUMNS(dim) {
      const bool decays = !kSimple && rule.decay == kL2;
      const vf g = decays ? gradient(rule, weights.read(c, n), grad, c, n) : get(grad + c, n);
      squares = fma(g, g, squares);
    }
    sums[r] = total(squares);
    states[r] = state[rows.rows[r]];
  }
  const vf s = load(states) + load(sums) / set1(static_cast<float>(dim)), denominator = root(s) + set1(rule.eps);
  store(states, s);
  store(sums, denominator);
  store(factors, set1(rule.rate) / denominator);
  for (int64_t r = 0; r < rows.count; ++r) {
    if (r < rows.coming) {
      prefetch(weight + rows.next[r] * dim, middle, size);
      __builtin_prefetch(state + rows.next[r]);
    }
    state[rows.rows[r]] = states[r];
    const float* grad = rows.grads + r * rows.stride;
    if (!kSimple || sums[r] < 1e-30f) {
      rowwise_step<W, kWhole>(rule, table, rows.rows[r], grad, sums[r], factors[r], work);
      continue;
    }
    const Weights<W> weights(rule, table, rows.rows[r]);
    const vf factor = set1(factors[r] * rule.sign);
    KEYEDOPT_COLUMNS(dim) weights.write(c, fnma(factor, get(grad + c, n), weights.read(c, n)), n);
  }
  for (int64_t r = rows.count; r < rows.coming; ++r) {
    prefetch(weight + rows.next[r] * dim, 0, size);
    __builtin_prefetch(state + rows.next[r]);
  }
}

template <class W, int kDim>
void rowwise_adagrad(const Rule& rule, const Table& table, const Rows& rows, float* work) {
  if (rule.decay == kNoDecay && rule.max_norm < 0.0f) {
    rowwise_adagrad_of<W, kDim, true>(rule, table, rows, work);
  } else {
    rowwise_adagrad_of<W, (kDim > 0 ? 16 : 0), false>(rule, table, rows, work);
  }
}

// Adam and its variants. Partial: one second moment per row. Layered: the step is scaled to the norm of the row (LAMB).
template <class W, bool kWhole, bool kPartial, bool kLayered>
void adam(const Rule& rule, const Table& table, int64_t row, const float* grad, float* work) {
  const Weights<W> weights(rule, table, row);
  const int64_t dim = table.dim;
  float* mean = table.state[0] + row * dim;
  float gain = rule.gain, spread = rule.spread;
  if (table.counter) correct(rule, static_cast<double>(++table.counter[row]), &gain, &spread);
  float* square = table.state[1] + (kPartial ? row : row * dim);
  float denominator = 0.0f;
  if (kPartial) {
    vf squares = set1(0.0f);
    KEYEDOPT_COLUMNS(dim) {
      const vf g = rule.decay == kL2 ? gradient(rule, weights.read(c, n), grad, c, n) : get(grad + c, n);
      squares = fma(g, g, squares);
    }
    const float mean_square = total(squares) / static_cast<float>(dim);
    const float v = static_cast<float>(rule.exact_beta2 * *square + (1.0 - rule.exact_beta2) * mean_square);
    *square = v;
    denominator = spread * std::sqrt(v) + rule.eps;
  }
  const bool limited = kPartial && rule.max_norm >= 0.0f;
  vd lengths = zero_d(), steps = zero_d(), moved_squares = zero_d();
  KEYEDOPT_COLUMNS(dim) {
    const vf w = weights.read(c, n), g = gradient(rule, w, grad, c, n);
    const vf m0 = get(mean + c, n);
    const vf m = fma(set1(rule.beta1), m0, fma(set1(rule.low1), m0, set1(rule.rest1) * g));
    put(mean + c, m, n);
    vf below = set1(denominator);
    if (!kPartial) {
      const vf v0 = get(square + c, n), g2 = g * g;
      const vf lower = fma(set1(rule.low2), v0, set1(rule.rest_low2) * g2);
      const vf v = fma(set1(rule.beta2), v0, fma(set1(rule.rest2), g2, lower));
      put(square + c, v, n);
      below = fma(set1(spread), root(v), set1(rule.eps));
    }
    const vf direction = quotient(set1(gain) * m, below);
    if (!kLayered) {
      const vf moved = descend(rule, w, direction);
      if (limited) {
        moved_squares = add_squares(moved_squares, moved);
        put(work + c, moved, n);
      } else {
        weights.write(c, moved, n);
      }
      continue;
    }
    const vf step = rule.decay == kDecoupled ? fma(set1(rule.weight_decay), w, direction) : direction;
    lengths = add_squares(lengths, w);
    steps = add_squares(steps, step);
    put(work + c, step, n);
  }
  if (kLayered) {
    const vf rate = set1(rule.lr * trust(norm(lengths), norm(steps)));
    KEYEDOPT_COLUMNS(dim) {
      const vf moved = fnma(rate, get(work + c, n), weights.read(c, n));
      if (limited) {
        moved_squares = add_squares(moved_squares, moved);
        put(work + c, moved, n);
      } else {
        weights.write(c, moved, n);
      }
    }
  }
  if (limited) write_limited<W, kWhole>(rule, weights, work, dim, moved_squares);
}

template <class W, bool kWhole>
void lars(const Rule& rule, const Table& table, int64_t row, const float* grad, float*) {
  const Weights<W> weights(rule, table, row);
  float* momentum = table.state[0] + row * table.dim;
  vd lengths = zero_d(), slopes = zero_d();
  KEYEDOPT_COLUMNS(table.dim) {
    lengths = add_squares(lengths, weights.read(c, n));
    slopes = add_squares(slopes, get(grad + c, n));
  }
  const float length = norm(lengths);
  const float rate = rule.lr * trust(rule.eta * length, norm(slopes) + rule.weight_decay * length);
  KEYEDOPT_COLUMNS(table.dim) {
    const vf w = weights.read(c, n);
    const vf g = fma(set1(rule.weight_decay), w, get(grad + c, n) * set1(rule.sign));
    const vf b = fma(set1(rule.momentum), get(momentum + c, n), set1(rate) * g);
    put(momentum + c, b, n);
    weights.write(c, w - b, n);
  }
}

template <class W, bool kWhole>
void ftrl(const Rule& rule, const Table& table, int64_t row, const float* grad, float*) {
  const Weights<W> weights(rule, table, row);
  float* sum = table.state[0] + row * table.dim;
  float* linear = table.state[1] + row * table.dim;
  const vf lr = set1(rule.lr);
  KEYEDOPT_COLUMNS(table.dim) {
    const vf w = weights.read(c, n);
    const vf g = fma(set1(rule.weight_decay), w, get(grad + c, n) * set1(rule.sign));
    const vf before = get(sum + c, n), s = fma(g, g, before);
    // The difference of both roots, without cancellation: (s - before) / (root(s) + root(before)).
    const vf growth = quotient(g * g, (root(s) + root(before)) * lr);
    const vf z = fnma(growth, w, get(linear + c, n) + fma(set1(rule.shrinkage), w, g));
    put(sum + c, s, n);
    put(linear + c, z, n);
    weights.write(c, quotient(clamp(z, rule.l1) - z, root(s) / lr + set1(rule.ridge)), n);
  }
}
