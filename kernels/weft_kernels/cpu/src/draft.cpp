// Drafts by suffix matching (SuffixDecoding, arXiv:2411.04975, section 3), with no structure kept: the text is scanned.
//
// A scan from the newest token to the oldest compares blocks with the two tokens that a match of use begins and ends with, and
// passes most of them over: 64 Ki tokens take 12 us. A candidate is compared token by token, but never where an earlier
// match covers it: there the tail's own repetitions say how long it is (the Z algorithm). So each token of the text is
// found equal once, and a candidate finds at most one unequal. The worst texts are those of which most positions are
// candidates that match too little, such as a tail of one token, and runs of it that are all a token too short: 0.25 ms.
#include <algorithm>
#include <cstring>

#include "weft_cpu.h"
#include "weft_draft.h"

namespace {

constexpr int64_t kBlock = 64;
constexpr int kSlotBits = 9;  // of a hash table twice as large as WEFT_MAX_PLACES

// The tail backwards, and for each distance from its end how much of it stands there again.
struct Pattern {
  int32_t token[WEFT_MAX_MATCH];
  int32_t again[WEFT_MAX_MATCH];
  int32_t size = 0;

  explicit Pattern(const weft_draft_query& query) {
    const int32_t most = static_cast<int32_t>(std::min<int64_t>(query.tail_length, WEFT_MAX_MATCH));
    for (; size < most && query.tail[query.tail_length - 1 - size] >= 0; ++size)
      token[size] = query.tail[query.tail_length - 1 - size];
    for (int32_t i = 1, start = 0, end = 0; i < size; ++i) {
      int32_t n = i < end ? std::min(again[i - start], end - i) : 0;
      while (i + n < size && token[n] == token[i + n]) ++n;
      again[i] = n;
      if (i + n > end) start = i, end = i + n;
    }
  }
};

class Search {
 public:
  explicit Search(const weft_draft_query& query) : query_(query), text_(query.text), pattern_(query) { scan(); }

  void write(weft_draft_found* out) {
    int32_t n = out->found = 0;
    for (double gain = 1.0; n < query_.max_tokens && n_ > 0 && step(out, n); ++n) {
      out->found = 1;
      gain *= query_.shares[out->classes[n]];
      if (gain < query_.min_gain) break;
      out->gains[n] = gain;
    }
    out->n_tokens = n;
  }

 private:
  // `needed_`: tokens that a match has to have to be of use, one more than the best once all places are taken.
  void scan() {
    int64_t at = query_.length - 2;  // with a token behind it
    for (; needed_ <= pattern_.size && at - kBlock + 1 >= needed_ - 1; at -= kBlock) scan_block(at - kBlock + 1);
    for (; needed_ <= pattern_.size && at >= needed_ - 1; --at)
      if (text_[at] == pattern_.token[0]) consider(at);
  }

  // No branch for each position, which could not be foretold: the compiler makes vectors of the loop over them.
  void scan_block(int64_t start) {
    const int32_t last_token = pattern_.token[0], first_token = pattern_.token[needed_ - 1];
    const int32_t *lasts = text_ + start, *firsts = lasts - needed_ + 1;
    uint8_t hit[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) hit[i] = (lasts[i] == last_token) & (firsts[i] == first_token);
    uint64_t eights[kBlock / 8], some = 0;
    std::memcpy(eights, hit, sizeof hit);
    for (const uint64_t eight : eights) some |= eight;
    if (some == 0) return;
    for (int64_t i = kBlock / 8 - 1; i >= 0; --i)
      for (uint64_t left = eights[i]; left != 0 && needed_ <= pattern_.size;) {
        const int bit = 63 - __builtin_clzll(left);
        left ^= uint64_t{1} << bit;
        consider(start + i * 8 + bit / 8);
      }
  }

  void consider(int64_t at) {
    if (text_[at + 1] < 0) return;
    const int32_t size = matched(at);
    if (size < needed_) return;
    if (size > best_) n_ = 0;
    best_ = size;
    place_[n_++] = at + 1;
    needed_ = n_ < WEFT_MAX_PLACES ? best_ : best_ + 1;
  }

  // The length of the match that ends at `at`, where the tail's last token stands.
  int32_t matched(int64_t at) {
    int32_t size = 1;
    if (at >= from_) {
      const int32_t known = static_cast<int32_t>(at - from_ + 1), again = pattern_.again[through_ - at];
      if (again < known) return again;
      size = known;
    }
    while (size < pattern_.size && size <= at && text_[at - size] == pattern_.token[size]) ++size;
    from_ = at - size + 1;
    through_ = at;
    return size;
  }

  int32_t class_of(int32_t agree, int32_t number) const {
    const int32_t length = std::min(31 - __builtin_clz(static_cast<uint32_t>(best_ + number)), WEFT_GUESS_LENGTHS - 1);
    const int32_t agreement = agree == n_ ? (n_ > 1 ? 3 : 2) : 2 * agree > n_;
    return agreement * WEFT_GUESS_LENGTHS + length;
  }

  // Follows the most frequent token from the places left; false where there is none, or as many answers end.
  bool step(weft_draft_found* out, int32_t number) {
    int32_t token[WEFT_MAX_PLACES], votes[WEFT_MAX_PLACES], of_place[WEFT_MAX_PLACES], distinct = 0, ended = 0;
    int16_t slot[1 << kSlotBits];  // 0: free, else the number of its token
    std::memset(slot, 0, sizeof slot);
    for (int32_t i = 0; i < n_; ++i) {
      const int32_t next = place_[i] < query_.length ? text_[place_[i]] : -1;
      if (next < 0) {
        ++ended;
        of_place[i] = -1;
        continue;
      }
      uint32_t hash = static_cast<uint32_t>(next) * 0x9E3779B1u >> (32 - kSlotBits);
      while (slot[hash] != 0 && token[slot[hash] - 1] != next) hash = (hash + 1) & ((1 << kSlotBits) - 1);
      if (slot[hash] == 0) {
        token[distinct] = next;
        votes[distinct] = 0;
        slot[hash] = static_cast<int16_t>(++distinct);
      }
      of_place[i] = slot[hash] - 1;
      ++votes[of_place[i]];
    }
    const int32_t chosen = static_cast<int32_t>(std::max_element(votes, votes + distinct) - votes);  // the newest
    if (distinct == 0 || votes[chosen] <= ended) return false;
    out->tokens[number] = token[chosen];
    out->classes[number] = class_of(votes[chosen], number);
    int32_t kept = 0;
    for (int32_t i = 0; i < n_; ++i)
      if (of_place[i] == chosen) place_[kept++] = place_[i] + 1;
    n_ = kept;
    return true;
  }

  const weft_draft_query& query_;
  const int32_t* const text_;
  const Pattern pattern_;
  int64_t place_[WEFT_MAX_PLACES];  // of the next token, newest first
  int32_t n_ = 0, best_ = 0, needed_ = 1;
  int64_t from_ = INT64_MAX, through_ = 0;  // the last match that was compared
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int32_t weft_draft(const weft_draft_query* queries, int32_t n,
                                                                     weft_draft_found* out) {
  if (n < 0) return WEFT_E_SIZE;
  for (int32_t i = 0; i < n; ++i)
    if (queries[i].length < 0 || queries[i].tail_length < 0 || queries[i].max_tokens < 0 ||
        queries[i].max_tokens > WEFT_MAX_DRAFT)
      return WEFT_E_SIZE;
  for (int32_t i = 0; i < n; ++i) Search(queries[i]).write(out + i);
  return 0;
}
