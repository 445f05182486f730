// Persistent threads that walk through a step together: every thread runs the same function and meets the others at
// barriers. In a phase each takes the units of a range of its own, in order, since what lies side by side in memory is
// best read in one go; then what others have left, so a thread that the machine held up delays no other by more than a
// unit. Who computes a unit never changes its result.
//
// Of as many threads as CPUs each has one of its own, the caller's during a call. Threads that sleep and wake each other
// in turn look like one that works: Linux leaves them on one CPU beside an idle one once other processes have pushed them
// there.
//
// Threads and locks are the C library's: with those of C++ the library would need a C++ runtime, which zig compiles anew
// in two minutes on a machine that has no compiler (compiler.py).
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace weft {

constexpr size_t kScratchBytes = 344 * 1024;  // of each thread: unit.h, or an attention tile

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
  Team(const Team&) = delete;
  // False: there was no memory, or the system grants no more threads.
  bool is_whole() const { return threads_ == wanted_; }
  int threads() const { return threads_; }

  // Run f(context, thread) on all threads, the caller's as number 0; returns when all have returned.
  void run(void (*f)(void*, int), void* context);
  // Every thread calls it equally often; no thread passes before all have come.
  void barrier();
  char* scratch(int thread) { return workers_[thread].scratch; }

  // Units of thread t's range that were taken, in the phases that are 0 and 1 modulo 2; see Member.
  std::atomic<int64_t>& taken(unsigned phase, int thread) { return workers_[thread].range.taken[phase % 2]; }

 private:
  struct alignas(64) Range {
    std::atomic<int64_t> taken[2] = {{0}, {0}};
  };
  struct Worker {
    Range range;  // in a cache line of its own
    Team* team = nullptr;
    char* scratch = nullptr;
    int number = 0, cpu = -1;  // none: it runs where it may
    pthread_t thread = {};
  };

  static void* start(void* worker);
  void work(int thread);
  void wake_all();
  void wait_for(std::atomic<uint32_t>& word, uint32_t old);

  const int wanted_;
  int threads_ = 0;            // that there are, the caller's included
  Worker* workers_ = nullptr;  // [wanted_]
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> passed_{0};
  alignas(64) std::atomic<uint32_t> job_{0};
  std::atomic<int> sleepers_{0};
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER;
  void (*function_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool ending_ = false;
};

// One thread's view of the team inside a step.
class Member {
 public:
  Member(Team& team, int thread) : team_(team), thread_(thread) {}
  int thread() const { return thread_; }
  int threads() const { return team_.threads(); }
  char* scratch() { return team_.scratch(thread_); }
  // Meet without a unit of work between.
  void meet() { team_.barrier(); }

  const void* kept = nullptr;  // of which rows of this phase the scratch has sums, see int4.h
  unsigned exchanges = 0;      // of this step with other ranks, so far: every thread counts them alike

  // Do units [0, n) of a phase together, each thread `last` when it is done, then meet. A phase of one thread takes them in
  // order.
  template <class Unit>
  void share(int64_t n, Unit unit) {
    share(n, unit, [] {});
  }
  template <class Unit, class Last>
  void share(int64_t n, Unit unit, Last last) {
    const int threads = team_.threads();
    kept = nullptr;
    for (int i = 0; i < threads; i++) {
      const int of = (thread_ + i) % threads;
      const int64_t begin = n * of / threads, size = n * (of + 1) / threads - begin;
      std::atomic<int64_t>& taken = team_.taken(phase_, of);
      if (taken.load(std::memory_order_relaxed) >= size) continue;
      for (int64_t u; (u = taken.fetch_add(1, std::memory_order_relaxed)) < size;) unit(begin + u);
    }
    last();
    team_.barrier();
    team_.taken(phase_, thread_).store(0, std::memory_order_relaxed);  // used again two barriers later
    phase_++;
  }

 private:
  Team& team_;
  int thread_;
  unsigned phase_ = 0;
};

}  // namespace weft
