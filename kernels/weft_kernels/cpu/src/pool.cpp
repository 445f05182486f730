#include "pool.h"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define WEFT_PAUSE() _mm_pause()
#else
#define WEFT_PAUSE() std::this_thread::yield()
#endif

namespace weft {

namespace {
// 10 to 50 us of spinning (a pause is 40 to 140 cycles): about as long as a phase of a small step is uneven. Then the
// thread sleeps, so that an idle engine costs nothing and a busy machine loses no core to waiting.
constexpr int kSpins = 1000;

#if defined(__linux__)
cpu_set_t only(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return set;
}

// The calling thread's CPUs, where these are as many as the team's threads; otherwise none.
std::vector<int> one_each(int threads) {
  cpu_set_t set;
  std::vector<int> cpus;
  if (threads == 1 || sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) != threads) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

void stay_on(std::thread& worker, int cpu) {
  const cpu_set_t set = only(cpu);
  pthread_setaffinity_np(worker.native_handle(), sizeof set, &set);  // refused: it runs where it may
}

// The calling thread stays on that CPU while this lives, unless it may not run on all of the team's.
class StaysOn {
 public:
  explicit StaysOn(const std::vector<int>& cpus) {
    if (cpus.empty() || sched_getaffinity(0, sizeof before_, &before_) != 0 || CPU_COUNT(&before_) != int(cpus.size())) return;
    const cpu_set_t set = only(cpus[0]);
    moved_ = sched_setaffinity(0, sizeof set, &set) == 0;
  }
  ~StaysOn() {
    if (moved_) sched_setaffinity(0, sizeof before_, &before_);
  }

 private:
  cpu_set_t before_;
  bool moved_ = false;
};
#else
std::vector<int> one_each(int) { return {}; }
void stay_on(std::thread&, int) {}
struct StaysOn {
  explicit StaysOn(const std::vector<int>&) {}
};
#endif
}  // namespace

#if defined(__x86_64__)
Denormals::Denormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
Denormals::~Denormals() { _mm_setcsr(saved_); }
#else
Denormals::Denormals() : saved_(0) {}
Denormals::~Denormals() = default;
#endif

Team::Team(int threads) : threads_(threads < 1 ? 1 : threads), cpus_(one_each(threads_)), ranges_(threads_) {
  try {
    for (int i = 0; i < threads_; i++) {
      void* memory = std::aligned_alloc(4096, kScratchBytes);
      if (memory == nullptr) throw std::bad_alloc();
      scratch_.push_back(static_cast<char*>(memory));
    }
    for (int i = 1; i < threads_; i++) {
      workers_.emplace_back(&Team::work, this, i);
      if (!cpus_.empty()) stay_on(workers_.back(), cpus_[i]);
    }
  } catch (...) {  // no memory, or a limit on threads: those that began have to end before they can be forgotten
    end();
    throw;
  }
}

Team::~Team() { end(); }

void Team::end() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    job_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  for (char* memory : scratch_) std::free(memory);
}

void Team::run(void (*f)(void*, int), void* context) {
  StaysOn stays(cpus_);
  function_ = f;
  context_ = context;
  if (threads_ > 1) {
    job_.fetch_add(1);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
  }
  {
    Denormals denormals;
    f(context, 0);
  }
  barrier();
}

void Team::work(int thread) {
  uint32_t seen = 0;
  Denormals denormals;
  for (;;) {
    wait_for(job_, seen);
    seen = job_.load();
    if (ending_) return;
    function_(context_, thread);
    barrier();
  }
}

void Team::barrier() {
  if (threads_ == 1) return;
  uint32_t round = passed_.load();
  if (arrived_.fetch_add(1) + 1 == uint32_t(threads_)) {
    arrived_.store(0);
    passed_.store(round + 1);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    return;
  }
  wait_for(passed_, round);
}

// Until `word` differs from `old`. A sleeper is counted before it looks again, and a waker changes the word before it
// looks at the count: one of the two sees the other (both orders are sequentially consistent).
void Team::wait_for(std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < kSpins; i++) {
    if (word.load(std::memory_order_acquire) != old) return;
    WEFT_PAUSE();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return word.load() != old; });
  sleepers_.fetch_sub(1);
}

}  // namespace weft
