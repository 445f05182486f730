// Sparse attention (FlexGen, section 5): a token attends to the best of its keys, and only their values are read.
//
// It keeps a share of the keys that it may see, no fewer than kLeastKeys, and all that score as the last of these. That
// follows from its own scores alone, whether it is decoded or part of a prompt, and a value whose weight is 0 adds 0: so
// a token's result is the same bits, whatever it is computed beside.
#pragma once
#include "attention.h"

namespace WEFT_NS {

constexpr int kLeastKeys = 16;

// How many of n numbers, in whole vectors, are no less than `bound`.
static inline int count_from(const float* x, int n, F bound) {
  F counts[4] = {zero(), zero(), zero(), zero()};
  const F one = set1(1.0f);
  for (int i = 0; i < n; i += 64)
    for (int j = 0; j < 4; j++) counts[j] = add(counts[j], where_less(load(x + i + 16 * j), bound, zero(), one));
  return int(sum(add(add(counts[0], counts[1]), add(counts[2], counts[3]))));
}

// A bound that at least k of n numbers (whole blocks) reach, all between least and most: exactly k, or the k-th itself.
static inline float bound_of_best(const float* x, int n, int k, float least, float most) {
  for (;;) {
    const float middle = least + (most - least) * 0.5f;
    if (!(middle > least && middle < most)) return least;
    const int found = count_from(x, n, set1(middle));
    if (found == k) return middle;
    (found > k ? least : most) = middle;
  }
}

// As `attend`. scores[m][stride]: memory for all positions of a row.
template <class Kind, class Kv>
static inline void attend_best(AttentionTile<Kind>& t, Kv kv, int window, const Pages& pages, float share,
                               float* scores, ptrdiff_t stride) {
  begin_tile(t, kv);
  const int end = t.position[kv.rows - 1] + 1, first = (window ? std::max(0, t.position[0] + 1 - window) : 0) / kBlock;
  const int blocks = (end + kBlock - 1) / kBlock - first;
  const F nothing = set1(-INFINITY);
  float bound[kTile];

  Block now(pages, first, end);
  for (int i = 0; i < blocks; i++) {
    const Block next(pages, first + i + 1, end);
    kv.ahead(next.k, next.groups);
    kv.scores(now);
    if (t.cap > 0) cap_scores(t, kv.rows, now.groups);
    for (int m = 0; m < kv.rows; m++) {
      const int last = t.position[m] + 1 - now.start, from = window ? std::max(0, last - window) : 0;
      for (int g = 0; g < kBlockGroups; g++)
        store(scores + m * stride + i * kBlock + 16 * g,
              g < now.groups ? lanes(from - 16 * g, last - 16 * g, load(t.scores[m] + 16 * g), nothing) : nothing);
    }
    now = next;
  }

  for (int m = 0; m < kv.rows; m++) {
    const float* s = scores + m * stride;
    F most = nothing, least = nothing;  // of the negative
    for (int i = 0; i < blocks * kBlock; i += 16) {
      const F x = load(s + i);
      most = max(most, x);
      least = max(least, where_less(nothing, x, sub(zero(), x), nothing));
    }
    const int keys = window ? std::min(window, t.position[m] + 1) : t.position[m] + 1,
              k = std::max(kLeastKeys, int(std::ceil(share * float(keys))));
    t.peak[m] = largest(most);
    bound[m] = k < keys ? bound_of_best(s, blocks * kBlock, k, -largest(least), t.peak[m]) : -INFINITY;
  }

  // Weights, in place of scores, two blocks before they meet values: those that will be read are on their way then.
  constexpr int kAhead = 2;
  const bool one_token = t.position[0] == t.position[kv.rows - 1];
  for (int i = 0; i < blocks + kAhead; i++) {
    if (i < blocks) {
      const Block b(pages, first + i, end);
      for (int m = 0; m < kv.rows; m++) {
        float* s = scores + m * stride + i * kBlock;
        F total = load(t.sums[m]);
        for (int g = 0; g < kBlockGroups; g++) {
          const F x = load(s + 16 * g);
          if (largest(x) < bound[m]) {
            store(s + 16 * g, zero());
            continue;
          }
          const F weight = where_less(x, set1(bound[m]), zero(), exp_negative(sub(x, set1(t.peak[m]))));
          total = add(total, Kv::kWeightsRounded ? rounded(Kind{}, weight) : weight);
          store(s + 16 * g, weight);
          for (int p = 0; one_token && g < b.groups && p < 16; p += 2)  // a NaN is a weight behind the last key, too
            if (s[16 * g + p] != 0 || s[16 * g + p + 1] != 0) kv.fetch_values(b, 16 * g + p);
        }
        store(t.sums[m], total);
      }
    }
    if (i < kAhead) continue;
    bool any = false;
    for (int m = 0; m < kv.rows; m++)
      for (int g = 0; g < kBlockGroups; g++) {
        const F weight = load(scores + m * stride + (i - kAhead) * kBlock + 16 * g);
        any = any || largest(weight) != 0;
        if constexpr (Kv::kWeightsRounded)
          store_as(Kind{}, t.weights[m] + 16 * g, weight);
        else
          store(t.scores[m] + 16 * g, weight);
      }
    if (!any) continue;
    const Block b(pages, first + i - kAhead, end);
    if (one_token)
      kv.few_values(b);
    else
      kv.values(b);
  }
  kv.end();
}

}  // namespace WEFT_NS
