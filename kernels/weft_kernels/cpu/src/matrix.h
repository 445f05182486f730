// One unit of a matrix product: some groups of 16 output columns for a panel of rows, into scratch memory.
#pragma once
#include "int4.h"
#include "tiles.h"
#include "unit.h"

namespace WEFT_NS {

// Number types of a kind of activations: bf16 with fp32 sums, or fp32 throughout.
struct Bf16Kind {
  using X = Bf16X;
  using W = Bf16W;  // of adapters and KV
  static constexpr int kPairBytes = int(W::kPairBytes);
};
struct Fp32Kind {
  using X = float;
  using W = Fp32W;
  static constexpr int kPairBytes = int(W::kPairBytes);
};
static inline void store_as(Bf16Kind, Bf16X* p, F a) { store_x(p, a); }
static inline void store_as(Fp32Kind, float* p, F a) { store(p, a); }

static inline F rounded(Bf16Kind, F a) { return round_bf16(a); }
static inline F rounded(Fp32Kind, F a) { return a; }

template <class W, class X>
static inline void vectors(const X* x, ptrdiff_t xs, int rows, const char* data, const Span& span, int pairs,
                           float* y) {
  auto base = [&](int g) { return data + (span.group + g) * (pairs * W::kPairBytes); };
  dot_all<W, kTilePairs, true>(x, xs, rows, base, span.count, W::kPairBytes, W::kPairBytes / 2, pairs, y + span.column,
                               kUnitColumns, false);
}

#if WEFT_LEVEL == 4
static inline void widen(const char* from, char* to, int blocks) {
  for (int i = 0; i < blocks * kTilePairs; i++) {
    if (i % 2 == 0) _mm_prefetch(from + 32 * i + kStreamAhead, _MM_HINT_T0);
    _mm512_storeu_si512(to + 64 * i, reinterpret_cast<__m512i>(bf16_columns<Int8W>(from + 32 * i)));
  }
}

static inline void tiles_of_int8(const uint16_t* x, ptrdiff_t xs, int rows, const char* data, ptrdiff_t group_bytes,
                                 const Span& span, int blocks, float* y, char* widened, Beside& beside) {
  for (int k = 0; k < blocks; k += kWidenedBlocks) {
    const int n = blocks - k < kWidenedBlocks ? blocks - k : kWidenedBlocks;
    for (int g = 0; g < span.count; g++)
      widen(data + (span.group + g) * group_bytes + k * 512, widened + g * n * kTileBytes, n);
    tile_matrix(x + 32 * k, xs, rows, widened, span.count, n, y + span.column, kUnitColumns, k > 0, beside);
  }
}
#endif

// y[rows][kUnitColumns] = x W^T (* scale) (+ bias) in the span's columns. `y` has room for whole blocks of 32 rows. What
// is `beside` has been asked for when it ends.
template <class Kind>
static inline void product(weft::Member& me, const weft_matrix& w, const typename Kind::X* x, ptrdiff_t xs, int rows,
                           const Span& span, float* y, Beside& beside) {
  const int pairs = int(round_up(w.n_in, 32) / 2);
  const char* data = static_cast<const char*>(w.data);
  if constexpr (std::is_same<Kind, Fp32Kind>::value) {
    beside.all();
    vectors<Fp32W>(x, xs, rows, data, span, pairs, y);
  } else if (w.kind == WEFT_INT4) {
    using Product = Int4Product<typename Kind::X>;
    for (int m = 0, n; m < rows; m += n) {
      n = std::min(Product::most_rows(w.n_in), rows - m);
      Product(me, w, x + m * xs, xs, n, span, y + m * kUnitColumns, beside).run();
    }
  } else {
    const bool int8 = w.kind == WEFT_INT8;
#if WEFT_LEVEL == 4
    if (!int8 || rows >= kTileRowsOfInt8) {
      const ptrdiff_t group_bytes = pairs * (int8 ? Int8W::kPairBytes : Bf16W::kPairBytes);
      shape_for_matrix(rows);
      const int blocks = pairs / kTilePairs;
      beside.over(rows <= 16 ? blocks : (rows + 31) / 32 * (span.count / 2) * blocks);
      if (int8)
        tiles_of_int8(x, xs, rows, data, group_bytes, span, blocks, y, me.scratch() + kPanelsBytes, beside);
      else
        tile_matrix(x, xs, rows, data + span.group * group_bytes, span.count, blocks, y + span.column, kUnitColumns,
                    false, beside);
      beside.all();
    } else
#endif
    {
      beside.all();
      if (int8)
        vectors<Int8W>(x, xs, rows, data, span, pairs, y);
      else
        vectors<Bf16W>(x, xs, rows, data, span, pairs, y);
    }
  }
  (void)me;
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

// The columns behind the span's, which the thread most likely takes next: while rows [row, row + rows) of `of_rows` are
// multiplied, as large a part of them is asked for. Few rows leave no time for it: there, streams run ahead themselves.
template <class Kind>
static inline void prefetch_next(const weft_matrix& w, const Span& span, int row, int rows, int of_rows,
                                 Beside& beside) {
#if WEFT_LEVEL == 4
  if (std::is_same<Kind, Fp32Kind>::value || of_rows < kManyRows) return;
  const ptrdiff_t group_bytes = weft::packed_bytes(w.kind, 16, w.n_in, 32);
  const int first = span.group + span.count, groups = std::min(span.count, (w.n_out + 15) / 16 - first);
  const ptrdiff_t lines = groups * group_bytes / 64;
  const char* data = static_cast<const char*>(w.data) + first * group_bytes;
  if (groups > 0) beside.add(data + lines * row / of_rows * 64, data + lines * (row + rows) / of_rows * 64);
#else
  (void)w, (void)span, (void)row, (void)rows, (void)of_rows, (void)beside;
#endif
}

// Which groups of a slice lie in a span: [begin, end), counted in the site's output.
struct Overlap {
  int begin, end;
  Overlap(const weft_lora_slice& slice, const Span& span)
      : begin(std::max(span.group, slice.out_start / 16)),
        end(std::min(span.group + span.count, (slice.out_start + slice.n_out) / 16)) {}
};

template <class Kind>
static inline const char* columns_of(const weft_lora_slice& slice, int group) {
  return static_cast<const char*>(slice.b) +
         (group - slice.out_start / 16) * ptrdiff_t((slice.rank + 1) / 2) * Kind::kPairBytes;
}

// The part of B that `expand` will read: each adapter's is a few lines at a place of its own, which no hardware foresees.
template <class Kind>
static inline void prefetch_expand(const weft_lora_slice& slice, const Span& span, Beside& beside) {
  const Overlap here(slice, span);
  if (here.begin < here.end) beside.add(columns_of<Kind>(slice, here.begin), columns_of<Kind>(slice, here.end));
}

// y[rows][kUnitColumns] += v B in the span's columns, for one slice of an adapter. v[rows] begins at the slice's part.
template <class Kind>
static inline void expand(const weft_lora_slice& slice, const typename Kind::X* v, ptrdiff_t vs, int rows,
                          const Span& span, float* y) {
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
    dot_all<typename Kind::W, kTilePairs>(v + done * vs, vs, rows - done, base, groups, Kind::kPairBytes,
                                          Kind::kPairBytes / 2, pairs, at + done * kUnitColumns, kUnitColumns, true);
}

}  // namespace WEFT_NS
