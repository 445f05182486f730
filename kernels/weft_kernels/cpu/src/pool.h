// Persistent threads that walk through a step together: every thread runs the same function and meets the others at
// barriers. Work inside a phase is handed out unit by unit, so a thread that the machine held up delays nobody by more
// than a unit; who computes a unit never changes its result.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace weft {

constexpr size_t kScratchBytes = 512 * 1024;  // of each thread: a panel of results, an attention tile

// Denormals are zero while this lives, as they are to the matrix instructions; the caller's setting comes back.
class Denormals {
 public:
  Denormals();
  ~Denormals();

 private:
  unsigned saved_;
};

class Team {
 public:
  explicit Team(int threads);
  ~Team();
  int threads() const { return threads_; }

  // Run f(context, thread) on all threads, the caller's as number 0; returns when all have returned.
  void run(void (*f)(void*, int), void* context);
  // Every thread calls it equally often; nobody passes before all have come.
  void barrier();
  char* scratch(int thread) { return scratch_[thread]; }

  std::atomic<int64_t> next[4];  // the work counters of four phases in turn; see Member

 private:
  void work(int thread);
  void end();
  void wait_for(std::atomic<uint32_t>& word, uint32_t old);

  int threads_;
  std::vector<std::thread> workers_;
  std::vector<char*> scratch_;
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> passed_{0};
  alignas(64) std::atomic<uint32_t> job_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  void (*function_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool ending_ = false;
};

// One thread's view of the team inside a step.
class Member {
 public:
  Member(Team& team, int thread) : team_(team), thread_(thread) {}
  int thread() const { return thread_; }
  char* scratch() { return team_.scratch(thread_); }

  // Do units [0, n) of a phase together, then meet. A phase of one thread takes them in order.
  template <class Unit>
  void share(int64_t n, Unit unit) {
    std::atomic<int64_t>& next = team_.next[phase_ & 3];
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) unit(i);
    team_.barrier();
    if (thread_ == 0) next.store(0, std::memory_order_relaxed);  // used again four barriers later
    phase_++;
  }

 private:
  Team& team_;
  int thread_;
  unsigned phase_ = 0;
};

}  // namespace weft
