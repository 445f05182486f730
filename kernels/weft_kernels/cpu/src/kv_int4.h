// Keys and values in int4 (FlexGen, section 5): the numbers of a position and KV head in groups along the head, of 64, or
// of 32 where the head is no multiple of 64. Each is w = minimum + scale q, 0 <= q <= 15, scale and minimum in bf16.
//
// 16 positions of a group are bf16 scale[16], bf16 minimum[16], then lines of 16 words, in which bits 4 j and 16 + 4 j
// begin a pair of numbers that a product reads side by side. A position has bytes of its own, since several threads may
// write those around it:
//
//   keys    as pack.h has int4 weights: word r of line i has numbers 8 i to 8 i + 7 of position r
//   values  word w of line 4 h + i has numbers 32 h + w (low half of each byte) and 32 h + 16 + w of positions 4 i + 0, 2,
//           1, 3, a byte each
//
// Products take n = 1 + q / 16, which bf16 holds exactly, as int4.h does. With the sum of a group's queries
//
//   q k = 16 scale (q n) + (minimum - 16 scale) sum q
//
// and a value's scale goes into its weight: with r = w 16 scale, rounded to the activations' kind,
//
//   sum of w v = sum of r n + sum of (w minimum - r)
#pragma once
#include "int4.h"

namespace WEFT_NS {

constexpr int kPositions = 16;  // whose keys, or values, lie together

static inline int kv_group(int head_dim) { return head_dim % 64 == 0 ? 64 : 32; }
static inline ptrdiff_t kv_group_bytes(int group) { return 64 + kPositions * group / 2; }
// Of 16 positions' keys, or values, of a head.
static inline ptrdiff_t kv_int4_bytes(int head_dim) {
  return head_dim / kv_group(head_dim) * kv_group_bytes(kv_group(head_dim));
}

// A group's numbers in 15 steps between the least and the largest: scale and minimum as bf16, and the steps.
static inline void round_to_int4(const float* from, int group, uint16_t& scale, uint16_t& minimum, uint32_t* steps) {
  F most = load(from), least = sub(zero(), most);
  for (int d = 16; d < group; d += 16) {
    const F x = load(from + d);
    most = max(most, x);
    least = max(least, sub(zero(), x));
  }
  const float low = -largest(least);
  uint16_t narrow[2][16];
  store_bf16(narrow[0], div(set1(largest(most) - low), set1(15.0f)));
  store_bf16(narrow[1], set1(low));
  scale = narrow[0][0];
  minimum = narrow[1][0];
  const F unit = load_bf16(narrow[0]), begin = load_bf16(narrow[1]), top = set1(15.0f);
  for (int d = 0; d < group; d += 16) {
    F step = max(div(sub(load(from + d), begin), unit), zero());      // 0 / 0, where all are alike, is 0
    step = add(where_less(step, top, step, top), set1(12582912.0f));  // the low bits of the mantissa, to nearest even
    float bits[16];
    store(bits, step);
    std::memcpy(steps + d, bits, 64);
    for (int i = 0; i < 16; i++) steps[d + i] &= 15;
  }
}

// Keys of one token and KV head into the 16 positions where they lie, of which it is number `offset`.
static inline void append_int4_keys(char* keys, int offset, const float* k, int head_dim) {
  const int group = kv_group(head_dim);
  uint32_t q[64];
  uint16_t scale, minimum;
  for (int d = 0; d < head_dim; d += group, keys += kv_group_bytes(group)) {
    round_to_int4(k + d, group, scale, minimum, q);
    std::memcpy(keys + 2 * offset, &scale, 2);
    std::memcpy(keys + 32 + 2 * offset, &minimum, 2);
    for (int i = 0; i < group; i += 8) {
      const uint32_t first = q[i] | q[i + 2] << 4 | q[i + 4] << 8 | q[i + 6] << 12;
      const uint32_t word = first | (q[i + 1] | q[i + 3] << 4 | q[i + 5] << 8 | q[i + 7] << 12) << 16;
      std::memcpy(keys + 64 + 8 * i + 4 * offset, &word, 4);
    }
  }
}

// The same of values.
static inline void append_int4_values(char* values, int offset, const float* v, int head_dim) {
  const int group = kv_group(head_dim);
  uint32_t q[64];
  uint16_t scale, minimum;
  for (int d = 0; d < head_dim; d += group, values += kv_group_bytes(group)) {
    round_to_int4(v + d, group, scale, minimum, q);
    std::memcpy(values + 2 * offset, &scale, 2);
    std::memcpy(values + 32 + 2 * offset, &minimum, 2);
    char* to = values + 64 + offset / 4 * 64 + (offset % 2 * 2 + offset % 4 / 2);
    for (int h = 0; h < group; h += 32)
      for (int w = 0; w < 16; w++) to[8 * h + 4 * w] = char(q[h + w] | q[h + 16 + w] << 4);
  }
}

// n of a group's values of 16 positions: [8 pairs of positions][group / 16] of what `widen_pair` makes.
static inline void widen_values(const char* from, int group, char* to) {
  const ptrdiff_t pair = group / 16 * kInt4PairBytes;
  for (int h = 0; h < group / 32; h++, to += 2 * kInt4PairBytes)
    for (int i = 0; i < 4; i++) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(from + 64 * (4 * h + i + 1));
      char* first = to + 2 * i * pair;
      widen_pair<0>(words, first);
      widen_pair<4>(words, first + kInt4PairBytes);
      widen_pair<8>(words, first + pair);
      widen_pair<12>(words, first + pair + kInt4PairBytes);
    }
}

}  // namespace WEFT_NS
