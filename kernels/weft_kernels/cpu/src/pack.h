// The packed layouts, the same for every level: groups of 16 outputs, pairs of inputs, so that one vector holds 16
// outputs of a pair and one tile 16 outputs of 16 pairs.
//
//   bf16  [n_out/16][n_in/2][16][2]
//   fp32  [n_out/16][n_in][16]
//   int8  [n_out/16][n_in][16], one scale per output
//   int4  [n_out/16][n_in/64] of 576 bytes: bf16 scale[16], bf16 minimum[16], then 64 inputs of 16 outputs
//
// n_in is padded to a multiple of `pad_in` (int4: of 64) and n_out to 16, with zeros.
//
// int4 (FlexGen, section 5: groups of 64, minimum and scale): w = minimum + scale * q, 0 <= q <= 15; int4.h multiplies.
// The 64 inputs are eight lines of a word for each output. In line i, bits 4 j and 16 + 4 j begin the two of pair 4 i + j.
#pragma once
#include <cstdint>

#include "pool.h"
#include "weft_cpu.h"

namespace weft {

constexpr int64_t kInt4Inputs = 64, kInt4Bytes = 576;  // of 16 outputs
constexpr int64_t kMostInt4Inputs = 1 << 21;           // of a matrix: a thread has scratch for the sums of one row

int64_t packed_bytes(int kind, int64_t n_out, int64_t n_in, int pad_in);
// Pack row-major [n_out, n_in] (bf16 or fp32, `stride` elements from row to row).
void pack(Team&, const void* source, int from, int64_t stride, int64_t n_out, int64_t n_in, int pad_in, void* to,
          int kind, float* scale);
// Several matrices, `kind` BF16 or FP32. False: there is no memory.
bool pack_jobs(Team&, const weft_pack_job* jobs, int n_jobs, int kind);
// Read a byte of every page of what they are packed from, write one of every page that they are packed to: then packing
// waits for no disk and for no memory.
void touch_jobs(const weft_pack_job* jobs, int n_jobs, int kind);
// `n` blocks of `bytes` bytes each.
void copy_blocks(Team&, void* const* to, const void* const* from, int64_t n, int64_t bytes);

}  // namespace weft
