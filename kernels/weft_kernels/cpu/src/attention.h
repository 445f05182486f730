// Paged attention, one tile at a time: up to sixteen query rows (tokens x heads of one KV head) of one sequence.
//
// Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over blocks of 64 absolute positions. Which positions share
// a block depends on nothing but the positions, so a token's result is the same bits whether it was decoded, prefilled
// at once or in chunks. Weights are rounded to the activations' kind before they meet the values; their sum is the sum
// of the rounded ones. Of int4 values they are rounded with the scales in them, and their sum is that of what they were.
#pragma once
#include <algorithm>

#include "kv_int4.h"
#include "matrix.h"

namespace WEFT_NS {

constexpr int kBlock = 64;                 // positions of a softmax block
constexpr int kBlockGroups = kBlock / 16;  // a page is a multiple of 16 tokens: a group of 16 lies in one page
constexpr int kTile = 16;                  // query rows of a tile
constexpr int kMostHeadDim = 256;

// A KV head of one layer: where the keys and the values of a group of 16 positions are.
struct Pages {
  const char* kv;
  ptrdiff_t page_bytes, group_bytes, keys_at, values_at;
  const int32_t* table;
  int page_groups;

  const char* group(int position) const {
    const int group = position / 16, page = group / page_groups;
    return kv + table[page] * page_bytes + (group - page * page_groups) * group_bytes;
  }
  const char* keys(int position) const { return group(position) + keys_at; }
  const char* values(int position) const { return group(position) + values_at; }
};

template <class Kind>
struct alignas(64) AttentionTile {
  using X = typename Kind::X;
  float places[2][kTile][kBlock];
  float sums[kTile][16];
  float out[kTile][kMostHeadDim];
  X weights[kTile][kBlock];
  X queries[kTile][kMostHeadDim];
  float peak[kTile];
  int position[kTile];
  float (*scores)[kBlock];  // of the block in hand: one of `places`, by turns
  float cap;                // of scores; 0: none
};

// A block's groups of 16 positions, as far as there are keys.
struct Block {
  int start, groups;
  const char* k[kBlockGroups];
  const char* v[kBlockGroups];

  Block(const Pages& pages, int block, int end)
      : start(block * kBlock), groups(std::min(kBlockGroups, (end - start + 15) / 16)) {
    for (int g = 0; g < groups; g++) {
      const char* at = pages.group(start + 16 * g);
      k[g] = at + pages.keys_at;
      v[g] = at + pages.values_at;
    }
  }
};

#if WEFT_LEVEL == 4
template <class Kind>
constexpr bool kTiles = std::is_same<Kind, Bf16Kind>::value;
#else
template <class Kind>
constexpr bool kTiles = false;
#endif

static inline void fetch_lines(const char* from, ptrdiff_t n_bytes) {
  asm volatile("");  // GCC takes a function that only prefetches for one without effects, and leaves out its calls
  for (ptrdiff_t line = 0; line < n_bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

// y[16 columns] += x W of the pairs of rows in a mask, in dot.h's order.
template <class W, class X>
static inline void add_pairs(const X* x, const char* w, ptrdiff_t step, ptrdiff_t second_at, unsigned pairs,
                             int columns, float* y) {
  for (int c = 0; c < columns; c++, w += 64, y += 16) {
#if WEFT_LEVEL == 3
    if constexpr (std::is_same<X, uint16_t>::value) {
      F sums = load(y);
      for (unsigned left = pairs; left != 0; left &= left - 1) {
        const int p = __builtin_ctz(left);
        int32_t pair;
        std::memcpy(&pair, x + 2 * p, 4);
        sums = {_mm512_dpbf16_ps(sums.v, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)),
                                 bf16_columns<W>(w + p * step))};
      }
      store(y, sums);
      continue;
    }
#endif
    F even = zero(), odd = zero();
    for (unsigned left = pairs; left != 0; left &= left - 1) {
      const int p = __builtin_ctz(left);
      F first, second, a, b;
      W::pair(w + p * step, second_at, first, second);
      spread(x + 2 * p, a, b);
      even = fma(a, first, even);
      odd = fma(b, second, odd);
    }
    store(y, add(load(y), add(even, odd)));
  }
}

// Keys and values in the activations' kind.
template <class Kind>
struct PlainKv {
  static constexpr bool kWeightsRounded = true;
  AttentionTile<Kind>& t;
  const int rows, head_dim;
  const bool tiles = kTiles<Kind> && head_dim % 32 == 0;
  const ptrdiff_t step = ptrdiff_t(head_dim) * (Kind::kPairBytes / 16);  // of a pair of positions' values

  void begin() {}
  // Pages lie anywhere: no hardware foresees the next block.
  void ahead(const char* const* of_groups, int n_groups) const {
    for (int g = 0; g < n_groups; g++) fetch_lines(of_groups[g], 8 * step);
  }
  void shrink(int, F) {}
  void end() {}

  void scores(const Block& b) {
    constexpr int kPairBytes = Kind::kPairBytes;
#if WEFT_LEVEL == 4
    if constexpr (kTiles<Kind>)
      if (tiles) return tile_scores(t.queries[0], kMostHeadDim, b.k, b.groups, head_dim / 32, t.scores[0], kBlock);
#endif
    dot_all<typename Kind::W, kTilePairs>(
        t.queries[0], kMostHeadDim, rows, [&](int g) { return b.k[g]; }, b.groups, kPairBytes, kPairBytes / 2,
        head_dim / 2, t.scores[0], kBlock, false);
  }

  void values(const Block& b) {
#if WEFT_LEVEL == 4
    if constexpr (kTiles<Kind>)
      if (tiles) return tile_values(t.weights[0], kBlock, b.v, b.groups, step, head_dim / 16, t.out[0], kMostHeadDim);
#endif
    for (int g = 0; g < b.groups; g++)
      dot_all<typename Kind::W, kValuePairs>(
          t.weights[0] + 16 * g, kBlock, rows, [&](int c) { return b.v[g] + 64 * c; }, head_dim / 16, step, step / 2,
          kValuePairs, t.out[0], kMostHeadDim, true);
  }

  // The same of one token's rows, of which few weights are not 0: what these are multiplied with is all that is read, and
  // others would add 0.
  void few_values(const Block& b) {
    for (int g = 0; g < b.groups; g++)
      for (int m = 0; m < rows; m++) {
        const typename Kind::X* weights = t.weights[m] + 16 * g;
        unsigned pairs = 0;
        for (int p = 0; p < kValuePairs; p++) pairs |= unsigned(weights[2 * p] != 0 || weights[2 * p + 1] != 0) << p;
        if (pairs != 0) add_pairs<typename Kind::W>(weights, b.v[g], step, step / 2, pairs, head_dim / 16, t.out[m]);
      }
  }

  void fetch_values(const Block& b, int position) const {
    fetch_lines(b.v[position / 16] + position % 16 / 2 * step, step);
  }
};

// Keys and values in int4: see kv_int4.h. `Memory` is scratch.
template <class Kind>
struct Int4Kv {
  static constexpr bool kWeightsRounded = false;
  static constexpr int kMostGroups = kMostHeadDim / 32;
  struct alignas(64) Memory {
    float dots[kTile][kBlock];
    float beside[kTile][kMostGroups][16];  // sums of w minimum - r, by position modulo 16
    float sums[kTile][kMostGroups];        // of a group's queries
    char widened[kBlock * 64 / 2 * kInt4PairBytes / 16];
  };
  AttentionTile<Kind>& t;
  const int rows, head_dim;
  Memory& m;
  const int group = kv_group(head_dim), groups = head_dim / group;
  const ptrdiff_t group_bytes = kv_group_bytes(group);

  void begin() {
    for (int i = 0; i < rows; i++)
      for (int c = 0; c < groups; c++) {
        F total = zero();
        for (int d = c * group; d < (c + 1) * group; d += 16) total = add(total, load_x(t.queries[i] + d));
        m.sums[i][c] = sum(total);
        store(m.beside[i][c], zero());
      }
  }

  void ahead(const char* const* of_groups, int n_groups) const {
    for (int g = 0; g < n_groups; g++) fetch_lines(of_groups[g], groups * group_bytes);
  }

  void scores(const Block& b) {
    const ptrdiff_t widened_bytes = group / 2 * kInt4PairBytes;  // of 16 positions
    for (int c = 0; c < groups; c++) {
      for (int g = 0; g < b.groups; g++)
        widen_int4(b.k[g] + c * group_bytes, group / 32, m.widened + g * widened_bytes);
      const auto* q = t.queries[0] + c * group;
#if WEFT_LEVEL == 4
      if constexpr (kTiles<Kind>) {
        const char* k[kBlockGroups];
        for (int g = 0; g < b.groups; g++) k[g] = m.widened + g * widened_bytes;
        tile_scores(q, kMostHeadDim, k, b.groups, group / 32, m.dots[0], kBlock);
        written();
      } else
#endif
        dot_all<Int4W, kTilePairs>(
            q, kMostHeadDim, rows, [&](int g) { return m.widened + g * widened_bytes; }, b.groups, kInt4PairBytes,
            kInt4PairBytes / 2, group / 2, m.dots[0], kBlock, false);
      for (int g = 0; g < b.groups; g++) {
        alignas(64) float of_dot[16], of_sum[16];
        factors_of(b.k[g] + c * group_bytes, of_dot, of_sum);
        const F scale = load(of_dot), rest = load(of_sum);
        for (int i = 0; i < rows; i++) {
          float* s = t.scores[i] + 16 * g;
          store(s, fma(rest, set1(m.sums[i][c]), fma(scale, load(m.dots[i] + 16 * g), c == 0 ? zero() : load(s))));
        }
      }
    }
  }

  void shrink(int row, F by) {
    for (int c = 0; c < groups; c++) store(m.beside[row][c], mul(load(m.beside[row][c]), by));
  }

  void values(const Block& b) {
    const ptrdiff_t widened_bytes = kPositions / 2 * (group / 16) * kInt4PairBytes, step = group / 16 * kInt4PairBytes;
    for (int c = 0; c < groups; c++) {
      for (int g = 0; g < b.groups; g++) {
        const char* from = b.v[g] + c * group_bytes;
        const F scale = mul(load_bf16(reinterpret_cast<const uint16_t*>(from)), set1(16.0f)),
                minimum = load_bf16(reinterpret_cast<const uint16_t*>(from + 32));
        for (int i = 0; i < rows; i++) {
          const F weight = load(t.scores[i] + 16 * g), scaled = mul(weight, scale);
          store_as(Kind{}, t.weights[i] + 16 * g, scaled);
          store(m.beside[i][c], sub(fma(weight, minimum, load(m.beside[i][c])), rounded(Kind{}, scaled)));
        }
        widen_values(from, group, m.widened + g * widened_bytes);
      }
      float* out = t.out[0] + c * group;
#if WEFT_LEVEL == 4
      if constexpr (kTiles<Kind>) {
        const char* v[kBlockGroups];
        for (int g = 0; g < b.groups; g++) v[g] = m.widened + g * widened_bytes;
        tile_values(t.weights[0], kBlock, v, b.groups, step, group / 16, out, kMostHeadDim);
        written();
        continue;
      }
#endif
      for (int g = 0; g < b.groups; g++)
        dot_all<Int4W, kValuePairs>(
            t.weights[0] + 16 * g, kBlock, rows,
            [&](int d) { return m.widened + g * widened_bytes + d * kInt4PairBytes; }, group / 16, step,
            kInt4PairBytes / 2, kValuePairs, out, kMostHeadDim, true);
    }
  }

  void few_values(const Block& b) { values(b); }

  void fetch_values(const Block& b, int position) const { fetch_lines(b.v[position / 16], groups * group_bytes); }

  void end() {
    for (int i = 0; i < rows; i++)
      for (int c = 0; c < groups; c++) {
        const F beside = set1(sum(load(m.beside[i][c])));
        for (int d = c * group; d < (c + 1) * group; d += 16) store(t.out[i] + d, add(load(t.out[i] + d), beside));
      }
  }
};

template <class Kind>
static inline void cap_scores(AttentionTile<Kind>& t, int rows, int groups) {
  const F cap = set1(t.cap);
  for (int m = 0; m < rows; m++)
    for (int g = 0; g < groups; g++) store(t.scores[m] + 16 * g, capped(load(t.scores[m] + 16 * g), cap));
}

// A block's scores, in place, into weights: rounded ones into t.weights, others stay in t.scores.
template <class Kind, class Kv>
static inline void weigh(AttentionTile<Kind>& t, Kv& kv, int window, const Block& b) {
  const F nothing = set1(-INFINITY);
  if (t.cap > 0) cap_scores(t, kv.rows, b.groups);
  for (int m = 0; m < kv.rows; m++) {
    const int last = t.position[m] + 1 - b.start, first = window ? std::max(0, last - window) : 0;
    if (last <= 0 || first >= kBlock) {
      for (int g = 0; g < kBlockGroups; g++)
        if constexpr (Kv::kWeightsRounded)
          store_as(Kind{}, t.weights[m] + 16 * g, zero());
        else
          store(t.scores[m] + 16 * g, zero());
      continue;
    }
    F s[kBlockGroups], best = nothing;
    const bool whole = first == 0 && last >= 16 * b.groups;
    for (int g = 0; g < b.groups; g++) {
      s[g] = load(t.scores[m] + 16 * g);
      if (!whole) s[g] = lanes(first - 16 * g, last - 16 * g, s[g], nothing);
      best = max(best, s[g]);
    }
    const float before = t.peak[m], peak = std::max(before, largest(best));
    F sum = load(t.sums[m]);
    if (peak != before) {  // what was summed so far shrinks; nothing was before the first block
      const F shrink = exp_negative(set1(before - peak));
      sum = mul(sum, shrink);
      for (int d = 0; d < kv.head_dim; d += 16) store(t.out[m] + d, mul(load(t.out[m] + d), shrink));
      kv.shrink(m, shrink);
    }
    for (int g = 0; g < b.groups; g++) {
      const F weight = exp_negative(sub(s[g], set1(peak)));
      if constexpr (Kv::kWeightsRounded) {
        store_as(Kind{}, t.weights[m] + 16 * g, weight);
        sum = add(sum, rounded(Kind{}, weight));
      } else {
        store(t.scores[m] + 16 * g, weight);
        sum = add(sum, weight);
      }
    }
    store(t.sums[m], sum);
    t.peak[m] = peak;
  }
}

template <class Kind, class Kv>
static inline void begin_tile(AttentionTile<Kind>& t, Kv& kv) {
  t.scores = t.places[0];
  for (int m = 0; m < kv.rows; m++) {
    t.peak[m] = -INFINITY;
    store(t.sums[m], zero());
    for (int d = 0; d < kv.head_dim; d += 16) store(t.out[m] + d, zero());
  }
#if WEFT_LEVEL == 4
  if (kTiles<Kind>) shape_for_attention(kv.rows);
#endif
  kv.begin();
}

template <class Kv>
static inline void both_ahead(const Kv& kv, const Block& next) {
  kv.ahead(next.k, next.groups);
  kv.ahead(next.v, next.groups);
}

// Attend with the queries at t.position[...] (ascending), set in t.queries, scaled. t.out holds the result, not yet
// divided by the sum of weights: `attended` does that.
template <class Kind, class Kv>
static inline void attend(AttentionTile<Kind>& t, Kv kv, int window, const Pages& pages) {
  begin_tile(t, kv);
  const int end = t.position[kv.rows - 1] + 1;
  const int begin = window ? std::max(0, t.position[0] + 1 - window) : 0;
  const int first = begin / kBlock;
  Block now(pages, first, end), next(pages, first + 1, end);  // of no groups behind the last
  both_ahead(kv, next);
  kv.scores(now);
  for (int block = first; block * kBlock < end; block++) {
    Block after(pages, block + 2, end);
    both_ahead(kv, after);
    const int place = (block - first) % 2;
    t.scores = t.places[1 - place];
    if (next.groups > 0) kv.scores(next);  // they take long, and nothing waits for them before the block after this one
    t.scores = t.places[place];
    weigh(t, kv, window, now);
    kv.values(now);
    now = next;
    next = after;
  }
  kv.end();
}

// `spoilt`: a guess whose values are no numbers: its result is none.
template <class Kind>
static inline void attended(const AttentionTile<Kind>& t, int m, int head_dim, bool spoilt, typename Kind::X* out) {
  const F whole = set1(spoilt ? NAN : 1.0f / sum(load(t.sums[m])));
  for (int d = 0; d < head_dim; d += 16) store_as(Kind{}, out + d, mul(load(t.out[m] + d), whole));
}

// Keys, or values, of one token and KV head into their page: [P/16][D/2][16][2] and [P/2][D][2]; fp32 [P/16][D][16] and [P][D].
static inline void append_keys(Bf16Kind, char* keys, int offset, const float* k, int head_dim) {
  uint16_t narrow[kMostHeadDim], *to = reinterpret_cast<uint16_t*>(keys) + 2 * offset;
  for (int d = 0; d < head_dim; d += 16) store_bf16(narrow + d, load(k + d));
  for (int d = 0; d < head_dim; d += 2) std::memcpy(to + 16 * d, narrow + d, 4);
}
static inline void append_values(Bf16Kind, char* values, int offset, const float* v, int head_dim) {
  uint16_t narrow[kMostHeadDim], *to = reinterpret_cast<uint16_t*>(values) + offset / 2 * (2 * head_dim) + offset % 2;
  for (int d = 0; d < head_dim; d += 16) store_bf16(narrow + d, load(v + d));
  for (int d = 0; d < head_dim; d++) to[2 * d] = narrow[d];
}
static inline void append_keys(Fp32Kind, char* keys, int offset, const float* k, int head_dim) {
  float* to = reinterpret_cast<float*>(keys) + offset;
  for (int d = 0; d < head_dim; d++) to[16 * d] = k[d];
}
static inline void append_values(Fp32Kind, char* values, int offset, const float* v, int head_dim) {
  std::memcpy(reinterpret_cast<float*>(values) + offset * head_dim, v, sizeof(float) * head_dim);
}

}  // namespace WEFT_NS
