#include "pool.h"

#include <sched.h>

#include <cstdlib>
#include <new>

#include "clock.h"

namespace weft {

namespace {
// 10 to 50 us of spinning (a pause is 40 to 140 cycles): about as long as a phase of a small step is uneven. Then the
// thread sleeps, so that an idle engine costs nothing and a busy machine loses no core to waiting.
constexpr int kSpins = 1000;
constexpr int kAnywhere = -1;

class Locked {
 public:
  explicit Locked(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
  ~Locked() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t& mutex_;
};

#if defined(__linux__)
cpu_set_t only(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return set;
}

// The calling thread's CPU of that number, where these are as many as the team's threads; otherwise none.
int cpu_of(int thread, int threads) {
  cpu_set_t set;
  if (threads == 1 || sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) != threads) return kAnywhere;
  int cpu = 0;
  while (!CPU_ISSET(cpu, &set) || thread-- > 0) cpu++;
  return cpu;
}

void stay_on(pthread_t worker, int cpu) {
  if (cpu == kAnywhere) return;
  const cpu_set_t set = only(cpu);
  pthread_setaffinity_np(worker, sizeof set, &set);  // refused: it runs where it may
}

// The calling thread stays on that CPU while this lives, unless it may not run on all of the team's.
class StaysOn {
 public:
  StaysOn(int cpu, int threads) {
    if (cpu == kAnywhere || sched_getaffinity(0, sizeof before_, &before_) != 0 || CPU_COUNT(&before_) != threads)
      return;
    const cpu_set_t set = only(cpu);
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
int cpu_of(int, int) { return kAnywhere; }
void stay_on(pthread_t, int) {}
struct StaysOn {
  StaysOn(int, int) {}
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

Team::Team(int threads) : wanted_(threads < 1 ? 1 : threads) {
  workers_ = static_cast<Worker*>(std::aligned_alloc(alignof(Worker), sizeof(Worker) * size_t(wanted_)));
  for (; workers_ != nullptr && threads_ < wanted_; threads_++) {
    Worker& worker = *new (workers_ + threads_) Worker;
    worker.team = this;
    worker.number = threads_;
    worker.cpu = cpu_of(threads_, wanted_);
    worker.scratch = static_cast<char*>(std::aligned_alloc(4096, kScratchBytes));
    const bool begins =
        worker.scratch != nullptr && (threads_ == 0 || pthread_create(&worker.thread, nullptr, start, &worker) == 0);
    if (!begins) {
      std::free(worker.scratch);
      return;
    }
    if (threads_ > 0) stay_on(worker.thread, worker.cpu);
  }
}

Team::~Team() {
  ending_ = true;
  job_.fetch_add(1);
  wake_all();
  for (int i = 1; i < threads_; i++) pthread_join(workers_[i].thread, nullptr);
  for (int i = 0; i < threads_; i++) std::free(workers_[i].scratch);
  std::free(workers_);
}

void* Team::start(void* worker) {
  const Worker& me = *static_cast<Worker*>(worker);
  me.team->work(me.number);
  return nullptr;
}

void Team::wake_all() {
  Locked lock(mutex_);
  pthread_cond_broadcast(&wake_);
}

void Team::run(void (*f)(void*, int), void* context) {
  StaysOn stays(workers_[0].cpu, threads_);
  function_ = f;
  context_ = context;
  if (threads_ > 1) {
    job_.fetch_add(1);
    if (sleepers_.load() > 0) wake_all();
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
    if (sleepers_.load() > 0) wake_all();
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
  Locked lock(mutex_);
  sleepers_.fetch_add(1);
  while (word.load() == old) pthread_cond_wait(&wake_, &mutex_);
  sleepers_.fetch_sub(1);
}

}  // namespace weft
