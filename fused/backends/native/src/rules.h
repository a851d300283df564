// The algorithms: a row of the table updated by its summed gradient. Included inside the namespace of an
// instruction set, after its vectors. The formulas are those of keyedopt.reference.rules, in its order,
// except that a factor of a whole row is formed once.

// For each sixteen columns: `n` is less than sixteen in the last ones alone, and where kWhole is set it never
// is.
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

// A row of weights, as it is rounded.
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

// The gradient to descend along, with L2 decay.
inline vf gradient(const Rule& rule, vf w, const float* grad, int64_t c, int64_t n) {
  const vf g = get(grad + c, n) * set1(rule.sign);
  return rule.decay == kL2 ? fma(set1(rule.weight_decay), w, g) : g;
}

// w - lr * (direction + decoupled decay)
inline vf descend(const Rule& rule, vf w, vf direction) {
  if (rule.decay == kDecoupled) direction = fma(set1(rule.weight_decay), w, direction);
  return fnma(set1(rule.lr), direction, w);
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

template <class W, bool kWhole>
void rowwise_adagrad(const Rule& rule, const Table& table, int64_t row, const float* grad, float* work) {
  const Weights<W> weights(rule, table, row);
  const int64_t dim = table.dim;
  vf squares = set1(0.0f);
  KEYEDOPT_COLUMNS(dim) {
    const vf g = rule.decay == kL2 ? gradient(rule, weights.read(c, n), grad, c, n) : get(grad + c, n);
    squares = fma(g, g, squares);
  }
  const float s = table.state[0][row] + total(squares) / static_cast<float>(dim);
  table.state[0][row] = s;
  const float denominator = std::sqrt(s) + rule.eps, factor = rule.rate / denominator;
  const bool small = denominator < 1e-30f;  // the factor may overflow where the quotients do not
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
  if (rule.max_norm < 0.0f) return;
  const float length = norm(moved_squares);
  const bool longer = length > rule.max_norm;
  KEYEDOPT_COLUMNS(dim) {
    const vf moved = get(work + c, n);
    weights.write(c, longer ? moved * set1(rule.max_norm / length) : moved, n);
  }
}

// Adam and its kin. Partial: the second moment is one number a row. Layered: the step has the length of the
// row.
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
  vd lengths = zero_d(), steps = zero_d();
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
      weights.write(c, descend(rule, w, direction), n);
      continue;
    }
    const vf step = rule.decay == kDecoupled ? fma(set1(rule.weight_decay), w, direction) : direction;
    lengths = add_squares(lengths, w);
    steps = add_squares(steps, step);
    put(work + c, step, n);
  }
  if (!kLayered) return;
  const vf rate = set1(rule.lr * trust(norm(lengths), norm(steps)));
  KEYEDOPT_COLUMNS(dim) { weights.write(c, fnma(rate, get(work + c, n), weights.read(c, n)), n); }
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
