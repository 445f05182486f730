// The exported functions: which levels there are, and the way from the C ABI to the functions of one.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "clock.h"
#include "level.h"
#include "pack.h"
#include "pool.h"
#include "ranks.h"
#include "weft_cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define WEFT_EXPORT extern "C" __attribute__((visibility("default")))

struct weft_pool {
  explicit weft_pool(int threads) : team(threads) {}
  weft::Team team;
};

namespace weft {
namespace {

const Level* const kLevels[WEFT_LEVELS] = {&kPortable, &kAvx2, &kAvx512, &kAvx512Bf16, &kAmxBf16};

#if defined(__x86_64__)
struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};

bool bit(unsigned word, int n) { return word >> n & 1; }

uint64_t enabled_states() {  // what the operating system saves and restores
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

bool tiles_permitted() {  // Linux gives the tile state to a process that asks for it
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

int detected() {
  const Leaf one(1, 0), seven(7, 0), more(7, 1);
  int levels = 1 << WEFT_PORTABLE;
  if (!bit(one.c, 27)) return levels;  // OSXSAVE
  const uint64_t states = enabled_states();
  const bool avx = (states & 0x6) == 0x6, avx512 = avx && (states & 0xe0) == 0xe0,
             tiles = (states & 0x60000) == 0x60000;
  if (avx && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5)) levels |= 1 << WEFT_AVX2;
  if (!avx512 || !bit(seven.b, 16) || !bit(seven.b, 17) || !bit(seven.b, 30) || !bit(seven.b, 31)) return levels;
  levels |= 1 << WEFT_AVX512;
  if (!bit(more.a, 5)) return levels;
  levels |= 1 << WEFT_AVX512_BF16;
  if (tiles && bit(seven.d, 22) && bit(seven.d, 24) && tiles_permitted()) levels |= 1 << WEFT_AMX_BF16;
  return levels;
}
#else
int detected() { return 1 << WEFT_PORTABLE; }
#endif

int usable() {
  static std::atomic<int> known{0};
  int levels = known.load(std::memory_order_relaxed);
  if (levels == 0) known.store(levels = detected() & WEFT_COMPILED, std::memory_order_relaxed);
  return levels;
}

const Level* level_of(int32_t level) {
  return level >= 0 && level < WEFT_LEVELS && (usable() >> level & 1) ? kLevels[level] : nullptr;
}

// The widest row of v: every slice's part begins at an even column.
int64_t widest_site(const weft_step& step) {
  int64_t widest = 0;
  for (int i = 0; i < step.n_segments; i++) {
    const weft_lora_site* sites = step.slots[step.segments[i].slot];
    for (int k = step.first * 4; sites != nullptr && k < step.last * 4; k++) {
      int64_t columns = 0;
      for (int j = 0; sites[k].a != nullptr && j < sites[k].n_slices; j++) columns += (sites[k].slice[j].rank + 1) & ~1;
      widest = columns > widest ? columns : widest;
    }
  }
  return widest;
}

// The largest that a rank gives to the others in a step: partial sums of all tokens, their shrunk rows, or logits.
int64_t slot_bytes(const weft_model& m, const weft_step& step, int64_t site_rank) {
  const int64_t rows = int64_t(step.n_tokens) * std::max<int64_t>(m.hidden, site_rank),
                logits = int64_t(step.n_sampled) * m.vocab;
  return 4 * std::max(rows, logits);
}

bool scores_fit(const weft_model& m, const weft_step& step) {
  for (int i = 0; m.top_share > 0 && i < step.n_rows; i++)
    if (step.rows[i].position + step.rows[i].end - step.rows[i].start > m.score_positions) return false;
  return true;
}

constexpr int64_t kWidestSite = 3072;  // three projections of rank 1024: beyond it the ranks are most likely wrong

bool fits(const weft_model& m) {
  const auto whole = [](int32_t n, int32_t of) { return n > 0 && n % of == 0; };
  const bool sixteens = whole(m.hidden, 16) && whole(m.inner, 16) && whole(m.head_dim, 16) && whole(m.page_tokens, 16);
  const bool kinds = (m.kind == WEFT_BF16 || m.kind == WEFT_FP32) &&
                     (m.kv_kind == m.kind || (m.kv_kind == WEFT_INT4 && m.head_dim % 32 == 0));
  return sixteens && kinds && m.head_dim <= 256 && m.kv_heads > 0 && whole(m.heads, m.kv_heads);
}

bool has_layers(const weft_model& m, const weft_step& step) {
  return 0 <= step.first && step.first <= step.last && step.last <= m.layers;
}

// Why a step cannot run, but for its layers; 0: it can.
int32_t refusal(const Level& with, const weft_model& m, const weft_step& step, int64_t site_rank, int64_t sampled) {
  if (!fits(m) || step.n_tokens < 1 || site_rank > kWidestSite) return WEFT_E_SIZE;
  return with.workspace_bytes(m, step.n_tokens, site_rank, sampled) > step.workspace_bytes ? WEFT_E_WORKSPACE : 0;
}

bool packs(int32_t kind, int64_t n_out, int64_t n_in, int32_t pad_in) {
  return kind >= WEFT_BF16 && kind <= WEFT_INT4 && n_out >= 0 && n_in > 0 && pad_in > 0 &&
         (kind != WEFT_INT4 || n_in <= kMostInt4Inputs);
}

}  // namespace
}  // namespace weft

WEFT_EXPORT int32_t weft_abi(void) { return WEFT_ABI; }
WEFT_EXPORT int32_t weft_levels(void) { return weft::usable(); }

WEFT_EXPORT weft_pool* weft_pool_new(int32_t threads) {
  void* memory = std::aligned_alloc(alignof(weft_pool), sizeof(weft_pool));
  if (memory == nullptr) return nullptr;
  weft_pool* pool = new (memory) weft_pool(threads);
  if (pool->team.is_whole()) return pool;
  weft_pool_free(pool);
  return nullptr;
}
WEFT_EXPORT void weft_pool_free(weft_pool* pool) {
  if (pool == nullptr) return;
  pool->~weft_pool();
  std::free(pool);
}

WEFT_EXPORT int64_t weft_workspace_bytes(const weft_model* model, int32_t n_tokens, int32_t site_rank,
                                         int32_t n_sampled) {
  // The widest element of all levels: bf16 values are kept in fp32 where there is no bf16 instruction.
  return weft::kPortable.workspace_bytes(*model, n_tokens, site_rank, n_sampled);
}

WEFT_EXPORT int32_t weft_run(int32_t level, weft_pool* pool, const weft_model* model, const weft_step* step) {
  const weft::Level* with = weft::level_of(level);
  if (with == nullptr) return WEFT_E_LEVEL;
  if (!weft::has_layers(*model, *step)) return WEFT_E_SIZE;
  const int64_t site_rank = weft::widest_site(*step);
  if (const int32_t refusal = weft::refusal(*with, *model, *step, site_rank, step->n_sampled)) return refusal;
  if (!weft::scores_fit(*model, *step)) return WEFT_E_WORKSPACE;
  if (model->ranks != nullptr && weft::slot_bytes(*model, *step, site_rank) > model->ranks->slot_bytes)
    return WEFT_E_SIZE;
  return with->run(pool->team, *model, *step, site_rank);
}

WEFT_EXPORT int32_t weft_lora(int32_t level, weft_pool* pool, const weft_model* model, const weft_step* step,
                              int32_t site, int32_t n_in, int32_t n_out, const float* x, float* y) {
  const weft::Level* with = weft::level_of(level);
  if (with == nullptr) return WEFT_E_LEVEL;
  const bool sixteens = n_in % 16 == 0 && n_out % 16 == 0;
  if (!sixteens || n_in > model->hidden || model->ranks != nullptr || site < 0 || site > 3) return WEFT_E_SIZE;
  const int64_t site_rank = weft::widest_site(*step);
  if (const int32_t refusal = weft::refusal(*with, *model, *step, site_rank, 0)) return refusal;
  with->lora(pool->team, *model, *step, site_rank, site, n_in, n_out, x, y);
  return 0;
}

WEFT_EXPORT void weft_end_ranks(const weft_ranks* ranks) { weft::end_ranks(*ranks); }

WEFT_EXPORT int64_t weft_layers_done(const int64_t* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }

WEFT_EXPORT int64_t weft_await_layers(const int64_t* counter, int64_t count, int64_t timeout_us) {
  const double end_s = weft::clock_s() + 1e-6 * double(timeout_us);
  timespec pause{0, 20 * 1000};
  int64_t done;
  while ((done = weft_layers_done(counter)) < count && weft::clock_s() < end_s) {
    nanosleep(&pause, nullptr);
    pause.tv_nsec = std::min(2 * pause.tv_nsec, 1000 * 1000L);  // each look takes time from the threads that compute
  }
  return done;
}

WEFT_EXPORT int64_t weft_packed_bytes(int32_t kind, int64_t n_out, int64_t n_in, int32_t pad_in) {
  return weft::packs(kind, n_out, n_in, pad_in) ? weft::packed_bytes(kind, n_out, n_in, pad_in) : WEFT_E_SIZE;
}

WEFT_EXPORT int32_t weft_pack(weft_pool* pool, const void* source, int32_t from, int64_t stride, int64_t n_out,
                              int64_t n_in, int32_t pad_in, void* to, int32_t kind, float* scale) {
  if ((from != WEFT_BF16 && from != WEFT_FP32) || !weft::packs(kind, n_out, n_in, pad_in) ||
      (kind == WEFT_INT8 && scale == nullptr))
    return WEFT_E_SIZE;
  weft::pack(pool->team, source, from, stride, n_out, n_in, pad_in, to, kind, scale);
  return 0;
}

WEFT_EXPORT int32_t weft_pack_jobs(weft_pool* pool, const weft_pack_job* jobs, int32_t n_jobs, int32_t kind) {
  if (kind != WEFT_BF16 && kind != WEFT_FP32) return WEFT_E_SIZE;
  for (int32_t j = 0; j < n_jobs; j++)
    if ((jobs[j].kind != WEFT_BF16 && jobs[j].kind != WEFT_FP32) || jobs[j].n_in < 1 || jobs[j].pad_in < 1)
      return WEFT_E_SIZE;
  return weft::pack_jobs(pool->team, jobs, n_jobs, kind) ? 0 : WEFT_E_MEMORY;
}

WEFT_EXPORT void weft_touch(const weft_pack_job* jobs, int32_t n_jobs, int32_t kind) {
  weft::touch_jobs(jobs, n_jobs, kind);
}

WEFT_EXPORT void weft_copy(weft_pool* pool, void* const* to, const void* const* from, int64_t n, int64_t bytes) {
  weft::copy_blocks(pool->team, to, from, n, bytes);
}

WEFT_EXPORT int32_t weft_matmul(int32_t level, weft_pool* pool, const weft_matrix* matrix, const void* x,
                                int32_t x_kind, int32_t m, float* y) {
  const weft::Level* with = weft::level_of(level);
  if (with == nullptr) return WEFT_E_LEVEL;
  with->matmul(pool->team, *matrix, x, x_kind, m, y);
  return 0;
}

WEFT_EXPORT double weft_read_seconds(int32_t level, weft_pool* pool, const void* data, int64_t bytes,
                                     int32_t repetitions) {
  const weft::Level* with = weft::level_of(level);
  return with == nullptr ? double(WEFT_E_LEVEL)
                         : with->read_seconds(pool->team, static_cast<const char*>(data), bytes, repetitions);
}

WEFT_EXPORT double weft_peak_seconds(int32_t level, weft_pool* pool, int64_t blocks) {
  const weft::Level* with = weft::level_of(level);
  return with == nullptr ? double(WEFT_E_LEVEL) : with->peak_seconds(pool->team, blocks);
}
