// Seconds of the clock that never goes back, and what a thread that spins does in each turn.
#pragma once
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define WEFT_PAUSE() _mm_pause()
#else
#include <sched.h>
#define WEFT_PAUSE() sched_yield()
#endif

namespace weft {

static inline double clock_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

}  // namespace weft
