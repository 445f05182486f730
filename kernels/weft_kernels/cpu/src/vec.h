// Sixteen fp32 lanes, the unit of every kernel: one 512-bit register, two 256-bit ones, or an array.
//
// All levels see the same sixteen lanes and the same order of operations, so a kernel written on F gives the same bits
// wherever a fused multiply-add exists. `portable` rounds twice in fma(): a class of its own. Denormals are zero (see
// Denormals in pool.h), which is what the matrix instructions do anyway.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace WEFT_NS {

#if WEFT_LEVEL >= 2  // ---- avx512 and above

struct F {
  __m512 v;
};
static inline F zero() { return {_mm512_setzero_ps()}; }
static inline F set1(float a) { return {_mm512_set1_ps(a)}; }
static inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
static inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand where either is not a number.
static inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F negative_abs(F a) {
  return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(int(0x80000000))))};
}
// a where x < y, else b.
static inline F where_less(F x, F y, F a, F b) {
  return {_mm512_mask_mov_ps(b.v, _mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), a.v)};
}
// Lanes [from, to) of a, else b.
static inline F lanes(int from, int to, F a, F b) {
  uint32_t below = to >= 16 ? 0xffffu : to <= 0 ? 0u : (1u << to) - 1;
  uint32_t under = from >= 16 ? 0xffffu : from <= 0 ? 0u : (1u << from) - 1;
  return {_mm512_mask_mov_ps(b.v, static_cast<__mmask16>(below & ~under), a.v)};
}
// 2^n of a float whose low mantissa bits hold n after adding 1.5 * 2^23.
static inline F exponent(F t) {
  __m512i n = _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(t.v), _mm512_set1_epi32(127)), 23);
  return {_mm512_castsi512_ps(n)};
}
// Round to nearest even; a NaN stays one. The instruction takes denormals for zero, as the arithmetic does: see Denormals.
#if WEFT_LEVEL >= 3
static inline __m256i bf16_bits(F a) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)); }
#else
static inline __m256i bf16_bits(F a) {
  __m512i u = _mm512_castps_si512(a.v), high = _mm512_srli_epi32(u, 16);
  __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_cvtepi32_epi16(
      _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), high, _mm512_set1_epi32(0x40)));
}
#endif
static inline F from_bf16(__m256i bits) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
static inline void store_bf16(uint16_t* p, F a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bf16_bits(a)); }
static inline F load_bf16(const uint16_t* p) {
  return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline F round_bf16(F a) { return from_bf16(bf16_bits(a)); }
// Sixteen pairs of bf16: the first of each and the second of each.
static inline void load_pairs(const uint16_t* p, F& first, F& second) {
  __m512i u = _mm512_loadu_si512(p);
  first = {_mm512_castsi512_ps(_mm512_slli_epi32(u, 16))};
  second = {_mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(int(0xffff0000))))};
}
static inline F load_int8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// 1 + q / 16 of the 4-bit numbers q that begin at bit `Bit` of sixteen words.
template <int Bit>
static inline F one_and_sixteenths(const uint32_t* p) {
  const __m512i u = _mm512_loadu_si512(p),
                at19 = Bit <= 19 ? _mm512_slli_epi32(u, (19 - Bit) & 31) : _mm512_srli_epi32(u, (Bit - 19) & 31);
  return {_mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(at19, _mm512_set1_epi32(15 << 19), _mm512_set1_epi32(0x3f800000), 0xea))};  // a & b | c
}
static inline F low_half_plus_high(F a) {  // lanes 0-7 = a[i] + a[i + 8]
  return {_mm512_add_ps(a.v, _mm512_shuffle_f32x4(a.v, a.v, 0x4e))};
}
static inline float sum(F a) {
  a = low_half_plus_high(a);
  __m256 h = _mm512_castps512_ps256(a.v);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}

#elif WEFT_LEVEL == 1  // ---- avx2 + fma

struct F {
  __m256 a, b;
};
static inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F negative_abs(F x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(x.a, sign), _mm256_or_ps(x.b, sign)};
}
static inline F where_less(F x, F y, F p, F q) {
  return {_mm256_blendv_ps(q.a, p.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(q.b, p.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
static inline F lanes(int from, int to, F p, F q) {
  alignas(32) float x[16], y[16];
  store(x, p);
  store(y, q);
  for (int i = 0; i < 16; i++)
    if (i >= from && i < to) y[i] = x[i];
  return load(y);
}
static inline __m256 exponent(__m256 t) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127)), 23));
}
static inline F exponent(F t) { return {exponent(t.a), exponent(t.b)}; }
static inline __m256 widen(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
static inline F load_bf16(const uint16_t* p) { return {widen(p), widen(p + 8)}; }
static inline __m256i bf16_bits(__m256 x) {
  __m256i u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
  __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
static inline void store_bf16(uint16_t* p, F x) {
  __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16_bits(x.a), bf16_bits(x.b)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}
static inline F round_bf16(F x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x.a), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x.b), 16))};
}
static inline void load_pairs(const uint16_t* p, F& first, F& second) {
  __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  __m256i mask = _mm256_set1_epi32(int(0xffff0000));
  first = {_mm256_castsi256_ps(_mm256_slli_epi32(u, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w, 16))};
  second = {_mm256_castsi256_ps(_mm256_and_si256(u, mask)), _mm256_castsi256_ps(_mm256_and_si256(w, mask))};
}
static inline __m256 widen(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline F load_int8(const int8_t* p) { return {widen(p), widen(p + 8)}; }
template <int Bit>
static inline __m256 one_and_sixteenths_of_8(const uint32_t* p) {
  const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i at19 = Bit <= 19 ? _mm256_slli_epi32(u, (19 - Bit) & 31) : _mm256_srli_epi32(u, (Bit - 19) & 31);
  return _mm256_castsi256_ps(
      _mm256_or_si256(_mm256_and_si256(at19, _mm256_set1_epi32(15 << 19)), _mm256_set1_epi32(0x3f800000)));
}
template <int Bit>
static inline F one_and_sixteenths(const uint32_t* p) {
  return {one_and_sixteenths_of_8<Bit>(p), one_and_sixteenths_of_8<Bit>(p + 8)};
}
static inline float sum(F x) {
  __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}

#else  // ---- portable

struct F {
  float x[16];
};
#define WEFT_LANES(expression)                      \
  F r;                                              \
  for (int i = 0; i < 16; i++) r.x[i] = expression; \
  return r
static inline F set1(float a) { WEFT_LANES(a); }
static inline F zero() { return set1(0.0f); }
static inline F load(const float* p) { WEFT_LANES(p[i]); }
static inline void store(float* p, F a) { std::memcpy(p, a.x, 64); }
static inline F add(F a, F b) { WEFT_LANES(a.x[i] + b.x[i]); }
static inline F sub(F a, F b) { WEFT_LANES(a.x[i] - b.x[i]); }
static inline F mul(F a, F b) { WEFT_LANES(a.x[i] * b.x[i]); }
static inline F div(F a, F b) { WEFT_LANES(a.x[i] / b.x[i]); }
static inline F fma(F a, F b, F c) { WEFT_LANES(a.x[i] * b.x[i] + c.x[i]); }
static inline F max(F a, F b) { WEFT_LANES(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
static inline F negative_abs(F a) { WEFT_LANES(std::copysign(a.x[i], -1.0f)); }
static inline F where_less(F x, F y, F a, F b) { WEFT_LANES(x.x[i] < y.x[i] ? a.x[i] : b.x[i]); }
static inline F lanes(int from, int to, F a, F b) { WEFT_LANES(i >= from && i < to ? a.x[i] : b.x[i]); }
static inline uint32_t bits(float a) {
  uint32_t u;
  std::memcpy(&u, &a, 4);
  return u;
}
static inline float from_bits(uint32_t u) {
  float a;
  std::memcpy(&a, &u, 4);
  return a;
}
static inline F exponent(F t) { WEFT_LANES(from_bits((bits(t.x[i]) + 127) << 23)); }
static inline uint16_t to_bf16(float a) {
  uint32_t u = bits(a);
  return a != a ? uint16_t(u >> 16 | 0x40) : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline F load_bf16(const uint16_t* p) { WEFT_LANES(from_bits(uint32_t(p[i]) << 16)); }
static inline void store_bf16(uint16_t* p, F a) {
  for (int i = 0; i < 16; i++) p[i] = to_bf16(a.x[i]);
}
static inline F round_bf16(F a) { WEFT_LANES(from_bits(uint32_t(to_bf16(a.x[i])) << 16)); }
static inline void load_pairs(const uint16_t* p, F& first, F& second) {
  for (int i = 0; i < 16; i++) {
    first.x[i] = from_bits(uint32_t(p[2 * i]) << 16);
    second.x[i] = from_bits(uint32_t(p[2 * i + 1]) << 16);
  }
}
static inline F load_int8(const int8_t* p) { WEFT_LANES(p[i]); }
template <int Bit>
static inline F one_and_sixteenths(const uint32_t* p) {
  WEFT_LANES(1.0f + float(p[i] >> Bit & 15) / 16);
}
static inline float sum(F a) {
  float h[8], q[4];
  for (int i = 0; i < 8; i++) h[i] = a.x[i] + a.x[i + 8];
  for (int i = 0; i < 4; i++) q[i] = h[i] + h[i + 4];
  return (q[0] + q[2]) + (q[1] + q[3]);
}
#undef WEFT_LANES

#endif

static inline float largest(F a) {  // not a number is passed over; -inf when nothing else is there
#if WEFT_LEVEL >= 2
  return _mm512_reduce_max_ps(
      _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), _mm512_cmp_ps_mask(a.v, a.v, _CMP_ORD_Q), a.v));
#else
  float x[16], best = -INFINITY;
  store(x, a);
  for (float y : x) best = y > best ? y : best;
  return best;
#endif
}

// e^x for x <= 0 to 1.5 ulp; 0 below -87.3, not a number stays one. Cody-Waite reduction, degree-6 polynomial.
static inline F exp_negative(F x) {
  const F low = set1(-87.3f), magic = set1(12582912.0f);
  F y = max(low, x);
  F t = fma(y, set1(1.44269504088896341f), magic);
  F n = sub(t, magic);
  F r = fma(n, set1(-0.693145751953125f), y);
  r = fma(n, set1(-1.42860682030941723e-6f), r);
  F p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return where_less(x, low, zero(), mul(p, exponent(t)));
}

// x / (1 + e^-z), without overflow.
static inline F by_logistic(F x, F z) {
  F e = exp_negative(negative_abs(z));
  F top = where_less(z, zero(), e, set1(1.0f));
  return mul(x, div(top, add(set1(1.0f), e)));
}

static inline F silu(F x) { return by_logistic(x, x); }

// gelu in its tanh form (Hendrycks and Gimpel, arXiv 1606.08415): (1 + tanh u) / 2 is the logistic function of 2 u.
static inline F gelu(F x) {
  const F cube = mul(mul(x, x), x);
  return by_logistic(x, mul(set1(1.5957691216057308f), fma(cube, set1(0.044715f), x)));
}

// tanh to 2 ulp: an odd polynomial near 0, where the other form loses digits.
static inline F tanh(F x) {
  const F size = negative_abs(x), e = exp_negative(add(size, size));
  const F far = div(sub(set1(1.0f), e), add(set1(1.0f), e)), t = mul(x, x);
  F p = set1(-0.005717045161873102f);
  p = fma(p, t, set1(0.02065058797597885f));
  p = fma(p, t, set1(-0.05374349653720856f));
  p = fma(p, t, set1(0.13331490755081177f));
  p = fma(p, t, set1(-0.3333328366279602f));
  const F near = fma(mul(x, t), p, x);
  return where_less(size, set1(-0.625f), where_less(x, zero(), sub(zero(), far), far), near);
}

// x drawn softly to within (-cap, cap).
static inline F capped(F x, F cap) { return mul(cap, tanh(div(x, cap))); }

}  // namespace WEFT_NS
