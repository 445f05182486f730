// The functions of a level, for the translation units that set WEFT_LEVEL, WEFT_NAME and the compiler's flags.
#pragma once
#include <cstdlib>

#define WEFT_JOIN_AS(a, b) a##b
#define WEFT_JOIN(a, b) WEFT_JOIN_AS(a, b)
#define WEFT_NS WEFT_JOIN(weft_, WEFT_NAME)

#include "clock.h"
#include "level.h"
#include "step.h"

namespace WEFT_NS {

template <class Body>
void on_team(weft::Team& team, Body body) {
  team.run(
      [](void* context, int thread) {
        (*static_cast<Body*>(context))(thread);
        leave_tiles();
      },
      &body);
}

static int64_t workspace_bytes(const weft_model& model, int64_t tokens, int64_t site_rank, int64_t sampled) {
  return Layout(model, tokens, site_rank, sampled, model.kind == WEFT_FP32 ? 4 : sizeof(Bf16X)).bytes;
}

// What all threads do with a step; `each(step, thread)`.
template <class Kind, class Each>
static int32_t step_as(weft::Team& team, const weft_model& model, const weft_step& step, int64_t site_rank, Each each) {
  const Step<Kind> whole(model, step, site_rank);
  on_team(team, [&](int thread) {
    weft::Member me(team, thread);
    each(whole, me);
  });
  return whole.lost() ? WEFT_E_RANKS : 0;
}

template <class Each>
static int32_t with_step(weft::Team& team, const weft_model& model, const weft_step& step, int64_t site_rank,
                         Each each) {
  return model.kind == WEFT_FP32 ? step_as<Fp32Kind>(team, model, step, site_rank, each)
                                 : step_as<Bf16Kind>(team, model, step, site_rank, each);
}

static int32_t run(weft::Team& team, const weft_model& model, const weft_step& step, int64_t site_rank) {
  return with_step(team, model, step, site_rank, [](const auto& whole, weft::Member& me) { whole.walk(me); });
}

static void lora(weft::Team& team, const weft_model& model, const weft_step& step, int64_t site_rank, int site,
                 int n_in, int n_out, const float* x, float* y) {
  with_step(team, model, step, site_rank,
            [&](const auto& whole, weft::Member& me) { whole.lora(me, site, n_in, n_out, x, y); });
}

// A row of x, bf16 or fp32, as the kernels read it.
template <class Kind, class From>
static void copy_row(Kind, const From* from, int n, typename Kind::X* to) {
  From part[16] = {};
  alignas(64) typename Kind::X narrow[16];
  for (int k = 0; k < n; k += 16) {
    const int count = std::min(16, n - k);
    std::memcpy(part, from + k, sizeof(From) * count);
    store_as(Kind{}, narrow, load_x(part));
    std::memcpy(to + k, narrow, sizeof(narrow[0]) * count);
  }
}

template <class Kind, class From>
static void matmul_as(weft::Team& team, const weft_matrix& w, const From* from, int m, float* y) {
  using X = typename Kind::X;
  const int64_t stride = row_stride(w.n_in, sizeof(X)), rows = round_up(m, 32) + 32;
  X* x = static_cast<X*>(std::aligned_alloc(64, round_up(rows * stride * sizeof(X), 64)));
  const int groups = (w.n_out + 15) / 16;
  on_team(team, [&](int thread) {
    weft::Member me(team, thread);
    me.share(m, [&](int64_t i) {
      copy_row(Kind{}, from + i * w.n_in, w.n_in, x + i * stride);
      std::memset(x + i * stride + w.n_in, 0, sizeof(X) * (stride - w.n_in));
    });
    me.share((groups + kUnitGroups - 1) / kUnitGroups, [&](int64_t u) {
      const Span span{int(u) * kUnitGroups, std::min(kUnitGroups, groups - int(u) * kUnitGroups), 0};
      float* panel = reinterpret_cast<float*>(me.scratch());
      for (int row = 0; row < m; row += kPanelRows) {
        const int n = std::min(kPanelRows, m - row), columns = std::min(16 * span.count, w.n_out - 16 * span.group);
        Beside nothing;
        product<Kind>(me, w, x + row * stride, stride, n, span, panel, nothing);
        for (int i = 0; i < n; i++)
          std::memcpy(y + int64_t(row + i) * w.n_out + 16 * span.group, panel + i * kUnitColumns,
                      sizeof(float) * columns);
      }
    });
  });
  std::free(x);
}

static void matmul(weft::Team& team, const weft_matrix& w, const void* x, int x_kind, int m, float* y) {
  if (w.kind == WEFT_FP32)
    matmul_as<Fp32Kind>(team, w, static_cast<const float*>(x), m, y);
  else if (x_kind == WEFT_FP32)
    matmul_as<Bf16Kind>(team, w, static_cast<const float*>(x), m, y);
  else
    matmul_as<Bf16Kind>(team, w, static_cast<const uint16_t*>(x), m, y);
}

// Every thread reads its part, four streams at a time as the weights are read.
static double read_seconds(weft::Team& team, const char* data, int64_t bytes, int repetitions) {
  const int64_t part = bytes / team.threads() / 256 * 256;
  volatile float sink = 0;
  double best = 1e30;
  for (int r = 0; r < repetitions; r++) {
    const double start_s = weft::clock_s();
    on_team(team, [&](int thread) {
      const char* from = data + part * thread;
      F a = zero(), b = zero(), c = zero(), d = zero();
      for (int64_t i = 0; i < part; i += 256) {
        a = add(a, load(reinterpret_cast<const float*>(from + i)));
        b = add(b, load(reinterpret_cast<const float*>(from + i + 64)));
        c = add(c, load(reinterpret_cast<const float*>(from + i + 128)));
        d = add(d, load(reinterpret_cast<const float*>(from + i + 192)));
      }
      sink = sum(add(add(a, b), add(c, d)));
    });
    best = std::min(best, weft::clock_s() - start_s);
  }
  (void)sink;
  return best;
}

// `blocks` products of 16 x 16 x 32 on each thread from operands that stay in registers, or next to them.
static double peak_seconds(weft::Team& team, int64_t blocks) {
  const double start_s = weft::clock_s();
  on_team(team, [&](int thread) {
    char* memory = team.scratch(thread);
    std::memset(memory, 0, 32768);
    Bf16X* x = reinterpret_cast<Bf16X*>(memory);
    float* y = reinterpret_cast<float*>(memory + 16384);
    const char* w = memory + 8192;
#if WEFT_LEVEL == 4
    Beside nothing;
    shape_for_matrix(32);
    tiles_32x32<false, false>(x, 32, w, kTileBytes, 1, y, 32, false, nothing);
    for (int64_t i = 0; i < blocks; i += 4) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
#else
    if constexpr (kPairsAtOnce) {
      for (int64_t i = 0; i < blocks; i += 16)
        dot_all<Bf16W, kTilePairs>(x, 0, 16, [&](int) { return w; }, 16, 64, 32, kTilePairs, y, 0, false);
    } else {  // two rows at a time: their sums stay in registers, and a block is unrolled
      const Bf16X* const rows[2] = {x, x};
      const Columns<1> columns{{w}, 64, 32, 0};
      F sums[2][1] = {{zero()}, {zero()}};
      for (int64_t i = 0; i < 8 * blocks; i++) {
        dot<Bf16W, 2, 1, kTilePairs, false>(rows, columns, kTilePairs, sums);
        asm volatile("" ::: "memory");  // the next one may be another
      }
      for (int m = 0; m < 2; m++) store(y + 16 * m, sums[m][0]);
    }
#endif
  });
  return weft::clock_s() - start_s;
}

}  // namespace WEFT_NS

const weft::Level weft::WEFT_JOIN(k, WEFT_NAME) = {
    WEFT_NS::workspace_bytes, WEFT_NS::run,          WEFT_NS::lora,
    WEFT_NS::matmul,          WEFT_NS::read_seconds, WEFT_NS::peak_seconds};
