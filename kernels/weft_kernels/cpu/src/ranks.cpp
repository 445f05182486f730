#include "ranks.h"

#include "clock.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace weft {
namespace {

constexpr int kLine = 16;     // words
constexpr int kSpins = 4000;  // 40 to 200 us: ranks of one machine are about as uneven as the threads of one rank
constexpr long kNapNs = 20 * 1000 * 1000;

uint32_t* arrived(const weft_ranks& ranks, int rank) { return ranks.meeting + kLine * rank; }
uint32_t* sleepers(const weft_ranks& ranks) { return ranks.meeting + kLine * ranks.size; }
uint32_t* ended(const weft_ranks& ranks) { return sleepers(ranks) + 1; }
uint32_t load(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

// Until the word is no longer `seen`, or for a nap.
void sleep_on(uint32_t* word, uint32_t seen) {
#if defined(__linux__)
  const timespec nap{0, kNapNs};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
  const timespec nap{0, 100 * 1000};
  nanosleep(&nap, nullptr);
  (void)word, (void)seen;
#endif
}

void wake(uint32_t* word) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
#endif
  (void)word;
}

bool has_come(uint32_t count, uint32_t round) { return int32_t(count - round) >= 0; }

bool wait_for(const weft_ranks& ranks, int rank, uint32_t round) {
  uint32_t* const word = arrived(ranks, rank);
  for (int i = 0; i < kSpins; i++) {
    if (has_come(load(word), round)) return true;
    WEFT_PAUSE();
  }
  const double end_s = clock_s() + ranks.patience_s;
  for (;;) {
    __atomic_fetch_add(sleepers(ranks), 1, __ATOMIC_SEQ_CST);
    const uint32_t seen = load(word);
    if (!has_come(seen, round)) sleep_on(word, seen);
    __atomic_fetch_sub(sleepers(ranks), 1, __ATOMIC_SEQ_CST);
    if (has_come(load(word), round)) return true;
    if (load(ended(ranks)) != 0 || clock_s() >= end_s) return false;
  }
}

}  // namespace

uint32_t exchanges(const weft_ranks& ranks) { return load(arrived(ranks, ranks.rank)); }

bool meet(const weft_ranks& ranks) {
  uint32_t* const own = arrived(ranks, ranks.rank);
  const uint32_t round = __atomic_add_fetch(own, 1, __ATOMIC_SEQ_CST);
  if (load(sleepers(ranks)) > 0) wake(own);
  for (int rank = 0; rank < ranks.size; rank++)
    if (rank != ranks.rank && !wait_for(ranks, rank, round)) return false;
  return true;
}

void end_ranks(const weft_ranks& ranks) { __atomic_store_n(ended(ranks), 1, __ATOMIC_SEQ_CST); }

}  // namespace weft
