// AMX tiles: the same arithmetic as dot.h (tile32), sixteen rows by sixteen columns by up to sixteen pairs at a time.
//
// Rows are independent in a tile, so a block may hold rows that no caller reads: memory of x and y has to be there for
// whole blocks of sixteen rows, what comes out for the surplus rows is never read.
#pragma once
#include "beside.h"
#include "dot.h"

#if WEFT_LEVEL == 4
namespace WEFT_NS {

// bf16 uses tiles for any number of rows. int8 has to be widened for them, which fewer rows than these do not repay.
constexpr int kTileRowsOfInt8 = 4;

struct alignas(64) TileShape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void tile(int index, int n_rows, int n_bytes) {
    rows[index] = static_cast<uint8_t>(n_rows);
    bytes[index] = static_cast<uint16_t>(n_bytes);
  }
  void use() const;
};
static_assert(sizeof(TileShape) == 64, "what LDTILECFG reads");
static thread_local TileShape tiles_in_use;  // by this thread; at first with no rows, which is no shape

// Only when it changes: LDTILECFG takes 200 cycles and waits for all that the tiles are doing, together some 500.
inline void TileShape::use() const {
  if (std::memcmp(this, &tiles_in_use, sizeof(TileShape)) == 0) return;
  // As inline assembly: the compiler's intrinsic does not say that it reads all 64 bytes.
  asm volatile("ldtilecfg %0" ::"m"(*this) : "memory");
  tiles_in_use = *this;
}
// The thread's tiles are anybody's from here on.
static inline void leave_tiles() {
  asm volatile("tilerelease" ::: "memory");
  tiles_in_use.palette = 0;
}

// A matrix: 0-3 sums, 4-5 rows, 6-7 columns; `rows` of the row and sum tiles.
static inline void shape_for_matrix(int rows) {
  TileShape shape;
  for (int i = 0; i < 6; i++) shape.tile(i, rows < 16 ? rows : 16, 64);
  for (int i = 6; i < 8; i++) shape.tile(i, 16, 64);
  shape.use();
}

constexpr ptrdiff_t kTileBytes = 1024;
constexpr int kPartBlocks = 24;

// Before tiles are loaded: GCC's _tile_loadd does not say that it reads memory, which may just have been written.
static inline void written() { asm volatile("" ::: "memory"); }

static inline void fetch(const char* p) {
  for (int i = 0; i < kTileBytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
}

// Tiles 0 to 3: two beside each other at `first`, two at `second`, `stride` bytes from row to row.
static inline void begin_sums(const float* first, const float* second, ptrdiff_t stride, bool onto) {
  if (onto) {
    _tile_loadd(0, first, stride);
    _tile_loadd(1, first + 16, stride);
    _tile_loadd(2, second, stride);
    _tile_loadd(3, second + 16, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
}
static inline void keep_sums(float* first, float* second, ptrdiff_t stride) {
  _tile_stored(0, first, stride);
  _tile_stored(1, first + 16, stride);
  _tile_stored(2, second, stride);
  _tile_stored(3, second + 16, stride);
}

// y[16][64] (+)= x[16][32 blocks] columns of four groups that lie one behind the other: few rows, weights stream past. At
// a group's end its stream goes on with the same group of the next four.
static inline void tiles_16x64(const uint16_t* x, ptrdiff_t x_stride, const char* w, int blocks, float* y,
                               ptrdiff_t y_stride, bool onto, Beside& beside) {
  const ptrdiff_t xs = x_stride * 2, ys = y_stride * 4, group = blocks * kTileBytes;
  begin_sums(y, y + 32, ys, onto);
  for (int k = 0; k < blocks; k++, w += kTileBytes) {
    const char* far = w + kStreamAhead + ((k + 1) * kTileBytes + kStreamAhead > group ? 3 * group : 0);
    _tile_loadd(4, x + 32 * k, xs);
    _tile_loadd(6, w, 64);
    fetch(far);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + group, 64);
    fetch(far + group);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, w + 2 * group, 64);
    fetch(far + 2 * group);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, w + 3 * group, 64);
    fetch(far + 3 * group);
    _tile_dpbf16ps(3, 4, 7);
    beside.some();
  }
  keep_sums(y, y + 32, ys);
}

// y[32][32] (+)= x[32][32 blocks] columns of two groups, `group` bytes apart: many rows. `kStream`: the first of them, and
// weights stream past as above, in half as many streams and so asked for twice as far ahead. `kPass`: other rows follow,
// and these are loaded past the first-level cache, in which the columns stay for them.
template <bool kStream, bool kPass>
static inline void tiles_32x32(const uint16_t* x, ptrdiff_t x_stride, const char* w, ptrdiff_t group, int blocks,
                               float* y, ptrdiff_t y_stride, bool onto, Beside& beside) {
  const ptrdiff_t xs = x_stride * 2, ys = y_stride * 4;
  const uint16_t* below = x + 16 * x_stride;
  float* y_below = y + 16 * y_stride;
  begin_sums(y, y_below, ys, onto);
  for (int k = 0; k < blocks; k++, w += kTileBytes) {
    const char* far = w + 2 * kStreamAhead + ((k + 1) * kTileBytes + 2 * kStreamAhead > group ? group : 0);
    if (kPass)
      _tile_stream_loadd(4, x + 32 * k, xs);
    else
      _tile_loadd(4, x + 32 * k, xs);
    _tile_loadd(6, w, 64);
    if (kStream) fetch(far);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + group, 64);
    if (kStream) fetch(far + group);
    beside.some();
    _tile_dpbf16ps(1, 4, 7);
    if (kPass)
      _tile_stream_loadd(5, below + 32 * k, xs);
    else
      _tile_loadd(5, below + 32 * k, xs);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  keep_sums(y, y_below, ys);
}

// Blocks that are multiplied with all rows at a time, in parts of about the same size: two groups of their columns stay in
// the first-level cache. Larger parts leave it, smaller ones add to y more often.
static inline int part_blocks(int blocks) {
  const int parts = (blocks + kPartBlocks - 1) / kPartBlocks;
  return (blocks + parts - 1) / parts;
}

// y[16][16] (+)= x[16][32 blocks] columns of one group.
static inline void tiles_16x16(const uint16_t* x, ptrdiff_t x_stride, const char* w, int blocks, float* y,
                               ptrdiff_t y_stride, bool onto, Beside& beside) {
  if (onto)
    _tile_loadd(0, y, y_stride * 4);
  else
    _tile_zero(0);
  for (int k = 0; k < blocks; k++) {
    _tile_loadd(4, x + 32 * k, x_stride * 2);
    _tile_loadd(6, w + k * kTileBytes, 64);
    fetch(w + k * kTileBytes + kStreamAhead);
    _tile_dpbf16ps(0, 4, 6);
    beside.some();
  }
  _tile_stored(0, y, y_stride * 4);
}

// y[rows][groups * 16] (+)= x W of whole blocks; the groups' columns lie one behind the other. In the shape for `rows`.
static inline void tile_matrix(const uint16_t* x, ptrdiff_t x_stride, int rows, const char* w, int groups, int blocks,
                               float* y, ptrdiff_t y_stride, bool onto, Beside& beside) {
  const ptrdiff_t group = blocks * kTileBytes;
  written();
  const int pairs = groups / 2 * 2, many = (rows + 15) / 32 * 32, part = many > 32 ? part_blocks(blocks) : blocks;
  for (int k = 0; many > 0 && k < blocks; k += part)
    for (int g = 0; g < pairs; g += 2)
      for (int m = 0; m < many; m += 32) {
        const int n = blocks - k < part ? blocks - k : part;
        const uint16_t* of_rows = x + m * x_stride + 32 * k;
        const char* columns = w + g * group + k * kTileBytes;
        float* to = y + m * y_stride + 16 * g;
        if (many == 32)
          tiles_32x32<true, false>(of_rows, x_stride, columns, group, n, to, y_stride, onto || k > 0, beside);
        else if (m == 0)
          tiles_32x32<true, true>(of_rows, x_stride, columns, group, n, to, y_stride, onto || k > 0, beside);
        else
          tiles_32x32<false, true>(of_rows, x_stride, columns, group, n, to, y_stride, onto || k > 0, beside);
      }
  for (int g = pairs; g < groups; g++)
    for (int m = 0; m < many; m += 16)
      tiles_16x16(x + m * x_stride, x_stride, w + g * group, blocks, y + m * y_stride + 16 * g, y_stride, onto, beside);
  int m = many;
  for (; m < rows; m += 16) {
    int g = 0;
    for (; g + 4 <= groups; g += 4)
      tiles_16x64(x + m * x_stride, x_stride, w + g * group, blocks, y + m * y_stride + 16 * g, y_stride, onto, beside);
    for (; g < groups; g++)
      tiles_16x16(x + m * x_stride, x_stride, w + g * group, blocks, y + m * y_stride + 16 * g, y_stride, onto, beside);
  }
}

// An adapter's B: any number of pairs. 0 the sum, 4 and 6 whole blocks, 5 and 7 the rest of the rank.
static inline void shape_for_expand(int pairs) {
  TileShape shape;
  const int rest = pairs % kTilePairs ? pairs % kTilePairs : kTilePairs;
  shape.tile(0, 16, 64);
  shape.tile(4, 16, 64);
  shape.tile(5, 16, rest * 4);
  shape.tile(6, 16, 64);
  shape.tile(7, rest, 64);
  shape.use();
}

// y[16 n][groups * 16] += v B: whole blocks of sixteen rows only, since y's other rows belong to other segments.
template <class Base>
static inline void tile_expand(const uint16_t* v, ptrdiff_t v_stride, int rows, Base base, int groups, int pairs,
                               float* y, ptrdiff_t y_stride) {
  const int whole = pairs / kTilePairs;
  written();
  for (int g = 0; g < groups; g++) {
    const char* b = base(g);
    for (int m = 0; m < rows; m += 16) {
      float* at = y + m * y_stride + 16 * g;
      _tile_loadd(0, at, y_stride * 4);
      for (int k = 0; k < whole; k++) {
        _tile_loadd(4, v + m * v_stride + 32 * k, v_stride * 2);
        _tile_loadd(6, b + k * kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      if (pairs % kTilePairs) {
        _tile_loadd(5, v + m * v_stride + 32 * whole, v_stride * 2);
        _tile_loadd(7, b + whole * kTileBytes, 64);
        _tile_dpbf16ps(0, 5, 7);
      }
      _tile_stored(0, at, y_stride * 4);
    }
  }
}

// Attention of `rows` queries: 0-3 sums, 4 queries, 5 keys, 6 weights of sixteen positions, 7 values of eight pairs of
// positions.
static inline void shape_for_attention(int rows) {
  TileShape shape;
  for (int i = 0; i < 5; i++) shape.tile(i, rows, 64);
  shape.tile(5, 16, 64);
  shape.tile(6, rows, 32);
  shape.tile(7, kValuePairs, 64);
  shape.use();
}

// Tiles 0 to 3 from, or to, the first `count` (1 to 4) groups of 16 columns. (A tile's number is part of the instruction.)
static inline void begin_groups(const float* from, ptrdiff_t stride, int count) {
  _tile_loadd(0, from, stride);
  if (count > 1) _tile_loadd(1, from + 16, stride);
  if (count > 2) _tile_loadd(2, from + 32, stride);
  if (count > 3) _tile_loadd(3, from + 48, stride);
}
static inline void keep_groups(float* to, ptrdiff_t stride, int count) {
  _tile_stored(0, to, stride);
  if (count > 1) _tile_stored(1, to + 16, stride);
  if (count > 2) _tile_stored(2, to + 32, stride);
  if (count > 3) _tile_stored(3, to + 48, stride);
}

// s[rows][16 groups] = q keys; keys of group g begin at k[g]; head_dim = 32 blocks. Up to four groups.
static inline void tile_scores(const uint16_t* q, ptrdiff_t q_stride, const char* const* k, int groups, int blocks,
                               float* s, ptrdiff_t s_stride) {
  written();
  begin_sums(s, s, 0, false);
  for (int b = 0; b < blocks; b++) {
    const ptrdiff_t at = b * kTileBytes;
    _tile_loadd(4, q + 32 * b, q_stride * 2);
    _tile_loadd(5, k[0] + at, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (groups > 1) {
      _tile_loadd(5, k[1] + at, 64);
      _tile_dpbf16ps(1, 4, 5);
    }
    if (groups > 2) {
      _tile_loadd(5, k[2] + at, 64);
      _tile_dpbf16ps(2, 4, 5);
    }
    if (groups > 3) {
      _tile_loadd(5, k[3] + at, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  keep_groups(s, s_stride * 4, groups);
}

// o[rows][16 columns] += p values; the values of 16 positions begin at v[g], a pair of positions is `step` bytes long.
static inline void tile_values(const uint16_t* p, ptrdiff_t p_stride, const char* const* v, int groups, ptrdiff_t step,
                               int columns, float* o, ptrdiff_t o_stride) {
  written();
  for (int c = 0; c < columns; c += 4) {
    const int count = columns - c < 4 ? columns - c : 4;
    begin_groups(o + 16 * c, o_stride * 4, count);
    for (int g = 0; g < groups; g++) {
      const char* values = v[g] + 64 * c;
      _tile_loadd(6, p + 16 * g, p_stride * 2);
      _tile_loadd(7, values, step);
      _tile_dpbf16ps(0, 6, 7);
      if (count > 1) {
        _tile_loadd(7, values + 64, step);
        _tile_dpbf16ps(1, 6, 7);
      }
      if (count > 2) {
        _tile_loadd(7, values + 128, step);
        _tile_dpbf16ps(2, 6, 7);
      }
      if (count > 3) {
        _tile_loadd(7, values + 192, step);
        _tile_dpbf16ps(3, 6, 7);
      }
    }
    keep_groups(o + 16 * c, o_stride * 4, count);
  }
}

}  // namespace WEFT_NS
#else
namespace WEFT_NS {
static inline void leave_tiles() {}
}  // namespace WEFT_NS
#endif
