// What is done beside a product, a little at each step of its tiles, which take long and leave the rest of the core idle.
//
// Lines of memory that will be read soon: all at once they would fill the core's few line buffers, and what the tiles read
// meanwhile would wait behind them. And rows of the panel before this one, whose sums wait for what is done with them.
#pragma once
#include "vec.h"

namespace WEFT_NS {

class Beside {
 public:
  // What does not fit is not asked for: it comes when it is read.
  void add(const char* begin, const char* end) {
    if (begin >= end || n_ == kMost) return;
    ranges_[n_++] = {begin, end};
    lines_ += (end - begin + 63) / 64;
  }

  // Rows [0, n), by `work(context, begin, end)`.
  void add_rows(int n, void (*work)(void*, int, int), void* context) {
    rows_ = n;
    work_ = work;
    context_ = context;
  }

  // Spread over about three quarters of so many calls of `some`.
  void over(int64_t steps) {
    each_ = int((4 * lines_ + 3 * steps) / (3 * steps + 1));
    rows_each_ = int((4 * (rows_ - row_) + 3 * steps) / (3 * steps + 1));
  }
  void some() {
    ask(each_);
    work(rows_each_);
  }
  void all() {
    ask(lines_);
    work(rows_);
  }

 private:
  static constexpr int kMost = 256;
  struct Range {
    const char *at, *end;
  };

  void ask(int64_t count) {
    for (; count > 0 && now_ < n_; count--, lines_--) {
      Range& range = ranges_[now_];
      __builtin_prefetch(range.at, 0, 2);
      range.at += 64;
      if (range.at >= range.end) now_++;
    }
  }

  void work(int count) {
    const int begin = row_, end = rows_ - begin < count ? rows_ : begin + count;
    if (begin == end) return;
    row_ = end;  // before the call: whoever is done is not done again
    work_(context_, begin, end);
  }

  Range ranges_[kMost];
  int n_ = 0, now_ = 0, each_ = 0;
  int64_t lines_ = 0;
  int row_ = 0, rows_ = 0, rows_each_ = 0;
  void (*work_)(void*, int, int) = nullptr;
  void* context_ = nullptr;
};

}  // namespace WEFT_NS
