// One unit of a matrix product: some groups of 16 output columns for a panel of rows, into scratch memory.
#pragma once
#include <algorithm>

#include "pack.h"
#include "pool.h"
#include "tiles.h"
#include "weft_cpu.h"

namespace WEFT_NS {

constexpr int kChunkRows = 512;    // rows that a unit's columns are read for at once, at most
constexpr int kChunkBytes = 5 << 18;  // of those rows' inputs: they shall stay in the second-level cache
constexpr int kPanelRows = 256;    // rows of scratch: 256 x 64 results are 64 KiB
constexpr int kUnitGroups = 4;     // groups of a unit: 64 columns
constexpr int kUnitColumns = 16 * kUnitGroups;
constexpr int kWidenedBlocks = 16; // int8 columns for the tiles, and int4 columns, are made bf16 512 k at a time: 64 KiB

constexpr size_t kPanelBytes = sizeof(float) * kPanelRows * kUnitColumns;
constexpr size_t kWidenedBytes = size_t(kUnitGroups) * kWidenedBlocks * 1024;
static_assert(kPanelBytes + kWidenedBytes <= weft::kScratchBytes, "a thread's scratch");

// Rows of inputs of so many bytes that are worked on together: whole panels, or part of one in whole tiles.
static inline int chunk_rows(int row_bytes) {
  const int rows = std::min(kChunkRows, kChunkBytes / row_bytes);
  return rows >= kPanelRows ? rows / kPanelRows * kPanelRows : std::max(64, rows / 32 * 32);
}

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Elements from row to row of activations: whole blocks of pairs, and an odd number of cache lines, so that the sixteen
// rows of a tile lie in different sets of the first-level cache.
static inline int64_t row_stride(int64_t n, int64_t element_bytes) {
  return (round_up(n, 32) * element_bytes / 64 | 1) * 64 / element_bytes;
}

// Number types of a kind of activations: bf16 with fp32 sums, or fp32 throughout.
struct Bf16Kind {
  using X = Bf16X;
  using W = Bf16W;  // of adapters and KV
  static constexpr int kPairBytes = 64;
};
struct Fp32Kind {
  using X = float;
  using W = Fp32W;
  static constexpr int kPairBytes = 128;
};
static inline void store_as(Bf16Kind, Bf16X* p, F a) { store_x(p, a); }
static inline void store_as(Fp32Kind, float* p, F a) { store(p, a); }

static inline F rounded(Bf16Kind, F a) { return round_bf16(a); }
static inline F rounded(Fp32Kind, F a) { return a; }

// Groups [group, group + count) of a matrix, as columns [column, ...) of a unit.
struct Span {
  int group, count, column;
};

template <class W, class X>
static inline void vectors(const X* x, ptrdiff_t xs, int rows, const char* data, ptrdiff_t group_bytes, int pair_bytes, const Span& span, int pairs, float* y) {
  auto base = [&](int g) { return data + (span.group + g) * group_bytes; };
  dot_all<W, kTilePairs, true>(x, xs, rows, base, span.count, pair_bytes, pair_bytes / 2, pairs, y + span.column, kUnitColumns, false);
}

#if WEFT_LEVEL == 4
static inline void widen(const char* from, char* to, int blocks) {
  for (int i = 0; i < blocks * kTilePairs; i++) {
    if (i % 2 == 0) _mm_prefetch(from + 32 * i + kStreamAhead, _MM_HINT_T0);
    _mm512_storeu_si512(to + 64 * i, reinterpret_cast<__m512i>(bf16_columns<Int8W>(from + 32 * i)));
  }
}

static inline void tiles_of_int8(const uint16_t* x, ptrdiff_t xs, int rows, const char* data, ptrdiff_t group_bytes, const Span& span, int blocks, float* y, char* widened, Prefetch& prefetch) {
  for (int k = 0; k < blocks; k += kWidenedBlocks) {
    const int n = blocks - k < kWidenedBlocks ? blocks - k : kWidenedBlocks;
    for (int g = 0; g < span.count; g++) widen(data + (span.group + g) * group_bytes + k * 512, widened + g * n * kTileBytes, n);
    tile_matrix(x + 32 * k, xs, rows, widened, span.count, n, y + span.column, kUnitColumns, k > 0, prefetch);
  }
}
#endif

// Eight pairs of 16 int4 columns, from two lines.
template <int Pair = 0>
static inline void widen_pairs(const uint32_t* words, F scale, F low, F high_scale, F high, char* to) {
  uint16_t* pair = reinterpret_cast<uint16_t*>(to + 64 * Pair);
  store_bf16(pair, fma(one_and_sixteenths<4 * Pair>(words), scale, low));
  store_bf16(pair + 16, fma(one_and_sixteenths<4 * Pair>(words + 16), high_scale, high));
  if constexpr (Pair < 7) widen_pairs<Pair + 1>(words, scale, low, high_scale, high, to);
}

// Blocks [block, block + blocks) of a group of int4 columns as bf16; `block` is even. w = (1 + q / 16) (16 scale) + (minimum - 16 scale).
static inline void widen_int4(const char* group, int block, int blocks, char* to) {
  for (const int end = block + blocks; block < end; block += 2) {
    const char* from = group + block / 2 * weft::kInt4Bytes;
    const F scale = mul(load_bf16(reinterpret_cast<const uint16_t*>(from)), set1(16.0f));
    const F low = sub(load_bf16(reinterpret_cast<const uint16_t*>(from + 32)), scale);
    const F scales[2] = {twice(scale, false), twice(scale, true)}, lows[2] = {twice(low, false), twice(low, true)};
    for (int line = 0; line < (end - block > 1 ? 8 : 4); line += 2, to += 512) {
      const char* words = from + 64 + 64 * line;
      __builtin_prefetch(words + kStreamAhead, 0, 3);
      __builtin_prefetch(words + kStreamAhead + 64, 0, 3);
      widen_pairs(reinterpret_cast<const uint32_t*>(words), scales[0], lows[0], scales[1], lows[1], to);
    }
  }
}

// A product of int4 columns is that of the bf16 columns that they are, 512 inputs at a time.
template <class X>
static inline void product_of_int4(const weft_matrix& w, const X* x, ptrdiff_t xs, int rows, const Span& span, int blocks, float* y, char* widened, Prefetch& prefetch) {
  const ptrdiff_t group_bytes = (blocks + 1) / 2 * weft::kInt4Bytes;
  const char* data = static_cast<const char*>(w.data) + span.group * group_bytes;
  for (int k = 0; k < blocks; k += kWidenedBlocks) {
    const int n = std::min(kWidenedBlocks, blocks - k), beyond = 16 * (k + n) - (w.n_in + 1) / 2;  // pairs without an input
    const ptrdiff_t bytes = 1024 * n;
    for (int g = 0; g < span.count; g++) {
      widen_int4(data + g * group_bytes, k, n, widened + g * bytes);
      if (beyond > 0) std::memset(widened + (g + 1) * bytes - 64 * beyond, 0, 64 * beyond);
    }
#if WEFT_LEVEL == 4
    tile_matrix(x + 32 * k, xs, rows, widened, span.count, n, y + span.column, kUnitColumns, k > 0, prefetch);
#else
    auto base = [&](int g) { return widened + g * bytes; };
    dot_all<Bf16W, kTilePairs>(x + 32 * k, xs, rows, base, span.count, 64, 32, 16 * n, y + span.column, kUnitColumns, k > 0);
#endif
  }
  prefetch.all();
}

// y[rows][kUnitColumns] = x W^T (* scale) (+ bias) in the span's columns. `y` has room for whole blocks of 32 rows. What
// is `prefetch` has been asked for when it ends.
template <class Kind>
static inline void product(const weft_matrix& w, const typename Kind::X* x, ptrdiff_t xs, int rows, const Span& span, float* y, char* widened, Prefetch& prefetch) {
  const int pairs = int(round_up(w.n_in, 32) / 2);
  const char* data = static_cast<const char*>(w.data);
  if constexpr (std::is_same<Kind, Fp32Kind>::value) {
    prefetch.all();
    vectors<Fp32W>(x, xs, rows, data, ptrdiff_t(pairs) * 128, 128, span, pairs, y);
  } else if (w.kind == WEFT_INT4) {
    product_of_int4(w, x, xs, rows, span, pairs / kTilePairs, y, widened, prefetch);
  } else {
    const bool int8 = w.kind == WEFT_INT8;
    const ptrdiff_t group_bytes = ptrdiff_t(pairs) * (int8 ? 32 : 64);
#if WEFT_LEVEL == 4
    if (!int8 || rows >= kTileRowsOfInt8) {
      const int blocks = pairs / kTilePairs;
      prefetch.over(rows <= 16 ? blocks : (rows + 31) / 32 * (span.count / 2) * blocks);
      if (int8)
        tiles_of_int8(x, xs, rows, data, group_bytes, span, blocks, y, widened, prefetch);
      else
        tile_matrix(x, xs, rows, data + span.group * group_bytes, span.count, blocks, y + span.column, kUnitColumns, false, prefetch);
      prefetch.all();
    } else
#endif
    {
      prefetch.all();
      if (int8)
        vectors<Int8W>(x, xs, rows, data, group_bytes, 32, span, pairs, y);
      else
        vectors<Bf16W>(x, xs, rows, data, group_bytes, 64, span, pairs, y);
    }
  }
  (void)widened;
  for (int g = 0; g < span.count && (w.scale || w.bias); g++) {
    const int column = 16 * (span.group + g);
    const F scale = w.scale ? load(w.scale + column) : set1(1.0f);
    F bias = zero();
    if (w.bias) bias = load(w.bias + column);
    for (int m = 0; m < rows; m++) {
      float* at = y + m * kUnitColumns + span.column + 16 * g;
      F value = load(at);
      if (w.scale) value = mul(value, scale);
      if (w.bias) value = add(value, bias);
      store(at, value);
    }
  }
}

// Which groups of a slice lie in a span: [begin, end), counted in the site's output.
struct Overlap {
  int begin, end;
  Overlap(const weft_lora_slice& slice, const Span& span)
      : begin(std::max(span.group, slice.out_start / 16)), end(std::min(span.group + span.count, (slice.out_start + slice.n_out) / 16)) {}
};

template <class Kind>
static inline const char* columns_of(const weft_lora_slice& slice, int group) {
  return static_cast<const char*>(slice.b) + (group - slice.out_start / 16) * ptrdiff_t((slice.rank + 1) / 2) * Kind::kPairBytes;
}

// The part of B that `expand` will read: each adapter's is a few lines at a place of its own, which no hardware foresees.
template <class Kind>
static inline void prefetch_expand(const weft_lora_slice& slice, const Span& span, Prefetch& prefetch) {
  const Overlap here(slice, span);
  if (here.begin < here.end) prefetch.add(columns_of<Kind>(slice, here.begin), columns_of<Kind>(slice, here.end));
}

// y[rows][kUnitColumns] += v B in the span's columns, for one slice of an adapter. v[rows] begins at the slice's part.
template <class Kind>
static inline void expand(const weft_lora_slice& slice, const typename Kind::X* v, ptrdiff_t vs, int rows, const Span& span, float* y) {
  const Overlap here(slice, span);
  if (here.begin >= here.end) return;
  const int pairs = (slice.rank + 1) / 2, groups = here.end - here.begin;
  float* at = y + span.column + 16 * (here.begin - span.group);
  auto base = [&](int g) { return columns_of<Kind>(slice, here.begin + g); };
  int done = 0;
#if WEFT_LEVEL == 4
  if constexpr (std::is_same<Kind, Bf16Kind>::value) {
    done = rows / 16 * 16;
    if (done > 0) {
      shape_for_expand(pairs);
      tile_expand(v, vs, done, base, groups, pairs, at, kUnitColumns);
    }
  }
#endif
  if (done < rows)
    dot_all<typename Kind::W, kTilePairs>(v + done * vs, vs, rows - done, base, groups, Kind::kPairBytes, Kind::kPairBytes / 2, pairs,
                                          at + done * kUnitColumns, kUnitColumns, true);
}

}  // namespace WEFT_NS
