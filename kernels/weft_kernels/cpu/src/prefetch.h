// What will be read soon, asked for a few lines at a time beside the work that comes before it. All at once it would fill
// the core's few line buffers, and the weights that stream past meanwhile would wait behind it.
#pragma once
#include "vec.h"

namespace WEFT_NS {

class Prefetch {
 public:
  // What does not fit is not asked for: it comes when it is read.
  void add(const char* begin, const char* end) {
    if (begin >= end || n_ == kMost) return;
    ranges_[n_++] = {begin, end};
    lines_ += (end - begin + 63) / 64;
  }

  // Spread over about three quarters of so many calls of `some`.
  void over(int64_t steps) { each_ = int((4 * lines_ + 3 * steps) / (3 * steps + 1)); }
  void some() { next(each_); }
  void all() { next(lines_); }

 private:
  static constexpr int kMost = 256;
  struct Range {
    const char *at, *end;
  };

  void next(int64_t count) {
    for (; count > 0 && now_ < n_; count--, lines_--) {
      Range& range = ranges_[now_];
      __builtin_prefetch(range.at, 0, 2);
      range.at += 64;
      if (range.at >= range.end) now_++;
    }
  }

  Range ranges_[kMost];
  int n_ = 0, now_ = 0, each_ = 0;
  int64_t lines_ = 0;
};

}  // namespace WEFT_NS
