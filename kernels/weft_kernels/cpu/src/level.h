// What a translation unit of one instruction level gives to the dispatcher: a table of functions.
#pragma once
#include "pool.h"
#include "weft_cpu.h"

namespace weft {

struct Level {
  int64_t (*workspace_bytes)(const weft_model&, int64_t tokens, int64_t site_rank, int64_t sampled);
  int32_t (*run)(Team&, const weft_model&, const weft_step&, int64_t site_rank);
  void (*lora)(Team&, const weft_model&, const weft_step&, int64_t site_rank, int site, int n_in, int n_out,
               const float* x, float* y);
  void (*matmul)(Team&, const weft_matrix&, const void* x, int x_kind, int m, float* y);
  double (*read_seconds)(Team&, const char* data, int64_t bytes, int repetitions);
  double (*peak_seconds)(Team&, int64_t blocks);
};

// Weak: a level that was not compiled has no address.
extern __attribute__((weak, visibility("hidden"))) const Level kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16;

}  // namespace weft
