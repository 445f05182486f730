// Products with int4 weights, w = minimum + scale q (pack.h), without making numbers of the weights first.
//
// For each 64 inputs of an output the arithmetic of dot.h multiplies inputs with n = 1 + q / 16, which bf16 holds exactly
// and two operations on packed bits make, a pair at once. Then, with fused multiply-adds in the order of the inputs:
//
//   y = y + 16 scale * dot;  y = y + (minimum - 16 scale) * sum of the 64 inputs
//
// So the weights are not rounded, and a scale costs one operation for 64 inputs.
#pragma once
#include "tiles.h"
#include "unit.h"

namespace WEFT_NS {

constexpr int kInt4Blocks = weft::kInt4Inputs / 32;  // blocks of 16 pairs

// The form that pairs of n are made in: one vector for the matrix instructions, else two of fp32.
#if WEFT_LEVEL >= 3
using Int4W = Bf16W;
#else
using Int4W = Fp32W;
#endif
constexpr ptrdiff_t kInt4PairBytes = Int4W::kPairBytes;
constexpr ptrdiff_t kInt4BlockBytes = kTilePairs * kInt4PairBytes;
constexpr int kInt4AtOnce = int(kWidenedBytes / (kUnitGroups * kInt4Blocks * kInt4BlockBytes));  // times 64 inputs
static_assert(weft::kMostInt4Inputs / weft::kInt4Inputs * sizeof(float) <= kSumsBytes, "sums of one row in scratch");
static_assert(kInt4AtOnce * 2 * sizeof(float) * kUnitColumns <= kFactorsBytes, "factors in scratch");

// The pair of n of 16 outputs from bits `Bit` and 16 + `Bit` of their words.
template <int Bit>
static inline void widen_pair(const uint32_t* words, char* to) {
#if WEFT_LEVEL >= 3
  const __m512i u = _mm512_loadu_si512(words),
                at3 = Bit <= 3 ? _mm512_slli_epi32(u, (3 - Bit) & 31) : _mm512_srli_epi32(u, (Bit - 3) & 31);
  _mm512_store_si512(to, _mm512_ternarylogic_epi32(at3, _mm512_set1_epi32(0x00780078), _mm512_set1_epi32(0x3f803f80),
                                                   0xea));  // a & b | c
#else
  store(reinterpret_cast<float*>(to), one_and_sixteenths<Bit>(words));
  store(reinterpret_cast<float*>(to) + 16, one_and_sixteenths<16 + Bit>(words));
#endif
}

// n of `blocks` times 32 inputs of 16 outputs.
static inline void widen_int4(const char* from, int blocks, char* to) {
  for (int line = 0; line < 4 * blocks; line++, to += 4 * kInt4PairBytes) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(from + 64 * (line + 1));
    widen_pair<0>(words, to);
    widen_pair<4>(words, to + kInt4PairBytes);
    widen_pair<8>(words, to + 2 * kInt4PairBytes);
    widen_pair<12>(words, to + 3 * kInt4PairBytes);
  }
}

// What the dot products and the sums of 64 inputs are multiplied with.
static inline void factors_of(const char* from, float* of_dot, float* of_sum) {
  const F scale = mul(load_bf16(reinterpret_cast<const uint16_t*>(from)), set1(16.0f));
  store(of_dot, scale);
  store(of_sum, sub(load_bf16(reinterpret_cast<const uint16_t*>(from + 32)), scale));
}

static inline F load_x(const uint16_t* x) { return load_bf16(x); }
static inline F load_x(const float* x) { return load(x); }

// sums[k][rows] of each 64 inputs.
template <class X>
static inline void sum_inputs(const X* x, ptrdiff_t xs, int rows, int n_in, float* sums) {
  for (int k = 0; k < n_in; k += weft::kInt4Inputs)
    for (int m = 0; m < rows; m++) {
      F total = zero();
      for (int c = k; c < std::min<int>(n_in, k + weft::kInt4Inputs); c += 16) {
        const F part = load_x(x + m * xs + c);
        total = add(total, n_in - c < 16 ? lanes(0, n_in - c, part, zero()) : part);
      }
      *sums++ = sum(total);
    }
}

// A unit of a product, y[rows][kUnitColumns] = x W^T in the span's columns, 64 inputs a step, of at most `most_rows`.
template <class X>
class Int4Product {
 public:
  static int most_rows(int n_in) {
    return int(kSumsBytes / sizeof(float) / ((n_in + weft::kInt4Inputs - 1) / weft::kInt4Inputs));
  }

  Int4Product(weft::Member& me, const weft_matrix& w, const X* x, ptrdiff_t xs, int rows, const Span& span, float* y,
              Beside& beside)
      : x_(x), xs_(xs), rows_(rows), groups_(span.count), n_in_(w.n_in), y_(y + span.column), beside_(beside) {
    steps_ = (n_in_ + int(weft::kInt4Inputs) - 1) / int(weft::kInt4Inputs);
    group_bytes_ = steps_ * weft::kInt4Bytes;
    data_ = static_cast<const char*>(w.data) + span.group * group_bytes_;
    widened_ = me.scratch() + kPanelsBytes;
    factors_ = reinterpret_cast<float*>(widened_ + kWidenedBytes);
    dots_ = factors_ + kFactorsBytes / sizeof(float);
    sums_ = dots_ + kDotsBytes / sizeof(float);
    if (me.kept != x) sum_inputs(x, xs, rows, n_in_, sums_);
    me.kept = x;
    for (int m = 0; m < rows; m++) std::memset(y_ + m * kUnitColumns, 0, 64 * groups_);
    beside.over(steps_);
  }

  void run() {
#if WEFT_LEVEL == 4
    shape_for_matrix(rows_);
    if (rows_ <= 16) return run_few();
#endif
    const int at_once = rows_ <= kDotRows ? 1 : kInt4AtOnce;
    for (int k = 0; k < steps_; k += at_once) {
      const int n = std::min(at_once, steps_ - k);
      for (int i = 0; i < n; i++) {
        for (int g = 0; g < groups_; g++) widen(k + i, i, g);
        beside_.some();
      }
      for (int m = 0; m < rows_; m += kDotRows) add_dots(k, n, m, std::min(kDotRows, rows_ - m));
    }
    beside_.all();
  }

 private:
  int blocks_of(int step) const { return std::min(kInt4Blocks, (n_in_ + 31) / 32 - kInt4Blocks * step); }
  char* widened(int place) const { return widened_ + place * kUnitGroups * kInt4Blocks * kInt4BlockBytes; }
  float* dots_of(int step) const { return dots_ + step % 2 * kDotRows * kUnitColumns; }
  float* factors(int place) const { return factors_ + place * 2 * kUnitColumns; }

  // A step's columns of a group, n of them and factors, into a place of the scratch.
  void widen(int step, int place, int g) {
    const int blocks = blocks_of(step),
              beyond = 16 * (kInt4Blocks * step + blocks) - (n_in_ + 1) / 2;  // pairs without an input
    const char* from = data_ + g * group_bytes_ + step * weft::kInt4Bytes;
    // What comes soon of this stream, or, at its end, of the one that begins behind the unit's last.
    const char* ahead = from + 2 * weft::kInt4Bytes + (step + 2 < steps_ ? 0 : (kUnitGroups - 1) * group_bytes_);
    for (int line = 0; line < weft::kInt4Bytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
    factors_of(from, factors(place) + 16 * g, factors(place) + kUnitColumns + 16 * g);
    char* to = widened(place) + g * blocks * kInt4BlockBytes;
    widen_int4(from, blocks, to);
    if (beyond > 0) std::memset(to + blocks * kInt4BlockBytes - beyond * kInt4PairBytes, 0, beyond * kInt4PairBytes);
  }

  // Steps [k, k + n), whose columns are in places from 0 on, of at most kDotRows rows from row m on.
  void add_dots(int k, int n, int m, int rows) {
    for (int i = 0; i < n; i++) {
      const X* x = x_ + m * xs_ + (k + i) * weft::kInt4Inputs;
      const int blocks = blocks_of(k + i);
#if WEFT_LEVEL == 4
      // While the tiles are at work on two groups, half of the last step's dots are added.
      float *now = dots_of(i), *last = dots_of(i + 1);
      const bool first = i == 0;
      for (int g = 0; g < groups_; g += 2) {
        tile_matrix(x, xs_, rows, widened(i) + g * blocks * kTileBytes, std::min(2, groups_ - g), blocks, now + 16 * g,
                    kUnitColumns, false, beside_);
        if (!first)
          add_scaled(last, k + i - 1, i - 1, m, g == 0 ? 0 : rows / 2, groups_ > 2 && g == 0 ? rows / 2 : rows);
      }
      if (i == n - 1) {
        written();
        add_scaled(now, k + i, i, m, 0, rows);
      }
#else
      auto base = [&](int g) { return widened(i) + g * blocks * kInt4BlockBytes; };
      dot_all<Int4W, kTilePairs>(x, xs_, rows, base, groups_, kInt4PairBytes, kInt4PairBytes / 2, kTilePairs * blocks,
                                 dots_, kUnitColumns, false);
      add_scaled(dots_, k + i, i, m, 0, rows);
#endif
    }
  }

  // Rows [begin, end) of the dots of a step, whose rows begin at row m.
  void add_scaled(const float* dots, int step, int place, int m, int begin, int end) {
    if (groups_ == kUnitGroups)
      add_groups<kUnitGroups>(dots, step, place, m, begin, end, 0);
    else
      for (int g = 0; g < groups_; g++) add_groups<1>(dots, step, place, m, begin, end, g);
  }

  template <int N>
  void add_groups(const float* dots, int step, int place, int m, int begin, int end, int group) {
    const float *factor = factors(place) + 16 * group, *sums = sums_ + ptrdiff_t(step) * rows_ + m;
    F of_dot[N], of_sum[N];
    for (int g = 0; g < N; g++) {
      of_dot[g] = load(factor + 16 * g);
      of_sum[g] = load(factor + kUnitColumns + 16 * g);
    }
    for (int i = begin; i < end; i++) {
      const F inputs = set1(sums[i]);
      const float* from = dots + i * kUnitColumns + 16 * group;
      float* y = y_ + (m + i) * kUnitColumns + 16 * group;
      for (int g = 0; g < N; g++)
        store(y + 16 * g, fma(of_sum[g], inputs, fma(of_dot[g], load(from + 16 * g), load(y + 16 * g))));
    }
  }

#if WEFT_LEVEL == 4
  // At most sixteen rows. Of each group by turns the dots of the last step are added, those of this step begin, and the
  // columns of the next step are made, so that tiles and vectors work side by side: a tile takes long to be loaded from
  // stores that are still on their way, and long to give its sums.
  void run_few() {
    for (int g = 0; g < groups_; g++) widen(0, 0, g);
    for (int k = 0; k < steps_; k++) {
      const X* x = x_ + k * weft::kInt4Inputs;
      const int blocks = blocks_of(k);
      _tile_loadd(4, x, 2 * xs_);
      if (blocks > 1) _tile_loadd(5, x + 32, 2 * xs_);
#define WEFT_TURN(G)                                            \
  if (G < groups_) {                                            \
    if (k > 0) {                                                \
      _tile_stored(G, dots_ + 16 * G, 4 * kUnitColumns);        \
      written();                                                \
      add_groups<1>(dots_, k - 1, (k - 1) % 2, 0, 0, rows_, G); \
    }                                                           \
    const char* n = widened(k % 2) + G * blocks * kTileBytes;   \
    written();                                                  \
    _tile_zero(G);                                              \
    _tile_loadd(6, n, 64);                                      \
    _tile_dpbf16ps(G, 4, 6);                                    \
    if (blocks > 1) {                                           \
      _tile_loadd(7, n + kTileBytes, 64);                       \
      _tile_dpbf16ps(G, 5, 7);                                  \
    }                                                           \
    if (k + 1 < steps_) widen(k + 1, (k + 1) % 2, G);           \
  }
      WEFT_TURN(0)
      WEFT_TURN(1)
      WEFT_TURN(2)
      WEFT_TURN(3)
#undef WEFT_TURN
      beside_.some();
    }
    keep_groups(dots_, 4 * kUnitColumns, groups_);
    written();
    add_scaled(dots_, steps_ - 1, (steps_ - 1) % 2, 0, 0, rows_);
    beside_.all();
  }
#endif

  const X* x_;
  ptrdiff_t xs_, group_bytes_;
  int rows_, groups_, n_in_, steps_;
  const char* data_;
  char* widened_;
  float *y_, *factors_, *dots_, *sums_;
  Beside& beside_;
};

}  // namespace WEFT_NS
