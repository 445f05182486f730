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

// What the 64 inputs of 16 int4 outputs are made of: w = (1 + q / 16) scale + low, rounded to bf16.
struct Int4Group {
  F scale, low;
  const char* outputs;
  explicit Int4Group(const char* from) : outputs(from + 64) {
    scale = mul(load_bf16(reinterpret_cast<const uint16_t*>(from)), set1(16.0f));
    low = sub(load_bf16(reinterpret_cast<const uint16_t*>(from + 32)), scale);
  }
};

// A pair of inputs of 16 outputs, from bits `Bit` and `Bit` + 8 of their words: for tiles as bf16 lies in memory, else as
// `PairsW` reads it.
template <int Bit>
static inline void widen_pair(const uint32_t* words, const Int4Group& group, char* to) {
  const F first = fma(one_and_sixteenths<Bit>(words), group.scale, group.low), second = fma(one_and_sixteenths<Bit + 8>(words), group.scale, group.low);
#if WEFT_LEVEL == 4
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16_bits(second)), 16);
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(bf16_bits(first)), high));
#else
  store_bf16(reinterpret_cast<uint16_t*>(to), first);
  store_bf16(reinterpret_cast<uint16_t*>(to) + 16, second);
#endif
}

// Blocks [block, block + blocks) of 32 inputs of 16 int4 outputs; `block` is even.
static inline void widen_int4(const char* data, int block, int blocks, char* to) {
  for (const int end = block + blocks; block < end; block += 2, to += 2048) {
    const Int4Group group(data + block / 2 * weft::kInt4Bytes);
    uint32_t words[8][16];
    for (int r = 0; r < 16; r++)
      for (int i = 0; i < 8; i++) std::memcpy(&words[i][r], group.outputs + 32 * r + 4 * i, 4);
    for (int line = 0; line < weft::kInt4Bytes; line += 64) __builtin_prefetch(group.outputs + kStreamAhead + line, 0, 3);
    for (int i = 0; i < 8; i++) {
      widen_pair<0>(words[i], group, to + 128 * i);
      widen_pair<16>(words[i], group, to + 128 * i + 64);
    }
    for (int i = 0; i < 8 && block + 1 < end; i++) {
      widen_pair<4>(words[i], group, to + 1024 + 128 * i);
      widen_pair<20>(words[i], group, to + 1024 + 128 * i + 64);
    }
  }
}

#if WEFT_LEVEL == 4
// Two tiles of 16 int4 outputs, a row each: inputs 0 to 31 and 32 to 63 of a group. An output has sixteen numbers in a
// group, which are looked up.
static inline void tiles_of_outputs(const char* data, char* first, char* second) {
  const Int4Group group(data);
  alignas(64) float scale[16], low[16];
  store(scale, group.scale);
  store(low, group.low);
  const __m512 sixteenths = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)), _mm512_set1_ps(1.0f / 16), _mm512_set1_ps(1));
  const __m512i below = _mm512_set1_epi16(15);
  for (int r = 0; r < 16; r++) {
    const __m512 numbers = _mm512_fmadd_ps(sixteenths, _mm512_set1_ps(scale[r]), _mm512_set1_ps(low[r]));
    const __m512i table = _mm512_castsi256_si512(bf16_bits({numbers}));
    const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.outputs + 32 * r)));
    if (r % 2 == 0) _mm_prefetch(group.outputs + 32 * r + kStreamAhead, _MM_HINT_T0);
    _mm512_store_si512(first + 64 * r, _mm512_permutexvar_epi16(_mm512_and_si512(both, below), table));
    _mm512_store_si512(second + 64 * r, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table));
  }
}

// Sixteen rows of sixteen 32-bit words become columns.
static inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 16; i += 8)
    for (int c = 0; c < 4; c++) {
      t[i + c] = _mm512_shuffle_i32x4(r[i + c], r[i + 4 + c], 0x88);
      t[i + 4 + c] = _mm512_shuffle_i32x4(r[i + c], r[i + 4 + c], 0xdd);
    }
  for (int c = 0; c < 8; c++) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
  }
}

// At most sixteen rows of x: the outputs are a tile's rows here, and the rows of x its columns, since an output's numbers
// come one behind the other out of their table. What is multiplied and added, in which order, is the same.
static inline void tiles_of_int4(int n_in, const uint16_t* x, ptrdiff_t xs, int rows, const char* data, ptrdiff_t group_bytes, const Span& span, int blocks, float* y, char* widened,
                                 Prefetch& prefetch) {
  TileShape shape;
  for (int i = 0; i < 4; i++) shape.tile(i, 16, 4 * rows);
  shape.tile(4, 16, 64);
  shape.tile(5, 16, 64);
  shape.tile(6, 16, 4 * rows);
  shape.use();
  char *outputs = widened, *columns = widened + 2 * kUnitGroups * kTileBytes;  // two tiles of each group; 16 pairs of all rows
  prefetch.over(blocks);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int b = 0; b < blocks; b++) {
    const ptrdiff_t half = b % 2 * kTileBytes;
    if (half == 0)
      for (int g = 0; g < span.count; g++) tiles_of_outputs(data + g * group_bytes + b / 2 * weft::kInt4Bytes, outputs + 2 * g * kTileBytes, outputs + (2 * g + 1) * kTileBytes);
    const bool partial = n_in < 32 * (b + 1);  // what is beyond the inputs is no weight
    for (int r = 0; partial && r < 16 * span.count; r++)
      std::memset(outputs + r / 16 * 2 * kTileBytes + half + r % 16 * 64 + n_in % 32 * 2, 0, 64 - n_in % 32 * 2);
    const char* pairs = reinterpret_cast<const char*>(x + 32 * b);
    if (rows > 1) {
      __m512i r[16];
      for (int m = 0; m < 16; m++) r[m] = m < rows ? _mm512_loadu_si512(x + m * xs + 32 * b) : _mm512_setzero_si512();
      transpose(r);
      for (int p = 0; p < 16; p++) _mm512_store_si512(columns + 64 * p, r[p]);
      pairs = columns;
    }
    written();
    _tile_loadd(6, pairs, rows > 1 ? 64 : 4);
    _tile_loadd(4, outputs + half, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (span.count > 1) {
      _tile_loadd(5, outputs + 2 * kTileBytes + half, 64);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (span.count > 2) {
      _tile_loadd(4, outputs + 4 * kTileBytes + half, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (span.count > 3) {
      _tile_loadd(5, outputs + 6 * kTileBytes + half, 64);
      _tile_dpbf16ps(3, 5, 6);
    }
    prefetch.some();
  }
  float* sums = reinterpret_cast<float*>(widened);
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
  written();
  for (int g = 0; g < span.count; g++) {
    __m512i r[16];
    for (int c = 0; c < 16; c++) r[c] = _mm512_load_si512(sums + 256 * g + 16 * c);
    transpose(r);
    for (int m = 0; m < rows; m++) _mm512_storeu_si512(y + m * kUnitColumns + span.column + 16 * g, r[m]);
  }
  prefetch.all();
}
#endif

// A product of int4 columns is that of the bf16 columns that they are, 512 inputs at a time.
template <class X>
static inline void product_of_int4(const weft_matrix& w, const X* x, ptrdiff_t xs, int rows, const Span& span, int blocks, float* y, char* widened, Prefetch& prefetch) {
  const ptrdiff_t group_bytes = (blocks + 1) / 2 * weft::kInt4Bytes;
  const char* data = static_cast<const char*>(w.data) + span.group * group_bytes;
#if WEFT_LEVEL == 4
  if (rows <= 16) return tiles_of_int4(w.n_in, x, xs, rows, data, group_bytes, span, blocks, y, widened, prefetch);
  shape_for_matrix(rows);
#endif
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
    dot_all<PairsW, kTilePairs>(x + 32 * k, xs, rows, base, span.count, 64, 32, 16 * n, y + span.column, kUnitColumns, k > 0);
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
      shape_for_matrix(rows);
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
