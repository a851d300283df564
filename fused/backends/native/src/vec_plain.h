// Sixteen floats in plain C++, which any compiler can vectorize. Included inside a namespace.

struct vf {
  float x[16];
};
struct vd {
  double x[16];
};

#define KEYEDOPT_EACH(expression) \
  vf r;                           \
  for (int i = 0; i < 16; ++i) {  \
    r.x[i] = (expression);        \
  }                               \
  return r

inline vf set1(float a) { KEYEDOPT_EACH(a); }
inline vf load(const float* p) { KEYEDOPT_EACH(p[i]); }
inline vf load(const half* p) { KEYEDOPT_EACH(widen(p[i])); }
inline vf load(const bfloat* p) { KEYEDOPT_EACH(widen(p[i])); }
template <class W>
inline vf load(const W* p, int64_t n) {
  W all[16] = {};
  std::memcpy(all, p, static_cast<size_t>(n) * sizeof(W));
  return load(all);
}

inline void store(float* p, const vf& a) { std::memcpy(p, a.x, sizeof(a.x)); }
inline void store(float* p, const vf& a, int64_t n) { std::memcpy(p, a.x, static_cast<size_t>(n) * 4); }
template <class W>
inline void store(W* p, const vf& a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = nearest(a.x[i], W());
}
template <class W>
inline void store(W* p, const vf& a) {
  store(p, a, 16);
}

inline vf operator+(const vf& a, const vf& b) { KEYEDOPT_EACH(a.x[i] + b.x[i]); }
inline vf operator-(const vf& a, const vf& b) { KEYEDOPT_EACH(a.x[i] - b.x[i]); }
inline vf operator*(const vf& a, const vf& b) { KEYEDOPT_EACH(a.x[i] * b.x[i]); }
inline vf operator/(const vf& a, const vf& b) { KEYEDOPT_EACH(a.x[i] / b.x[i]); }
// Rounded once, as by the instruction of other machines.
inline vf fma(const vf& a, const vf& b, const vf& c) {
  KEYEDOPT_EACH(static_cast<float>(c.x[i] + static_cast<double>(a.x[i]) * b.x[i]));
}
inline vf fnma(const vf& a, const vf& b, const vf& c) {
  KEYEDOPT_EACH(static_cast<float>(c.x[i] - static_cast<double>(a.x[i]) * b.x[i]));
}
inline vf root(const vf& a) { KEYEDOPT_EACH(std::sqrt(a.x[i])); }
// a / b, with 0 / 0 = 0
inline vf quotient(const vf& a, const vf& b) {
  KEYEDOPT_EACH(a.x[i] == 0.0f && b.x[i] == 0.0f ? 0.0f : a.x[i] / b.x[i]);
}
// a within [-limit, limit]
inline vf clamp(const vf& a, float limit) {
  KEYEDOPT_EACH(a.x[i] < -limit ? -limit : a.x[i] > limit ? limit : a.x[i]);
}
// a if `keep` is all ones; -0 if `keep` is 0, because -0 + y has the bits of y
inline vf keep_if(uint32_t keep, const vf& a) { KEYEDOPT_EACH(keep ? a.x[i] : -0.0f); }
#undef KEYEDOPT_EACH

inline float total(const vf& a) {
  float half_sum[8];
  for (int i = 0; i < 8; ++i) half_sum[i] = a.x[i] + a.x[i + 8];
  for (int i = 0; i < 4; ++i) half_sum[i] += half_sum[i + 4];
  return (half_sum[0] + half_sum[2]) + (half_sum[1] + half_sum[3]);
}
inline vd zero_d() { return vd{}; }
inline vd add_squares(vd sum, const vf& a) {
  for (int i = 0; i < 16; ++i) sum.x[i] += static_cast<double>(a.x[i]) * a.x[i];
  return sum;
}
inline double total(const vd& a) {
  double sum = 0.0;
  for (int i = 0; i < 16; ++i) sum += a.x[i];
  return sum;
}
