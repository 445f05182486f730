// Seconds of the clock that never goes back.
#pragma once
#include <time.h>

namespace weft {

static inline double clock_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

}  // namespace weft
