// Choosing tokens from logits: plain structs and raw pointers, mirrored by weft_kernels/cpu/sampling.py.
//
// Every operation is an IEEE addition, multiplication, division or comparison, or one on integers, in an order that depends on the
// row alone: all levels and compilers (with -ffp-contract=off), and the numpy version, sample the same tokens.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_MAX_TOP 20

typedef struct {                    // how one row's token is chosen
  uint64_t seed, choice, position;  // the draw is a pure function of these three
  double temperature;               // 0: the likeliest token; else finite and > 0
  double top_p;                     // >= 1: all of the distribution; <= 0: the likeliest token
  double min_p;            // tokens less likely than so much (<= 1) of the likeliest are not drawn; <= 0: all may be
  const int32_t* shifted;  // [n_shifted] distinct tokens; one outside the vocabulary is passed over
  const double* shift;     // [n_shifted] what is added to their logits before anything is chosen
  const double* bias;      // [n_shifted] what was added before `scale`
  const double* scale;     // [n_shifted] divides a positive logit, multiplies others; NULL: no scale and no bias
  const uint32_t* mask;    // [ceil(vocab / 32)] bit i % 32 of word i / 32: token i may be chosen; NULL: all may
  int32_t n_shifted;
  int32_t n_top;  // -1: no log probabilities; else that of the token and of the n_top <= WEFT_MAX_TOP likeliest
  int32_t top_k;  // only so many of the likeliest that min_p keeps are drawn, and top_p is of their mass; 0: all
  int32_t given;  // > 0: nothing is chosen, the token is given - 1, and its log probability alone is asked for
} weft_draw;

typedef struct {
  int32_t token;  // -1: the row (or the shifted and masked row) holds a NaN, or its maximum is infinite
  int32_t n_top;  // written below: tokens of probability zero are left out
  float logprob;  // natural logarithms, of the row as it came; 0 where n_top was -1
  int32_t reserved;
  int32_t top_token[WEFT_MAX_TOP];  // likeliest first, the lower id first among equals
  float top_logprob[WEFT_MAX_TOP];
} weft_sampled;

int64_t weft_sample_workspace_bytes(int32_t vocab);

// A token for each row of logits [n_rows, vocab] (row stride in elements). `rows` NULL: the likeliest one everywhere and no
// log probabilities. The workspace is 64-byte aligned; calls with different workspaces may run at the same time.
// WEFT_E_SIZE for numbers of a draw that are out of these bounds.
int32_t weft_sample(int32_t level, const float* logits, int64_t row_stride, int32_t vocab, int32_t n_rows,
                    const weft_draw* rows, weft_sampled* out, void* workspace, int64_t workspace_bytes);

#ifdef __cplusplus
}
#endif
