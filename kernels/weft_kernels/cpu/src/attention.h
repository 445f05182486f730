// Paged attention, one tile at a time: up to sixteen query rows (tokens x heads of one KV head) of one sequence.
//
// Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over blocks of 64 absolute positions. Which positions share
// a block depends on nothing but the positions, so a token's result is the same bits whether it was decoded, prefilled
// at once or in chunks. Weights are rounded to the activations' kind before they meet the values; their sum is the sum
// of the rounded ones.
#pragma once
#include <algorithm>

#include "matrix.h"

namespace WEFT_NS {

constexpr int kBlock = 64;                 // positions of a softmax block
constexpr int kBlockGroups = kBlock / 16;  // a page is a multiple of 16 tokens: a group of 16 lies in one page
constexpr int kTile = 16;                  // query rows of a tile
constexpr int kMostHeadDim = 256;

// A KV head of one layer: where the keys and the values of a group of 16 positions are.
struct Pages {
  const char* kv;
  ptrdiff_t page_bytes, head_bytes, keys_at, values_at;
  const int32_t* table;
  int page_tokens;

  const char* group(int position, ptrdiff_t at) const {
    const int page = position / page_tokens;
    return kv + table[page] * page_bytes + at + position % page_tokens / 16 * (head_bytes / (page_tokens / 16));
  }
  const char* keys(int position) const { return group(position, keys_at); }
  const char* values(int position) const { return group(position, values_at); }
};

template <class Kind>
struct alignas(64) AttentionTile {
  using X = typename Kind::X;
  float scores[kTile][kBlock];
  float sums[kTile][16];
  float out[kTile][kMostHeadDim];
  X weights[kTile][kBlock];
  X queries[kTile][kMostHeadDim];
  float peak[kTile];
  int position[kTile];
};

template <class Kind>
static inline void attend_block(AttentionTile<Kind>& t, int rows, int head_dim, int window, const Pages& pages, int block, int end) {
  const int start = block * kBlock, groups = std::min(kBlockGroups, (end - start + 15) / 16);
  const char* k[kBlockGroups];
  const char* v[kBlockGroups];
  for (int g = 0; g < groups; g++) {
    k[g] = pages.keys(start + 16 * g);
    v[g] = pages.values(start + 16 * g);
  }
  constexpr int kPairBytes = Kind::kPairBytes;
  bool tiles = false;
#if WEFT_LEVEL == 4
  if constexpr (std::is_same<Kind, Bf16Kind>::value) {
    tiles = head_dim % 32 == 0;
    if (tiles) tile_scores(t.queries[0], kMostHeadDim, k, groups, head_dim / 32, t.scores[0], kBlock);
  }
#endif
  if (!tiles)
    dot_all<typename Kind::W, kTilePairs>(
        t.queries[0], kMostHeadDim, rows, [&](int g) { return k[g]; }, groups, kPairBytes, kPairBytes / 2, head_dim / 2, t.scores[0], kBlock, false);

  const F nothing = set1(-INFINITY);
  for (int m = 0; m < rows; m++) {
    const int last = t.position[m] + 1 - start, first = window ? std::max(0, last - window) : 0;
    if (last <= 0 || first >= kBlock) {
      for (int g = 0; g < kBlockGroups; g++) store_as(Kind{}, t.weights[m] + 16 * g, zero());
      continue;
    }
    F s[kBlockGroups], best = nothing;
    const bool whole = first == 0 && last >= 16 * groups;
    for (int g = 0; g < groups; g++) {
      s[g] = load(t.scores[m] + 16 * g);
      if (!whole) s[g] = lanes(first - 16 * g, last - 16 * g, s[g], nothing);
      best = max(best, s[g]);
    }
    const float before = t.peak[m], peak = std::max(before, largest(best));
    F sum = load(t.sums[m]);
    if (peak != before) {  // what was summed so far shrinks; nothing was before the first block
      const F shrink = exp_negative(set1(before - peak));
      sum = mul(sum, shrink);
      for (int d = 0; d < head_dim; d += 16) store(t.out[m] + d, mul(load(t.out[m] + d), shrink));
    }
    for (int g = 0; g < groups; g++) {
      const F weight = exp_negative(sub(s[g], set1(peak)));
      store_as(Kind{}, t.weights[m] + 16 * g, weight);
      sum = add(sum, rounded(Kind{}, weight));
    }
    store(t.sums[m], sum);
    t.peak[m] = peak;
  }

  const ptrdiff_t step = ptrdiff_t(head_dim) * (kPairBytes / 16), second_at = step / 2;
#if WEFT_LEVEL == 4
  if constexpr (std::is_same<Kind, Bf16Kind>::value) {
    if (tiles) {
      tile_values(t.weights[0], kBlock, v, groups, step, head_dim / 16, t.out[0], kMostHeadDim);
      return;
    }
  }
#endif
  for (int g = 0; g < groups; g++)
    dot_all<typename Kind::W, kValuePairs>(
        t.weights[0] + 16 * g, kBlock, rows, [&](int c) { return v[g] + 64 * c; }, head_dim / 16, step, second_at, kValuePairs, t.out[0], kMostHeadDim, true);
}

// Attend with `rows` queries at t.position[...] (ascending), set in t.queries, scaled. t.out holds the result, not yet
// divided by the sum of weights: `attended` does that.
template <class Kind>
static inline void attend(AttentionTile<Kind>& t, int rows, int head_dim, int window, const Pages& pages) {
  for (int m = 0; m < rows; m++) {
    t.peak[m] = -INFINITY;
    store(t.sums[m], zero());
    for (int d = 0; d < head_dim; d += 16) store(t.out[m] + d, zero());
  }
#if WEFT_LEVEL == 4
  if (std::is_same<Kind, Bf16Kind>::value) shape_for_attention(rows);
#endif
  const int end = t.position[rows - 1] + 1;
  const int begin = window ? std::max(0, t.position[0] + 1 - window) : 0;
  for (int block = begin / kBlock; block * kBlock < end; block++) attend_block(t, rows, head_dim, window, pages, block, end);
}

template <class Kind>
static inline void attended(const AttentionTile<Kind>& t, int m, int head_dim, typename Kind::X* out) {
  const F whole = set1(1.0f / sum(load(t.sums[m])));
  for (int d = 0; d < head_dim; d += 16) store_as(Kind{}, out + d, mul(load(t.out[m] + d), whole));
}

// Keys and values of one token and KV head into their page: [P/16][D/2][16][2] and [P/2][D][2]; fp32 [P/16][D][16] and [P][D].
static inline void append(Bf16Kind, char* keys, char* values, int offset, const float* k, const float* v, int head_dim) {
  uint16_t narrow[2][kMostHeadDim];
  for (int d = 0; d < head_dim; d += 16) {
    store_bf16(narrow[0] + d, load(k + d));
    store_bf16(narrow[1] + d, load(v + d));
  }
  uint16_t* to_k = reinterpret_cast<uint16_t*>(keys) + 2 * offset;
  uint16_t* to_v = reinterpret_cast<uint16_t*>(values) + offset / 2 * (2 * head_dim) + offset % 2;
  for (int d = 0; d < head_dim; d += 2) std::memcpy(to_k + 16 * d, narrow[0] + d, 4);
  for (int d = 0; d < head_dim; d++) to_v[2 * d] = narrow[1][d];
}
static inline void append(Fp32Kind, char* keys, char* values, int offset, const float* k, const float* v, int head_dim) {
  float* to_k = reinterpret_cast<float*>(keys) + offset;
  for (int d = 0; d < head_dim; d++) to_k[16 * d] = k[d];
  std::memcpy(reinterpret_cast<float*>(values) + offset * head_dim, v, sizeof(float) * head_dim);
}

}  // namespace WEFT_NS
