// Dot products of a few rows with groups of 16 packed columns: the arithmetic that everything else is made of.
//
//   y[m][g * 16 + lane] (+)= sum over k of x[m][k] * w[g][k][lane]
//
// `tile32` (amx_bf16, avx512, avx2 and every fp32 product): k is walked in blocks of `Block` pairs; the first and the
// second of each pair form two chains of fused multiply-adds from zero, and the block's two sums are added to y. That is
// the arithmetic of TDPBF16PS (Intel SDM vol. 2), so tiles and vectors may share a matrix. `avx512_bf16` has one chain
// of VDPBF16PS. Neither depends on how many rows or groups are computed together: that is a matter of registers alone.
#pragma once
#include <type_traits>

#include "vec.h"

namespace WEFT_NS {

// GCC holds sums of a loop in registers only where it unrolls the loop early.
#if defined(__GNUC__) && !defined(__clang__)
#define WEFT_UNROLL _Pragma("GCC unroll 8")
#else
#define WEFT_UNROLL
#endif

constexpr int kTilePairs = 16;  // pairs of a block of a matrix or of scores: one full tile
constexpr int kValuePairs = 8;  // pairs of a block of values: 16 positions, so that a block never spans two pages

#if WEFT_LEVEL >= 3
using Bf16X = uint16_t;  // rows of activations as the matrix instructions read them
#else
using Bf16X = float;  // bf16 values in fp32: one broadcast instead of three instructions
#endif

static inline void store_x(uint16_t* p, F a) { store_bf16(p, a); }
static inline void store_x(float* p, F a) { store(p, round_bf16(a)); }

// One pair of a row, in all lanes.
static inline void spread(const float* x, F& first, F& second) {
  first = set1(x[0]);
  second = set1(x[1]);
}
#if WEFT_LEVEL >= 2
static inline void spread(const uint16_t* x, F& first, F& second) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  __m512i u = _mm512_set1_epi32(pair);
  first = {_mm512_castsi512_ps(_mm512_slli_epi32(u, 16))};
  second = {_mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(int(0xffff0000))))};
}
#endif

// How 16 columns of a pair lie in memory, `first` and `second` of each: kinds of weights. In a matrix the next pair is
// `kPairBytes` behind it.
struct Bf16W {
  static constexpr ptrdiff_t kPairBytes = 64;
  static inline void pair(const char* w, ptrdiff_t, F& first, F& second) {
    load_pairs(reinterpret_cast<const uint16_t*>(w), first, second);
  }
};
struct Int8W {
  static constexpr ptrdiff_t kPairBytes = 32;
  static inline void pair(const char* w, ptrdiff_t, F& first, F& second) {
    first = load_int8(reinterpret_cast<const int8_t*>(w));
    second = load_int8(reinterpret_cast<const int8_t*>(w) + 16);
  }
};
struct Fp32W {
  static constexpr ptrdiff_t kPairBytes = 128;
  static inline void pair(const char* w, ptrdiff_t second_at, F& first, F& second) {
    first = load(reinterpret_cast<const float*>(w));
    second = load(reinterpret_cast<const float*>(w + second_at));
  }
};

#if WEFT_LEVEL >= 3
template <class W>
static inline __m512bh bf16_columns(const char* w) {  // 16 pairs as VDPBF16PS reads them; int8 is exact in bf16
  if constexpr (!std::is_same<W, Bf16W>::value) {
    F first, second;
    W::pair(w, 0, first, second);
    __m512i high = _mm512_castps_si512(second.v), low = _mm512_srli_epi32(_mm512_castps_si512(first.v), 16);
    return reinterpret_cast<__m512bh>(_mm512_or_si512(high, low));
  } else {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(w));
  }
}
#endif

constexpr ptrdiff_t kStreamAhead = 4096;  // columns of a matrix come from memory and are used once

// Where the columns of NG groups are: group g begins at base[g]; pairs are `step` bytes apart; in fp32 the second of a
// pair is `second_at` bytes behind the first. A stream is asked for ahead, and goes on `beyond` behind a group's end.
template <int NG>
struct Columns {
  const char* base[NG];
  ptrdiff_t step, second_at, beyond;

  // Ask for what a stream of a matrix needs soon after pair p.
  template <class W>
  void fetch(int p, int pairs) const {
    constexpr ptrdiff_t kStep = W::kPairBytes;
    const ptrdiff_t at = p * kStep + kStreamAhead, far = at < pairs * kStep ? at : at + beyond;
    for (int g = 0; g < NG; g++)
      for (ptrdiff_t line = 0; line < kStep; line += 64) __builtin_prefetch(base[g] + far + line, 0, 3);
  }

  // A stream's stride is a constant to the compiler.
  template <class W, bool Stream>
  const char* pair(int g, int p) const {
    return base[g] + p * (Stream ? W::kPairBytes : step);
  }
};

// Sixteen registers hold the columns of one chain at a time, those of AVX-512 both and a row's pair.
#if WEFT_LEVEL >= 2
constexpr bool kPairsAtOnce = true;
#else
constexpr bool kPairsAtOnce = false;
#endif

template <int MR, int NG>
static inline void clear(F (&sums)[MR][NG]) {
  WEFT_UNROLL
  for (int m = 0; m < MR; m++) WEFT_UNROLL
  for (int g = 0; g < NG; g++) sums[m][g] = zero();
}

// Pair p's part of one chain: its first number or its second.
template <class W, int Which, bool Stream, int MR, int NG, class X>
static inline void add_numbers(const X* const (&x)[MR], const Columns<NG>& w, int p, F (&sums)[MR][NG]) {
  F columns[NG], other;
  WEFT_UNROLL
  for (int g = 0; g < NG; g++) {
    const char* at = w.template pair<W, Stream>(g, p);
    Which == 0 ? W::pair(at, w.second_at, columns[g], other) : W::pair(at, w.second_at, other, columns[g]);
  }
  WEFT_UNROLL
  for (int m = 0; m < MR; m++) {
    const F a = set1(x[m][2 * p + Which]);
    WEFT_UNROLL
    for (int g = 0; g < NG; g++) sums[m][g] = fma(a, columns[g], sums[m][g]);
  }
}

// Pair p's part of both chains.
template <class W, bool Stream, int MR, int NG, class X>
static inline void add_pair(const X* const (&x)[MR], const Columns<NG>& w, int p, F (&even)[MR][NG], F (&odd)[MR][NG]) {
  F first[NG], second[NG];
  WEFT_UNROLL
  for (int g = 0; g < NG; g++) W::pair(w.template pair<W, Stream>(g, p), w.second_at, first[g], second[g]);
  WEFT_UNROLL
  for (int m = 0; m < MR; m++) {
    F a, b;
    spread(x[m] + 2 * p, a, b);
    WEFT_UNROLL
    for (int g = 0; g < NG; g++) {
      even[m][g] = fma(a, first[g], even[m][g]);
      odd[m][g] = fma(b, second[g], odd[m][g]);
    }
  }
}

// One chain of a block.
template <class W, int Which, bool Stream, int MR, int NG, class X>
static inline void add_chain(const X* const (&x)[MR], const Columns<NG>& w, int begin, int end, int pairs,
                             F (&sums)[MR][NG]) {
  clear(sums);
  for (int p = begin; p < end; p++) {
    // Half of what comes soon, in its order: memory has work during both chains.
    if (Stream && (p - begin) % 2 == 0) w.template fetch<W>(((Which == 0 ? begin : end) + p) / 2, pairs);
    add_numbers<W, Which, Stream>(x, w, p, sums);
  }
}

template <class W, int MR, int NG, int Block, bool Stream, class X>
static inline void dot(const X* const (&x)[MR], const Columns<NG>& w, int pairs, F (&y)[MR][NG]) {
#if WEFT_LEVEL == 3
  if constexpr (std::is_same<X, uint16_t>::value) {
    for (int p = 0; p < pairs; p++) {
      if (Stream) w.template fetch<W>(p, pairs);
      __m512bh columns[NG];
      for (int g = 0; g < NG; g++) columns[g] = bf16_columns<W>(w.template pair<W, Stream>(g, p));
      for (int m = 0; m < MR; m++) {
        int32_t pair;
        std::memcpy(&pair, x[m] + 2 * p, 4);
        __m512bh row = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        for (int g = 0; g < NG; g++) y[m][g] = {_mm512_dpbf16_ps(y[m][g].v, row, columns[g])};
      }
    }
    return;
  }
#endif
  for (int block = 0; block < pairs; block += Block) {
    const int end = pairs - block < Block ? pairs : block + Block;
    F even[MR][NG], odd[MR][NG];
    if constexpr (!kPairsAtOnce && MR * NG > 3) {  // more rows: one chain after the other, from columns in the cache
      add_chain<W, 0, Stream>(x, w, block, end, pairs, even);
      add_chain<W, 1, Stream>(x, w, block, end, pairs, odd);
    } else {
      clear(even);
      clear(odd);
      for (int p = block; p < end; p++) {
        if (Stream) w.template fetch<W>(p, pairs);
        if constexpr (kPairsAtOnce) {
          add_pair<W, Stream>(x, w, p, even, odd);
        } else {
          add_numbers<W, 0, Stream>(x, w, p, even);
          add_numbers<W, 1, Stream>(x, w, p, odd);
        }
      }
    }
    WEFT_UNROLL
    for (int m = 0; m < MR; m++) WEFT_UNROLL
    for (int g = 0; g < NG; g++) y[m][g] = add(y[m][g], add(even[m][g], odd[m][g]));
  }
}

// How many rows and groups share a pass: what the registers of the level hold (sums, columns, a row).
#if WEFT_LEVEL >= 2
constexpr int kRows = 4, kGroups = 3, kGroupsOfOneRow = 4;
#elif WEFT_LEVEL == 1
constexpr int kRows = 6, kGroups = 1, kGroupsOfOneRow = 2;
#else
constexpr int kRows = 2, kGroups = 1, kGroupsOfOneRow = 2;
#endif

template <class W, int MR, int NG, int Block, bool Stream, class X>
static inline void dot_rows(const X* x, ptrdiff_t x_stride, const Columns<NG>& w, int pairs, float* y,
                            ptrdiff_t y_stride, bool onto) {
  const X* rows[MR];
  F sums[MR][NG];
  for (int m = 0; m < MR; m++) {
    rows[m] = x + m * x_stride;
    for (int g = 0; g < NG; g++) sums[m][g] = onto ? load(y + m * y_stride + 16 * g) : zero();
  }
  dot<W, MR, NG, Block, Stream>(rows, w, pairs, sums);
  for (int m = 0; m < MR; m++)
    for (int g = 0; g < NG; g++) store(y + m * y_stride + 16 * g, sums[m][g]);
}

// Call with `count`, at most `Most`, as a constant.
template <int Most, class Call>
static inline void with_rows(int count, Call call) {
  if constexpr (Most > 1)
    if (count < Most) return with_rows<Most - 1>(count, call);
  call(std::integral_constant<int, Most>{});
}

template <class W, int NG, int Block, bool Stream, class X>
static inline void dot_columns(const X* x, ptrdiff_t x_stride, int rows, const Columns<NG>& w, int pairs, float* y,
                               ptrdiff_t y_stride, bool onto) {
  int m = 0;
  auto some = [&](auto count, auto stream) {
    dot_rows<W, decltype(count)::value, NG, Block, decltype(stream)::value>(x + m * x_stride, x_stride, w, pairs,
                                                                            y + m * y_stride, y_stride, onto);
    m += decltype(count)::value;
  };
  constexpr int kMost = NG <= kGroups ? kRows : 1;
  for (int passes = (rows + kMost - 1) / kMost; passes > 0; passes--) {  // each has as many rows as others, or one more
    const int count = (rows - m + passes - 1) / passes;
    if (m == 0)
      with_rows<kMost>(count, [&](auto n) { some(n, std::integral_constant<bool, Stream>{}); });
    else  // the columns are in the cache
      with_rows<kMost>(count, [&](auto n) { some(n, std::false_type{}); });
  }
}

// y[rows][groups * 16] (+)= x[rows][2 pairs] * columns; group g's columns begin at base(g), those of a stream (a matrix)
// one behind the other.
template <class W, int Block, bool Stream = false, class X, class Base>
static inline void dot_all(const X* x, ptrdiff_t x_stride, int rows, Base base, int groups, ptrdiff_t step,
                           ptrdiff_t second_at, int pairs, float* y, ptrdiff_t y_stride, bool onto) {
  auto some = [&](auto count, int g) {
    constexpr int NG = decltype(count)::value;
    Columns<NG> w;
    w.step = step;
    w.second_at = second_at;
    for (int i = 0; i < NG; i++) w.base[i] = base(g + i);
    w.beyond = (NG - 1) * pairs * step;
    dot_columns<W, NG, Block, Stream>(x, x_stride, rows, w, pairs, y + 16 * g, y_stride, onto);
  };
  int g = 0;
  if (rows == 1) {  // more groups side by side: a row alone has chains to spare
    for (; g + kGroupsOfOneRow <= groups; g += kGroupsOfOneRow) some(std::integral_constant<int, kGroupsOfOneRow>{}, g);
    for (; kGroupsOfOneRow > 2 && g + 2 <= groups; g += 2) some(std::integral_constant<int, 2>{}, g);
  }
  for (; g + kGroups <= groups; g += kGroups) some(std::integral_constant<int, kGroups>{}, g);
  for (; g < groups; g++) some(std::integral_constant<int, 1>{}, g);
}

}  // namespace WEFT_NS
