// A unit of a matrix product: some groups of 16 output columns for a panel of rows, and the scratch memory it works in.
#pragma once
#include <algorithm>

#include "pack.h"
#include "pool.h"
#include "weft_cpu.h"

namespace WEFT_NS {

constexpr int kChunkRows = 512;       // rows that a unit's columns are read for at once, at most
constexpr int kChunkBytes = 5 << 18;  // of those rows' inputs: they shall stay in the second-level cache
constexpr int kPanelRows = 256;       // rows of a panel of scratch: 256 x 64 results are 64 KiB
constexpr int kManyRows = 128;        // of a chunk: beside their products there is time for other work (beside.h)
constexpr int kUnitGroups = 4;        // groups of a unit: 64 columns
constexpr int kUnitColumns = 16 * kUnitGroups;
constexpr int kWidenedBlocks = 16;  // int8 and int4 columns for the tiles are made bf16 512 k at a time: 64 KiB
constexpr int kDotRows = 32;        // rows whose dot products with int4 columns are scaled together

// A thread's scratch, one part behind the other. Factors, dots and sums are of int4 alone (int4.h).
constexpr size_t kPanelBytes = sizeof(float) * kPanelRows * kUnitColumns;
constexpr size_t kPanelsBytes = 2 * kPanelBytes;  // one is worked on, one waits for its epilogue
constexpr size_t kWidenedBytes = size_t(kUnitGroups) * kWidenedBlocks * 1024;
constexpr size_t kFactorsBytes = sizeof(float) * kWidenedBlocks / 2 * 2 * kUnitColumns;
constexpr size_t kDotsBytes = 2 * sizeof(float) * kDotRows * kUnitColumns;
constexpr size_t kSumsBytes = 128 * 1024;
static_assert(kPanelsBytes + kWidenedBytes + kFactorsBytes + kDotsBytes + kSumsBytes <= weft::kScratchBytes,
              "a thread's scratch");

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

// Groups [group, group + count) of a matrix, as columns [column, ...) of a unit.
struct Span {
  int group, count, column;
};

}  // namespace WEFT_NS
