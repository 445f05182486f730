// Drafts for speculative decoding: what followed the last tokens of a sequence wherever they stood before. Plain structs and
// raw pointers, mirrored by weft_kernels/cpu/draft.py.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_MAX_MATCH 64    // tokens of a tail that are looked for
#define WEFT_MAX_PLACES 256  // the newest ones, which decide how a draft goes on
#define WEFT_MAX_DRAFT 32    // tokens

typedef struct {        // one tail, and the text that is searched for it
  const int32_t* text;  // [length] a negative token stands between two answers: it matches none, and ends drafts
  int64_t length;
  const int32_t* tail;  // [tail_length] may be the end of `text` itself, which is no place: nothing follows it there
  int64_t tail_length;
  int32_t max_tokens;  // <= WEFT_MAX_DRAFT
  int32_t reserved;
} weft_draft_query;

typedef struct {
  int32_t matched;   // the most of the tail's last tokens that stand in the text, with a token behind them
  int32_t n_tokens;  // written below
  int32_t tokens[WEFT_MAX_DRAFT];  // at each step the most frequent one; of equals, the one at the newest place
  int32_t agree[WEFT_MAX_DRAFT];  // places at which it goes on with this token: more than those at which an answer ends
  int32_t of[WEFT_MAX_DRAFT];     // places that agreed with all tokens before
} weft_draft_found;

// A draft for each of n queries. Calls may run at the same time. WEFT_E_SIZE for a length or max_tokens that is out of these
// bounds: then nothing is written.
int32_t weft_draft(const weft_draft_query* queries, int32_t n, weft_draft_found* out);

#ifdef __cplusplus
}
#endif
