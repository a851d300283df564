// Sixteen floats in AVX2 with FMA and F16C. Included inside a namespace, with the instruction set switched on.

struct vf {
  __m256 a, b;
};
struct vd {
  __m256d a, b, c, d;
};

inline vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline vf load(const half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m256 wide(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline vf load(const bfloat* p) {
  return {wide(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          wide(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

inline void store(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store(half* p, vf x) {
  constexpr int nearest_even = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, nearest_even));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, nearest_even));
}
inline __m128i narrow_bfloat(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
}
inline void store(bfloat* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bfloat(x.a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), narrow_bfloat(x.b));
}

// The masks of the first n floats; nothing else is read or written.
struct Mask {
  __m256i a, b;
};
inline Mask first_lanes(int64_t n) {
  static const int32_t ones_then_zeros[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  const int32_t* at = ones_then_zeros + 16 - n;
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 8))};
}
inline vf load(const float* p, int64_t n) {
  const Mask mask = first_lanes(n);
  return {_mm256_maskload_ps(p, mask.a), n > 8 ? _mm256_maskload_ps(p + 8, mask.b) : _mm256_setzero_ps()};
}
inline void store(float* p, vf x, int64_t n) {
  const Mask mask = first_lanes(n);
  _mm256_maskstore_ps(p, mask.a, x.a);
  if (n > 8) _mm256_maskstore_ps(p + 8, mask.b, x.b);
}

// Fewer than sixteen numbers in half precision go through a buffer of sixteen.
template <class W>
inline vf load(const W* p, int64_t n) {
  W all[16] = {};
  std::memcpy(all, p, static_cast<size_t>(n) * sizeof(W));
  return load(all);
}
template <class W>
inline void store(W* p, vf x, int64_t n) {
  W all[16];
  store(all, x);
  std::memcpy(p, all, static_cast<size_t>(n) * sizeof(W));
}

inline vf operator+(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline vf operator-(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline vf operator*(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline vf operator/(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline vf fma(vf x, vf y, vf z) {  // z + x y
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline vf fnma(vf x, vf y, vf z) {  // z - x y
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
inline vf root(vf x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }

// x within [-limit, limit]; NaN stays
inline vf clamp(vf x, float limit) {
  const __m256 low = _mm256_set1_ps(-limit), high = _mm256_set1_ps(limit);
  return {_mm256_min_ps(high, _mm256_max_ps(low, x.a)), _mm256_min_ps(high, _mm256_max_ps(low, x.b))};
}

// x if `keep` is all ones; -0 if `keep` is 0, because -0 + y has the bits of y
inline vf keep_if(uint32_t keep, vf x) {
  const __m256 all = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(keep))), none = _mm256_set1_ps(-0.0f);
  return {_mm256_blendv_ps(none, x.a, all), _mm256_blendv_ps(none, x.b, all)};
}

// x / y, with 0 / 0 = 0
inline __m256 quotient(__m256 x, __m256 y) {
  const __m256 zero = _mm256_setzero_ps();
  const __m256 none = _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_EQ_OQ), _mm256_cmp_ps(y, zero, _CMP_EQ_OQ));
  return _mm256_andnot_ps(none, _mm256_div_ps(x, y));
}
inline vf quotient(vf x, vf y) { return {quotient(x.a, y.a), quotient(x.b, y.b)}; }

inline float total(vf x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline vd zero_d() {
  const __m256d zero = _mm256_setzero_pd();
  return {zero, zero, zero, zero};
}
inline __m256d add_square(__m256d sum, __m128 x) {
  const __m256d wide_x = _mm256_cvtps_pd(x);
  return _mm256_fmadd_pd(wide_x, wide_x, sum);
}
inline vd add_squares(vd sum, vf x) {
  return {add_square(sum.a, _mm256_castps256_ps128(x.a)), add_square(sum.b, _mm256_extractf128_ps(x.a, 1)),
          add_square(sum.c, _mm256_castps256_ps128(x.b)), add_square(sum.d, _mm256_extractf128_ps(x.b, 1))};
}
inline double total(vd x) {
  double four[4];
  _mm256_storeu_pd(four, _mm256_add_pd(_mm256_add_pd(x.a, x.b), _mm256_add_pd(x.c, x.d)));
  return (four[0] + four[1]) + (four[2] + four[3]);
}
