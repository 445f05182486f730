// Drafts for speculative decoding: what followed the last tokens of a sequence wherever they stood before. Plain structs and
// raw pointers, mirrored by weft_kernels/cpu/draft.py.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_MAX_MATCH 64     // tokens of a tail that are looked for
#define WEFT_MAX_PLACES 256   // the newest ones, which decide how a draft goes on
#define WEFT_MAX_DRAFT 32     // tokens
#define WEFT_GUESS_LENGTHS 7  // classes of guesses by tokens that match before them: 1, 2-3, 4-7, ..., 64 and more
// Classes of guesses: by places that agree (at most half, more, the only one, all of several), each by length.
#define WEFT_GUESS_CLASSES (4 * WEFT_GUESS_LENGTHS)

typedef struct {        // one tail, and the text that is searched for it
  const int32_t* text;  // [length] a negative token stands between two answers: it matches none, and ends drafts
  int64_t length;
  const int32_t* tail;  // [tail_length] may be the end of `text` itself, which is no place: nothing follows it there
  int64_t tail_length;
  const double* shares;  // [WEFT_GUESS_CLASSES] of the guesses of a class, those that were right
  double min_gain;  // a draft ends before a guess that is right with less than this probability, all before it as well
  int32_t max_tokens;  // <= WEFT_MAX_DRAFT
} weft_draft_query;

typedef struct {
  int32_t n_tokens;  // written below
  int32_t found;     // 1: the text goes on, and classes[0] is written, also where that guess is not likely enough
  int32_t tokens[WEFT_MAX_DRAFT];  // at each step the most frequent one; of equals, the one at the newest place
  int32_t classes[WEFT_MAX_DRAFT];
  double gains[WEFT_MAX_DRAFT];  // the probability that a guess, and all before it, are right
} weft_draft_found;

// A draft for each of n queries. Calls may run at the same time. WEFT_E_SIZE for a length or max_tokens that is out of these
// bounds: then nothing is written.
int32_t weft_draft(const weft_draft_query* queries, int32_t n, weft_draft_found* out);

#ifdef __cplusplus
}
#endif
