// The C ABI of Weft's CPU kernels: plain structs and raw pointers, mirrored by weft_kernels/cpu/library.py.
//
// Nothing here allocates behind the caller's back, but for the thread pool: weights, KV pages, adapters, workspace and
// results are the caller's memory. All sizes are in elements unless a name says bytes. Strides are those of the packed
// layouts in pack.h. A function that can fail returns 0, or a negative WEFT_E_* code.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_ABI 13

enum { WEFT_BF16 = 0, WEFT_FP32 = 1, WEFT_INT8 = 2, WEFT_INT4 = 3 };  // kinds of numbers
enum { WEFT_SILU = 0, WEFT_GELU = 1 };                                // gelu: its tanh form
enum { WEFT_E_LEVEL = -1, WEFT_E_SIZE = -2, WEFT_E_WORKSPACE = -3, WEFT_E_RANKS = -4, WEFT_E_MEMORY = -5 };

// Instruction levels, worst first. A level is usable when it was compiled in and the CPU (and the kernel) has it.
enum { WEFT_PORTABLE = 0, WEFT_AVX2 = 1, WEFT_AVX512 = 2, WEFT_AVX512_BF16 = 3, WEFT_AMX_BF16 = 4, WEFT_LEVELS = 5 };

typedef struct {       // y[n_out] = W[n_out, n_in] x[n_in] (* scale) (+ bias)
  const void* data;    // packed; 64-byte aligned
  const float* scale;  // WEFT_INT8: one per output, padded to 16; else NULL
  const float* bias;   // [n_out], up to a multiple of 16, or NULL
  int32_t n_in, n_out, kind, reserved;
} weft_matrix;

typedef struct {                     // norms: [hidden], with layer_norm what is added behind it; NULL: there is none
  const float* attention_norm;       // before attention
  const float* attention_post_norm;  // of what attention adds to the residual stream
  const float* mlp_norm;             // before the MLP
  const float* mlp_post_norm;        // of what the MLP adds
  const float* q_norm;               // [head_dim] or NULL; with row_norms [heads * head_dim]
  const float* k_norm;               // [head_dim] or NULL; with row_norms [kv_heads * head_dim]
  weft_matrix qkv;                   // [(heads + 2 kv_heads) * head_dim, hidden]
  weft_matrix o;                     // [hidden, heads * head_dim]
  weft_matrix gate_up;               // [2 inner, hidden]: 32 rows of gate, the same 32 of up, and so on; or up alone
  weft_matrix down;                  // [hidden, inner]
  int32_t window;                    // a token sees itself and window - 1 tokens before it; 0: all of them
  int32_t rope;                      // which of the model's; -1: queries and keys are not rotated (NoPE)
} weft_layer;

typedef struct {
  const float* inverse_frequency;  // [size / 2]
  const float* long_frequency;     // [size / 2], of rows that are `long_text`
  float factor;                    // of cos and sin (1 but for yarn-like scalings)
  int32_t size;                    // the first numbers of a head, which are rotated: even
} weft_rope;

// The tensor ranks that compute each layer together, of which this process is one (Megatron's split, S-LoRA's for
// adapters). A rank writes to its own slot; an exchange makes all slots readable here, and sums over them are taken in
// the order of the ranks: the same bits on every rank, whatever carries the slots. NULL in a model: it is alone.
typedef struct {
  int32_t rank, size;
  char* slots;         // [2][size] of `slot_bytes`, used by turns, in memory that the ranks share; 64-byte aligned
  int64_t slot_bytes;  // a multiple of 64
  uint32_t* meeting;   // [size + 1][16] words that the ranks share: see ranks.h; unused with `exchange`
  // NULL where slots are shared; else called on the calling thread to fetch the first `bytes` bytes of the other ranks'
  // slots into those of the given half (`to_root`: rank 0 alone needs them). Returns 0, or that a rank is gone.
  int32_t (*exchange)(void* context, int32_t half, int64_t bytes, int32_t to_root);
  void* context;
  double patience_s;  // how long a rank waits for the others
} weft_ranks;

typedef struct {
  int32_t layers, hidden, inner, heads, kv_heads, head_dim, vocab;
  int32_t kind;  // of activations and adapters: WEFT_BF16 or WEFT_FP32
  float eps;
  float top_share;          // a token attends to the best of its keys: so many of them; 0: to all (best_keys.h)
  const weft_layer* layer;  // [layers]
  const void* embedding;    // [vocab, hidden] row-major in `embedding_kind`; NULL: `hidden` comes from the stage before
  const float* norm;        // [hidden], as the layers'
  weft_matrix head;         // [vocab, hidden]; of a rank its part of the vocabulary; no data: another stage has it
  const weft_rope* rope;    // [ropes]
  void* kv;                 // [pages, layers, 2, kv_heads, page_tokens, head_dim], see attention.h and kv_int4.h
  int32_t embedding_kind, page_tokens, ropes;
  int32_t kv_kind;                        // `kind`, or WEFT_INT4, for which head_dim is a multiple of 32
  float embedding_scale, residual_scale;  // of embeddings, and of what is added to the residual stream
  float query_scale;                      // of queries, whose products with keys go into a softmax
  float score_cap, logit_cap;             // c: scores, or logits, become c tanh(x / c); 0: they stay
  float query_growth;  // g: queries at position p are also times 1 + g ln(1 + floor(p / growth_tokens))
  int32_t growth_tokens;
  int32_t activation;       // WEFT_SILU or WEFT_GELU
  int32_t gated;            // 1: the MLP is act(gate) * up; 0: act(up)
  int32_t layer_norm;       // 1: norms are LayerNorm with what is added; 0: RMSNorm
  int32_t row_norms;        // 1: q_norm and k_norm are of all heads of a token together
  const weft_ranks* ranks;  // heads, inner and vocab are this rank's then; hidden is whole
  float* scores;            // with top_share: [threads][16][score_positions], 64-byte aligned
  int64_t score_positions;  // no fewer than any sequence has, a multiple of 64
} weft_model;

typedef struct {             // one projection inside a LoRA site
  const void* b;             // packed [n_out/16][ceil(rank/2)][16][2]
  int32_t rank_start, rank;  // its columns of the whole stacked A
  int32_t out_start, n_out;  // its columns of the site's output; multiples of 16
  float scale;
  int32_t reserved;
} weft_lora_slice;

typedef struct {           // one adapter's weights at one site: qkv, o, gate_up or down
  const void* a;           // packed matrix, n_out = rank, n_in = the site's input; NULL: leaves it alone
  int32_t rank, n_slices;  // rank: the sum of the slices'; of tensor ranks at qkv and gate_up, how many rows of the
                           // stack are this one's, where row r is of rank r mod size
  weft_lora_slice slice[3];
} weft_lora_site;

typedef struct {
  int32_t start, end;   // tokens of the step
  int32_t position;     // absolute position of the first one
  int32_t page_offset;  // its pages begin here in page_table
  int32_t long_text;    // 1: its positions are rotated by `long_frequency` (LongRoPE)
} weft_row;

typedef struct {
  int32_t start, end, slot;  // tokens [start, end) use the adapter of `slot`
} weft_segment;

typedef struct {
  int32_t n_tokens, n_rows, n_segments, n_sampled;
  int32_t first, last;    // layers to run
  const int32_t* tokens;  // [n_tokens]
  const weft_row* rows;   // cover the tokens in order
  const int32_t* page_table;
  const weft_segment* segments;  // ordered, disjoint
  const int32_t* sampled;        // [n_sampled] token indices whose logits are wanted
  int32_t* guesses;  // NULL, or [n_tokens]: 1 for a token that may be wrong. Where its values are no numbers they are
  // stored as 0, so that tokens before it stay what they are, its own logits are none, and 2 is written
  const weft_lora_site* const* slots;  // slot -> [layers][4] sites
  float* hidden;                       // [n_tokens, hidden]: input when first > 0; output of layer last - 1
  float* logits;  // [n_sampled, vocab]; written when last == layers; of tensor ranks whole, on rank 0 alone
  void (*layer_done)(int32_t layer);  // NULL, or called on the calling thread after each layer
  int64_t* layers_done;               // NULL, or grows by one after each layer: see weft_layers_done
  void* workspace;                    // weft_workspace_bytes(), 64-byte aligned
  int64_t workspace_bytes;
} weft_step;

typedef struct {  // a matrix to pack: parts under each other, each row-major and dense
  const void* source[3];
  void* to;         // 64-byte aligned
  int32_t rows[3];  // of each part; 0: there is no such part
  int32_t kind;     // of the parts' numbers: WEFT_BF16 or WEFT_FP32
  int32_t n_in, pad_in;
} weft_pack_job;

typedef struct weft_pool weft_pool;

int32_t weft_abi(void);
int32_t weft_levels(void);                  // bit i: level i is usable here
weft_pool* weft_pool_new(int32_t threads);  // threads - 1 workers; the caller is the remaining one
void weft_pool_free(weft_pool*);

// `weft_run` refuses a level, kinds, sizes, layers and workspaces that it cannot run with. It trusts the caller in what it
// cannot see: pointers and the sizes behind them, ids of tokens, pages and slots, the order of rows and segments.
int64_t weft_workspace_bytes(const weft_model*, int32_t n_tokens, int32_t site_rank, int32_t n_sampled);
int32_t weft_run(int32_t level, weft_pool*, const weft_model*, const weft_step*);

// Every rank that waits for the others in a step, or will, returns WEFT_E_RANKS. Any thread; for ranks that share memory.
void weft_end_ranks(const weft_ranks*);

// How many layers have been completed, of all steps that were given this counter, for a thread beside those steps. A step
// adds one with release order behind the barrier that ends a layer, and this reads with acquire order: who sees n + k,
// where the counter was n before a step, may read the keys and values that all threads of the step wrote in its first k
// layers. Nothing of later layers, nor of `hidden`, may be read by that. `weft_await_layers` returns once there are at
// least `count`, or after about that time; it looks after 20 us, and less and less often until it is every ms.
int64_t weft_layers_done(const int64_t* counter);
int64_t weft_await_layers(const int64_t* counter, int64_t count, int64_t timeout_us);

// Packing. Bytes of a packed matrix, and the packing itself from row-major [n_out, n_in] of `from` (WEFT_BF16 or
// WEFT_FP32, row stride in elements) to `to` (WEFT_INT8: `scale` [n_out padded to 16] is written). `pad_in` is 32 for
// base matrices and A, 2 for B.
int64_t weft_packed_bytes(int32_t kind, int64_t n_out, int64_t n_in, int32_t pad_in);
int32_t weft_pack(weft_pool*, const void* source, int32_t from, int64_t stride, int64_t n_out, int64_t n_in,
                  int32_t pad_in, void* to, int32_t kind, float* scale);

// The matrices of an adapter, a few or all of them, to `kind` WEFT_BF16 or WEFT_FP32: whole or in slices they become
// the same bytes. `weft_touch`, before that, reads a byte of each page of their sources and writes one of each page that
// they go to, on the calling thread: then packing them waits for no disk and for no memory.
int32_t weft_pack_jobs(weft_pool*, const weft_pack_job*, int32_t n_jobs, int32_t kind);
void weft_touch(const weft_pack_job*, int32_t n_jobs, int32_t kind);

// Copy `n` blocks of `bytes` bytes; none overlaps another.
void weft_copy(weft_pool*, void* const* to, const void* const* from, int64_t n, int64_t bytes);

// y[m, n_out] fp32 = x[m, n_in] W^T, as the step computes it: what tests and benchmarks call. `x` is WEFT_BF16 or
// WEFT_FP32 like the model's kind (int8 and int4 weights take bf16), row stride n_in.
int32_t weft_matmul(int32_t level, weft_pool*, const weft_matrix*, const void* x, int32_t x_kind, int32_t m, float* y);

// y[n_tokens, n_out] fp32 += the adapters of one site (qkv 0, o 1, gate_up 2, down 3) alone, as a step of one layer adds
// them: what benchmarks call. Of `step` n_tokens, segments, slots and workspace are read; `x` is fp32 [n_tokens, n_in],
// and n_in is at most the model's hidden size, n_out a multiple of 16. Not for tensor ranks.
int32_t weft_lora(int32_t level, weft_pool*, const weft_model*, const weft_step*, int32_t site, int32_t n_in,
                  int32_t n_out, const float* x, float* y);

// The machine, as a step sees it. Seconds of reading `bytes` bytes with all threads, best of `repetitions`; seconds of
// `blocks` products of 16 x 16 x 32 on every thread, from operands that stay in the core.
double weft_read_seconds(int32_t level, weft_pool*, const void* data, int64_t bytes, int32_t repetitions);
double weft_peak_seconds(int32_t level, weft_pool*, int64_t blocks);

#ifdef __cplusplus
}
#endif
