// Choosing tokens: argmax, shifted logits, min_p, top_k and nucleus sampling without a sort, log probabilities.
//
// Probabilities are integers. The mass of a token is round(2^b * exp((x - peak) / T)), with b as large as keeps the sum of
// a whole vocabulary below 2^63 (47 bits for 49,152 tokens), so sums are exact in any order, and what a full stable sort
// would sample is found by selection: O(vocab), whatever the distribution. Rounding moves less than vocab * 2^-(b+1) of
// the probability (2^-32 for 49,152 tokens) between tokens.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>

#include "weft_cpu.h"
#include "weft_sampling.h"

namespace {

constexpr int32_t kBlock = 128;  // tokens whose maximum is kept: a search for the likeliest passes most of them over
constexpr int32_t kDigits = 1 << 11;
constexpr int32_t kInfinite = 0x7f800000;
constexpr double kSharpest = 1e300;  // largest 1 / T: finite, so that the peak's own exponent stays 0
constexpr double kNear = 6.0;        // first look among tokens of more than exp(-6) of the peak: see `Row::find`

struct Peak {
  int32_t key;     // of the maximum
  int32_t widest;  // largest magnitude, as bits: above kInfinite when there is a NaN
};

// The bits of a number as another of its size.
template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A float as an integer in the same order; both zeros are one.
inline int32_t key_of(float x) {
  const int32_t bits = bits_as<int32_t>(x + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float value_of(int32_t key) { return bits_as<float>(key ^ ((key >> 31) & 0x7fffffff)); }

// ---- the passes over a row, compiled once for each width of vectors

#define WEFT_INLINE static inline __attribute__((always_inline))

// block[i]: the largest key of tokens [i * kBlock, (i + 1) * kBlock)
WEFT_INLINE Peak scan_row(const float* x, int32_t vocab, int32_t* block) {
  Peak peak{std::numeric_limits<int32_t>::min(), 0};
  for (int32_t start = 0; start < vocab; start += kBlock) {
    const int32_t end = vocab - start < kBlock ? vocab : start + kBlock;
    int32_t best = std::numeric_limits<int32_t>::min(), widest = 0;
    for (int32_t i = start; i < end; ++i) {
      const int32_t key = key_of(x[i]), size = key < 0 ? ~key : key;
      best = key > best ? key : best;
      widest = size > widest ? size : widest;
    }
    block[start / kBlock] = best;
    peak.key = best > peak.key ? best : peak.key;
    peak.widest = widest > peak.widest ? widest : peak.widest;
  }
  return peak;
}

// mass[i] = round(2^bits * exp((x[i] - peak) * inverse)); returns their sum. exp by Cody and Waite's reduction and Taylor's
// polynomial of degree 12 on [-ln 2 / 2, ln 2 / 2] (error below 2^-52), in multiplications and additions only.
WEFT_INLINE int64_t weigh_row(const float* x, int32_t vocab, double peak, double inverse, int32_t bits, int64_t* mass) {
  constexpr double kLog2e = 0x1.71547652b82fep+0, kHigh = 0x1.62e42feep-1, kLow = 0x1.a39ef35793c76p-33;
  constexpr double kRound = 0x1.8p+52, kInteger = 0x1p+52;  // adding one rounds to an integer, held in the low bits
  const uint64_t exponent = static_cast<uint64_t>(1023 + bits), integer = bits_as<uint64_t>(kInteger);
  uint64_t total = 0;
  for (int32_t i = 0; i < vocab; ++i) {
    const double y = (static_cast<double>(x[i]) - peak) * inverse;
    const uint64_t counts =
        -static_cast<uint64_t>(y > -64.0);  // all ones, or 0: below, a token is far from half a unit
    const double t = y * kLog2e + kRound, k = t - kRound;
    const double r = (y - k * kHigh) - k * kLow;
    double p = 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const double power = bits_as<double>((bits_as<uint64_t>(t) + exponent) << 52);  // 2^(k + bits)
    const uint64_t units = (bits_as<uint64_t>(p * power + kInteger) - integer) & counts;
    mass[i] = static_cast<int64_t>(units);
    total += units;
  }
  return static_cast<int64_t>(total);
}

// Tokens whose bit is not set become impossible.
WEFT_INLINE void mask_row(float* x, int32_t vocab, const uint32_t* mask) {
  constexpr float kImpossible = -std::numeric_limits<float>::infinity();
  for (int32_t start = 0; start < vocab; start += 32) {
    const uint32_t word = mask[start / 32];
    if (word == 0xffffffffu) continue;
    const int32_t end = vocab - start < 32 ? vocab - start : 32;
    for (int32_t i = 0; i < end; ++i) x[start + i] = word >> i & 1u ? x[start + i] : kImpossible;
  }
}

struct Passes {
  void (*mask)(float*, int32_t, const uint32_t*);
  Peak (*scan)(const float*, int32_t, int32_t*);
  int64_t (*weigh)(const float*, int32_t, double, double, int32_t, int64_t*);
};

#define WEFT_PASSES(name, target)                                                                              \
  target void mask_##name(float* x, int32_t vocab, const uint32_t* mask) { mask_row(x, vocab, mask); }         \
  target Peak scan_##name(const float* x, int32_t vocab, int32_t* block) { return scan_row(x, vocab, block); } \
  target int64_t weigh_##name(const float* x, int32_t vocab, double peak, double inverse, int32_t bits,        \
                              int64_t* mass) {                                                                 \
    return weigh_row(x, vocab, peak, inverse, bits, mass);                                                     \
  }                                                                                                            \
  constexpr Passes name{mask_##name, scan_##name, weigh_##name};

WEFT_PASSES(portable, )
#if defined(__x86_64__) && WEFT_COMPILED >> 1 & 1  // WEFT_AVX2
WEFT_PASSES(avx2, __attribute__((target("avx2"))))
#define WEFT_HAS_AVX2
#endif
#if defined(__x86_64__) && WEFT_COMPILED >> 2 & 1  // WEFT_AVX512
WEFT_PASSES(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))))
#define WEFT_HAS_AVX512
#endif

[[maybe_unused]] bool has(int32_t level) { return weft_levels() >> level & 1; }

// The widest passes that were compiled in for a level; NULL where the CPU lacks them.
const Passes* passes_of(int32_t level) {
  if (level < WEFT_PORTABLE || level >= WEFT_LEVELS) return nullptr;
#if defined(WEFT_HAS_AVX512)
  if (level >= WEFT_AVX512) return has(WEFT_AVX512) ? &avx512 : nullptr;
#endif
#if defined(WEFT_HAS_AVX2)
  if (level >= WEFT_AVX2) return has(WEFT_AVX2) ? &avx2 : nullptr;
#endif
  return &portable;
}

// ---- workspace

struct Space {
  int64_t* mass;   // [vocab]
  int64_t* digit;  // [kDigits]
  float* shifted;  // [vocab]
  int32_t* list;   // [vocab] candidates, in order of their ids
  int32_t* rest;   // [vocab] the candidates still in question
  int32_t* block;  // [blocks] of the row
  int32_t* block_of_shifted;
};

// Bytes of it all; without a base, these alone.
int64_t lay_out(char* base, int64_t vocab, Space* space) {
  const int64_t blocks = (vocab + kBlock - 1) / kBlock;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* const here = base == nullptr ? nullptr : base + used;
    used += (bytes + 63) / 64 * 64;
    return here;
  };
  space->mass = reinterpret_cast<int64_t*>(take(vocab * 8));
  space->digit = reinterpret_cast<int64_t*>(take(kDigits * 8));
  space->shifted = reinterpret_cast<float*>(take(vocab * 4));
  space->list = reinterpret_cast<int32_t*>(take(vocab * 4));
  space->rest = reinterpret_cast<int32_t*>(take(vocab * 4));
  space->block = reinterpret_cast<int32_t*>(take(blocks * 4));
  space->block_of_shifted = reinterpret_cast<int32_t*>(take(blocks * 4));
  return used;
}

int32_t mass_bits(int32_t vocab) {
  int32_t length = 0;
  while (length < 31 && (vocab >> length) != 0) ++length;
  return std::min(51, 63 - length);
}

// ---- one row

uint64_t mix(uint64_t value) {  // SplitMix64's finalizer
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

uint64_t random_bits(const weft_draw& draw) { return mix(mix(mix(draw.seed) ^ draw.choice) ^ draw.position) >> 11; }

// floor(bits * mass / 2^53): where in [0, mass) a draw of 53 bits falls.
int64_t part_of(uint64_t bits, int64_t mass) {
  return static_cast<int64_t>(static_cast<unsigned __int128>(bits) * static_cast<uint64_t>(mass) >> 53);
}

struct Found {
  int32_t token;
  int64_t through;  // mass of the tokens up to it and with it, likeliest first
};

struct Row {
  const float* x;
  const int32_t* block;
  int32_t vocab;
  int32_t peak;  // key

  int32_t digit_of(int32_t token, int32_t shift) const {
    const uint32_t ordered = static_cast<uint32_t>(key_of(x[token])) ^ 0x80000000u;
    return static_cast<int32_t>(ordered >> shift & (kDigits - 1));
  }

  // Tokens whose key is at least `least`, in order of their ids.
  int32_t gather(int32_t least, int32_t* list) const {
    int32_t n = 0;
    for (int32_t start = 0; start < vocab; start += kBlock) {
      if (block[start / kBlock] < least) continue;
      const int32_t end = vocab - start < kBlock ? vocab : start + kBlock;
      for (int32_t i = start; i < end; ++i) {
        list[n] = i;
        n += key_of(x[i]) >= least;
      }
    }
    return n;
  }

  int32_t likeliest() const {
    int32_t i = 0;
    while (block[i] != peak) ++i;
    for (i *= kBlock; key_of(x[i]) != peak;) ++i;
    return i;
  }

  // A key that at least n tokens have or exceed: of the blocks' maxima the n-th largest, where there are so many.
  int32_t exceeded_by(int32_t n, int32_t* scratch) const {
    const int32_t blocks = (vocab + kBlock - 1) / kBlock;
    if (n > blocks) return std::numeric_limits<int32_t>::min();
    std::copy(block, block + blocks, scratch);
    std::nth_element(scratch, scratch + n - 1, scratch + blocks, std::greater<int32_t>());
    return scratch[n - 1];
  }

  // The token whose mass covers `position` when the n of `list` are laid end to end, likeliest first and the lower id
  // first among equals: radix selection on the keys, most significant digit first.
  template <typename Mass>
  Found cover(const int32_t* list, int32_t n, int64_t position, const Space& space, const Mass& mass) const {
    int64_t above = 0;
    for (const int32_t shift : {21, 10, 0}) {
      std::memset(space.digit, 0, kDigits * sizeof *space.digit);
      for (int32_t i = 0; i < n; ++i) space.digit[digit_of(list[i], shift)] += mass(list[i]);
      int32_t digit = kDigits - 1;
      while (above + space.digit[digit] <= position) above += space.digit[digit--];
      int32_t kept = 0;
      for (int32_t i = 0; i < n; ++i) {
        const int32_t token = list[i];
        space.rest[kept] = token;
        kept += digit_of(token, shift) == digit;
      }
      list = space.rest;
      n = kept;
    }
    while (above + mass(*list) <= position) above += mass(*list++);
    return {*list, above + mass(*list)};
  }
};

// Finds by position in the mass, looking among the few likeliest tokens first: those within kNear of the peak hold most of
// a language model's probability, and a flat row costs one more gather.
class Selection {
 public:
  Selection(const Row& row, const weft_draw& draw, double inverse, int64_t total, const Space& space)
      : row_(row), space_(space), total_(total) {
    if (draw.min_p > 0.0 || draw.top_k > 0)
      keep(draw, inverse);
    else
      take(within(kNear * draw.temperature));
  }

  // Of the tokens that may be drawn.
  int64_t total() const { return total_; }

  Found find(int64_t position) {
    if (position >= covered_) take(std::numeric_limits<int32_t>::min());
    return row_.cover(space_.list, n_, position, space_, [this](int32_t token) { return space_.mass[token]; });
  }

 private:
  // The key of the peak less so much.
  int32_t within(double distance) const {
    const double least = static_cast<double>(value_of(row_.peak)) - distance;
    const bool all = !(least > -std::numeric_limits<float>::max());
    return all ? std::numeric_limits<int32_t>::min() : key_of(static_cast<float>(least));
  }

  void take(int32_t least) {
    n_ = row_.gather(least, space_.list);
    cover_all();
  }

  void cover_all() {
    covered_ = 0;
    for (int32_t i = 0; i < n_; ++i) covered_ += space_.mass[space_.list[i]];
  }

  template <typename Keeps>
  void filter(const Keeps& keeps) {
    int32_t kept = 0;
    for (int32_t i = 0; i < n_; ++i) {
      const int32_t token = space_.list[i];
      space_.list[kept] = token;
      kept += keeps(token);
    }
    n_ = kept;
  }

  // The tokens that min_p and top_k keep; no other is ever looked for.
  void keep(const weft_draw& draw, double inverse) {
    const double peak = static_cast<double>(value_of(row_.peak));
    int32_t bound = std::numeric_limits<int32_t>::min();
    if (draw.top_k > 0) bound = row_.exceeded_by(draw.top_k, space_.rest);
    if (draw.min_p > 0.0) {
      const double least = std::log(draw.min_p);
      bound = std::max(bound, within((1.0 - least) * draw.temperature));  // one more than is kept: sums are rounded
      n_ = row_.gather(bound, space_.list);
      filter([&](int32_t token) { return (row_.x[token] - peak) * inverse >= least; });
    } else {
      n_ = row_.gather(bound, space_.list);
    }
    if (draw.top_k > 0 && n_ > draw.top_k) {
      const int32_t last = row_.cover(space_.list, n_, draw.top_k - 1, space_, [](int32_t) { return 1; }).token;
      const int32_t key = key_of(row_.x[last]);
      filter([&](int32_t token) {
        const int32_t its = key_of(row_.x[token]);
        return its > key || (its == key && token <= last);
      });
    }
    cover_all();
    total_ = covered_;
  }

  const Row& row_;
  const Space& space_;
  int64_t total_;
  int32_t n_ = 0;
  int64_t covered_ = 0;
};

// Mass of the smallest set of likeliest tokens that reaches top_p of the total (at least one token).
int64_t needed_mass(double top_p, int64_t total) {
  if (!(top_p < 1.0)) return total;
  const double wanted = std::ceil(top_p * static_cast<double>(total));
  return wanted < 1.0 ? 1 : std::min(static_cast<int64_t>(wanted), total);
}

int32_t drawn(const Row& row, const weft_draw& draw, const Passes& passes, const Space& space) {
  const double peak = static_cast<double>(value_of(row.peak));
  const double inverse = 1.0 / draw.temperature < kSharpest ? 1.0 / draw.temperature : kSharpest;
  const int64_t total = passes.weigh(row.x, row.vocab, peak, inverse, mass_bits(row.vocab), space.mass);
  Selection selection(row, draw, inverse, total, space);
  const int64_t needed = needed_mass(draw.top_p, selection.total());
  const int64_t kept = needed == selection.total() ? needed : selection.find(needed - 1).through;
  return selection.find(part_of(random_bits(draw), kept)).token;
}

// The row that tokens are chosen from: shifted, then masked.
const float* shift(const float* x, int32_t vocab, const weft_draw& draw, const Passes& passes, float* shifted) {
  std::memcpy(shifted, x, static_cast<size_t>(vocab) * sizeof *x);
  for (int32_t i = 0; i < draw.n_shifted; ++i) {
    const int32_t token = draw.shifted[i];
    if (token < 0 || token >= vocab) continue;
    double y = x[token];
    if (draw.scale != nullptr) {
      y += draw.bias[i];
      y = y > 0.0 ? y / draw.scale[i] : y * draw.scale[i];
    }
    shifted[token] = static_cast<float>(y + draw.shift[i]);
  }
  if (draw.mask != nullptr) passes.mask(shifted, vocab, draw.mask);
  return shifted;
}

// The n likeliest tokens of the row. The n-th largest of the blocks' maxima bounds the candidates from below.
int32_t likeliest_n(const Row& row, int32_t n, const Space& space, int32_t* tokens) {
  const auto insert = [&](int32_t* top, int32_t held, int32_t candidate, auto key) {
    if (held == n && key(top[held - 1]) >= key(candidate)) return held;
    int32_t at = held < n ? held++ : n - 1;
    for (; at > 0 && key(top[at - 1]) < key(candidate); --at) top[at] = top[at - 1];
    top[at] = candidate;
    return held;
  };
  const int32_t blocks = (row.vocab + kBlock - 1) / kBlock;
  int32_t best[WEFT_MAX_TOP], held = 0;
  for (int32_t i = 0; i < blocks; ++i) held = insert(best, held, i, [&](int32_t b) { return row.block[b]; });
  const int32_t lowest = key_of(-std::numeric_limits<float>::infinity()) + 1;  // probability zero stays out
  const int32_t bound = held == n ? row.block[best[held - 1]] : lowest;
  const int32_t found = row.gather(bound > lowest ? bound : lowest, space.list);
  held = 0;
  for (int32_t i = 0; i < found; ++i)
    held = insert(tokens, held, space.list[i], [&](int32_t t) { return key_of(row.x[t]); });
  return held;
}

void write_logprobs(const Row& row, int32_t n_top, const Passes& passes, const Space& space, weft_sampled* out) {
  const double peak = static_cast<double>(value_of(row.peak));
  const int32_t bits = mass_bits(row.vocab);
  const int64_t total = passes.weigh(row.x, row.vocab, peak, 1.0, bits, space.mass);
  const double spread =
      std::log(static_cast<double>(total) * bits_as<double>(static_cast<uint64_t>(1023 - bits) << 52));
  const auto logprob = [&](int32_t token) { return static_cast<float>((row.x[token] - peak) - spread); };
  out->logprob = logprob(out->token);
  out->n_top = n_top > 0 ? likeliest_n(row, n_top, space, out->top_token) : 0;
  for (int32_t i = 0; i < out->n_top; ++i) out->top_logprob[i] = logprob(out->top_token[i]);
}

bool usable(const Peak& peak) {
  return peak.widest <= kInfinite && peak.key < kInfinite && peak.key > key_of(-std::numeric_limits<float>::infinity());
}

void sample_row(const float* x, int32_t vocab, const weft_draw* draw, const Passes& passes, const Space& space,
                weft_sampled* out) {
  out->token = -1;
  out->n_top = 0;
  out->logprob = 0.0f;
  const Peak peak = passes.scan(x, vocab, space.block);
  if (!usable(peak)) return;
  const Row raw{x, space.block, vocab, peak.key};
  if (draw != nullptr && draw->given > 0) {
    out->token = draw->given - 1;
    if (draw->n_top >= 0) write_logprobs(raw, draw->n_top, passes, space, out);
    return;
  }
  Row row = raw;
  if (draw != nullptr && (draw->n_shifted > 0 || draw->mask != nullptr)) {
    row.x = shift(x, vocab, *draw, passes, space.shifted);
    row.block = space.block_of_shifted;
    const Peak of_shifted = passes.scan(row.x, vocab, space.block_of_shifted);
    if (!usable(of_shifted)) return;
    row.peak = of_shifted.key;
  }
  const bool greedy = draw == nullptr || draw->temperature == 0.0;
  out->token = greedy ? row.likeliest() : drawn(row, *draw, passes, space);
  if (draw != nullptr && draw->n_top >= 0) write_logprobs(raw, draw->n_top, passes, space, out);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int64_t weft_sample_workspace_bytes(int32_t vocab) {
  Space space;
  return vocab < 1 ? static_cast<int64_t>(WEFT_E_SIZE) : lay_out(nullptr, vocab, &space);
}

__attribute__((visibility("default"))) int32_t weft_sample(int32_t level, const float* logits, int64_t row_stride,
                                                           int32_t vocab, int32_t n_rows, const weft_draw* rows,
                                                           weft_sampled* out, void* workspace,
                                                           int64_t workspace_bytes) {
  const Passes* const passes = passes_of(level);
  if (passes == nullptr) return WEFT_E_LEVEL;
  if (vocab < 1 || n_rows < 0 || row_stride < vocab) return WEFT_E_SIZE;
  for (int32_t i = 0; rows != nullptr && i < n_rows; ++i)
    if (rows[i].n_top > WEFT_MAX_TOP || rows[i].n_shifted < 0 || rows[i].top_k < 0 || rows[i].given < 0 ||
        rows[i].given > vocab || !(rows[i].temperature >= 0.0) || !std::isfinite(rows[i].temperature) ||
        rows[i].min_p > 1.0)
      return WEFT_E_SIZE;
  if (workspace_bytes < weft_sample_workspace_bytes(vocab)) return WEFT_E_WORKSPACE;
  Space space;
  lay_out(static_cast<char*>(workspace), vocab, &space);
  for (int32_t i = 0; i < n_rows; ++i)
    sample_row(logits + i * row_stride, vocab, rows == nullptr ? nullptr : rows + i, *passes, space, out + i);
  return 0;
}

}  // extern "C"
