// Sixteen floats in AVX-512. Included inside a namespace, with the instruction set switched on.

struct vf {
  __m512 v;
};
struct vd {
  __m512d low, high;
};

inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline vf set1(float x) { return {_mm512_set1_ps(x)}; }
inline vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline vf load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline vf load(const half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline vf load(const half* p, int64_t n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p))}; }
inline vf wide(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
inline vf load(const bfloat* p) { return wide(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline vf load(const bfloat* p, int64_t n) { return wide(_mm256_maskz_loadu_epi16(first(n), p)); }

inline void store(float* p, vf x) { _mm512_storeu_ps(p, x.v); }
inline void store(float* p, vf x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x.v); }
inline __m256i narrow_half(vf x) {
  return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline __m256i narrow_bfloat(vf x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
}
inline void store(half* p, vf x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_half(x)); }
inline void store(half* p, vf x, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), narrow_half(x)); }
inline void store(bfloat* p, vf x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bfloat(x)); }
inline void store(bfloat* p, vf x, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), narrow_bfloat(x)); }

inline vf operator+(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
inline vf operator-(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline vf operator*(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline vf operator/(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
inline vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // c + a b
inline vf fnma(vf a, vf b, vf c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
inline vf root(vf a) { return {_mm512_sqrt_ps(a.v)}; }

// a within [-limit, limit]; NaN stays
inline vf clamp(vf a, float limit) {
  return {_mm512_min_ps(_mm512_set1_ps(limit), _mm512_max_ps(_mm512_set1_ps(-limit), a.v))};
}

// a if `keep` is all ones; -0 if `keep` is 0, because -0 + y has the bits of y
inline vf keep_if(uint32_t keep, vf a) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(-0.0f), static_cast<__mmask16>(keep), a.v)};
}

// a / b, with 0 / 0 = 0
inline vf quotient(vf a, vf b) {
  const __m512 zero = _mm512_setzero_ps();
  const __mmask16 none =
      _mm512_cmp_ps_mask(a.v, zero, _CMP_EQ_OQ) & _mm512_cmp_ps_mask(b.v, zero, _CMP_EQ_OQ);
  return {_mm512_mask_mov_ps(_mm512_div_ps(a.v, b.v), none, zero)};
}

inline float total(vf a) { return _mm512_reduce_add_ps(a.v); }

inline vd zero_d() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline vd add_squares(vd sum, vf a) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a.v));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1));
  return {_mm512_fmadd_pd(low, low, sum.low), _mm512_fmadd_pd(high, high, sum.high)};
}
inline double total(vd a) { return _mm512_reduce_add_pd(_mm512_add_pd(a.low, a.high)); }
