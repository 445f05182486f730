// A fuzz target (libFuzzer) of the native library: bytes become a small model, adapters, sequences and a few steps over them.
//
// What has to hold of every valid plan, beside what the sanitizers see: the same bits with other threads, another level of
// the numerics class, layers in two calls and a workspace full of NaNs; the same bits of a token whose sequence is prefilled
// alone and at once (of finite weights: a NaN reaches what lies in its block); a callback and a count for each layer. Of
// every draw: the same on all levels, inside the vocabulary, allowed by the mask, among the top_k. And what the library
// promises to refuse is refused by its code. All buffers have exactly the sizes that weft_cpu.h states.
//
// What the library trusts its caller in, and this never breaks: pointers, sizes of arrays, ids of tokens, pages and slots,
// the order of rows and segments, and layers in [0, layers].
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft_cpu.h"
#include "weft_sampling.h"

namespace {

#define CHECK(holds, ...)                                                      \
  do {                                                                         \
    if (!(holds)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s. ", __FILE__, __LINE__, #holds); \
      std::fprintf(stderr, "" __VA_ARGS__);                                    \
      std::fputc('\n', stderr);                                                \
      std::abort();                                                            \
    }                                                                          \
  } while (0)

// ---- numbers from the input, zeros behind its end

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  uint8_t byte() { return at_ < end_ ? *at_++ : 0; }
  uint64_t word(int bytes = 8) {
    uint64_t word = 0;
    for (int i = 0; i < bytes; i++) word = word << 8 | byte();
    return word;
  }
  int below(int n) { return int((n <= 256 ? byte() : word(2)) % unsigned(n)); }
  bool one_in(int n) { return byte() % unsigned(n) == unsigned(n - 1); }
  template <class T, size_t N>
  T of(const T (&choices)[N]) {
    return choices[below(int(N))];
  }

 private:
  const uint8_t *at_, *end_;
};

class Random {  // SplitMix64: weights need more numbers than an input has
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  float within(float most) { return most * (float(next() >> 40) / float(1 << 23) - 1.0f); }

 private:
  uint64_t state_;
};

const float kWild[] = {NAN, INFINITY, -INFINITY, 3.4e38f, -3.4e38f, 1e-40f, -0.0f, 1e30f};
const double kStrange[] = {0.0, 1.0, NAN, INFINITY, -INFINITY, -1.0, 1e-320, 1e308, 0.5, 1e-9, 2.0, 0.999999};

// ---- memory of exactly `n` elements, 64-byte aligned

template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n = 0, int fill = 0) : size_(n) {
    void* memory = nullptr;
    CHECK(posix_memalign(&memory, 64, size_t(n) * sizeof(T)) == 0);
    std::memset(memory, fill, size_t(n) * sizeof(T));
    memory_.reset(static_cast<T*>(memory));
  }
  template <class List>
  static Buffer of(const List& list) {
    Buffer made(int64_t(list.size()));
    std::copy(list.begin(), list.end(), made.data());
    return made;
  }
  T* data() const { return memory_.get(); }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) const { return memory_.get()[i]; }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T, Free> memory_;
  int64_t size_;
};

weft_pool* pool_of(int threads) {
  static std::map<int, std::unique_ptr<weft_pool, decltype(&weft_pool_free)>> pools;
  const auto [at, is_new] = pools.try_emplace(threads, nullptr, weft_pool_free);
  if (is_new) at->second.reset(weft_pool_new(threads));
  return at->second.get();
}

std::vector<int> usable_levels() {
  std::vector<int> levels;
  for (int i = 0; i < WEFT_LEVELS; i++)
    if (weft_levels() >> i & 1) levels.push_back(i);
  return levels;
}

// ---- a model with its adapters

struct Model {
  weft_model m{};
  bool wild;  // numbers that no model should have
  std::vector<weft_layer> layers;
  std::vector<weft_rope> ropes;
  std::vector<std::vector<weft_lora_site>> adapters;
  std::vector<const weft_lora_site*> slots;
  int site_rank = 0;

  Model(Bytes& in, Random& random) : wild(in.one_in(4)), random_(random) {
    m.layers = 1 + in.below(2);
    m.kv_heads = 1 + in.below(2);
    m.heads = m.kv_heads * in.of({1, 2, 3, 4, 17});
    m.head_dim = 16 * in.of({1, 2, 3, 4, 5, 6, 8, 16});
    while (m.heads * m.head_dim > 544) m.head_dim -= 16;  // an input shall take milliseconds
    m.hidden = 16 * (1 + in.below(6));
    m.inner = 16 * (1 + in.below(6));
    m.vocab = 1 + in.below(90);
    weights_ = in.of({WEFT_BF16, WEFT_FP32, WEFT_INT8, WEFT_INT4});
    m.kind = weights_ == WEFT_FP32 ? WEFT_FP32 : WEFT_BF16;
    m.kv_kind = m.head_dim % 32 == 0 && in.one_in(3) ? WEFT_INT4 : m.kind;
    m.page_tokens = 16 * (1 + in.below(4));
    m.eps = in.one_in(8) ? 0.0f : 1e-5f;
    m.score_cap = in.one_in(4) ? 2.0f : 0.0f;
    m.logit_cap = in.one_in(4) ? 3.0f : 0.0f;
    m.activation = in.of({WEFT_SILU, WEFT_GELU});
    m.gated = !in.one_in(4);
    m.layer_norm = in.one_in(4);
    m.row_norms = in.one_in(4);
    m.embedding_scale = in.one_in(4) ? 12.0f : 1.0f;
    m.residual_scale = in.one_in(4) ? 0.2f : 1.0f;
    m.query_scale = in.one_in(4) ? 0.02f : 0.1f;
    m.query_growth = in.one_in(4) ? 0.1f : 0.0f;
    m.growth_tokens = 1 + in.below(40);
    m.top_share = in.of({0.0f, 0.0f, 0.3f, 1.0f, 1e-6f});
    m.embedding_kind = in.of({WEFT_BF16, WEFT_FP32});
    const bool norms = in.one_in(2) || m.row_norms, bias = in.one_in(2), post = in.one_in(4),
               pre = !post || in.one_in(2);
    ropes.resize(size_t(1 + in.below(2)));
    for (weft_rope& rope : ropes) {
      rope.factor = in.one_in(4) ? 1.3f : 1.0f;
      rope.size = in.one_in(4) ? 2 * (1 + in.below(m.head_dim / 2)) : m.head_dim;
      float* frequency = floats(rope.size / 2, 0.0f);
      for (int d = 0; d < rope.size / 2; d++) frequency[d] = std::pow(10000.0f, -2.0f * float(d) / float(rope.size));
      rope.inverse_frequency = rope.long_frequency = frequency;
    }
    m.rope = ropes.data();
    m.ropes = int32_t(ropes.size());
    const auto norm = [&](bool is_there) { return is_there ? floats(m.hidden * 2, 1.5f) : nullptr; };
    const int q_norm = m.head_dim * (m.row_norms ? m.heads : 1), k_norm = m.head_dim * (m.row_norms ? m.kv_heads : 1);
    layers.resize(size_t(m.layers));
    for (weft_layer& layer : layers) {
      layer.attention_norm = norm(pre);
      layer.attention_post_norm = norm(post);
      layer.mlp_norm = norm(pre);
      layer.mlp_post_norm = norm(post);
      layer.q_norm = norms ? floats(q_norm, 1.5f) : nullptr;
      layer.k_norm = norms ? floats(k_norm, 1.5f) : nullptr;
      layer.qkv = matrix((m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden, bias);
      layer.o = matrix(m.hidden, m.heads * m.head_dim, bias);
      layer.gate_up = matrix((m.gated ? 2 : 1) * m.inner, m.hidden, bias);
      layer.down = matrix(m.hidden, m.inner, bias);
      layer.window = in.of({0, 0, 1, 5, 64, 70, 1000});
      layer.rope = in.below(m.ropes + 1) - 1;
    }
    m.layer = layers.data();
    m.embedding = m.embedding_kind == WEFT_FP32 ? static_cast<const void*>(floats(m.vocab * m.hidden, 1.0f))
                                                : bf16s(m.vocab * m.hidden, 1.0f);
    m.norm = norm(true);
    m.head = matrix(m.vocab, m.hidden, false);
    adapters.resize(size_t(in.below(3)));
    for (auto& adapter : adapters) add_adapter(in, adapter);
    for (auto& adapter : adapters) slots.push_back(adapter.data());
    slots.push_back(nullptr);  // nobody is in the last one
  }

  int64_t page_bytes() const {
    const int64_t numbers = int64_t(m.page_tokens) * m.head_dim;
    const int64_t head = m.kv_kind == WEFT_FP32   ? 4 * numbers
                         : m.kv_kind == WEFT_BF16 ? 2 * numbers
                                                  : numbers / 2 + numbers / (m.head_dim % 64 ? 32 : 64) * 4;
    return head * m.kv_heads * 2 * m.layers;
  }

 private:
  float number(float most) {
    if (!wild || random_.next() % 64 != 0) return random_.within(most);
    return kWild[random_.next() % 8];
  }
  float* floats(int n, float most) {
    floats_.emplace_back(n);
    for (int i = 0; i < n; i++) floats_.back()[i] = number(most);
    return floats_.back().data();
  }
  uint16_t* bf16s(int n, float most) {
    halves_.emplace_back(n);
    for (int i = 0; i < n; i++) {
      const float value = number(most);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      halves_.back()[i] = uint16_t(bits >> 16);
    }
    return halves_.back().data();
  }
  // Packed; int8's scales go to `scale`.
  void* packed(int n_out, int n_in, int pad_in, int kind, float* scale) {
    const float most = 1.5f / std::sqrt(float(n_in));
    const bool wide = random_.next() % 2 != 0;
    const void* source = wide ? static_cast<const void*>(floats(n_out * n_in, most)) : bf16s(n_out * n_in, most);
    packed_.emplace_back(weft_packed_bytes(kind, n_out, n_in, pad_in));
    CHECK(weft_pack(pool_of(1), source, wide ? WEFT_FP32 : WEFT_BF16, n_in, n_out, n_in, pad_in, packed_.back().data(),
                    kind, scale) == 0);
    return packed_.back().data();
  }
  weft_matrix matrix(int n_out, int n_in, bool bias) {
    float* scale = weights_ == WEFT_INT8 ? floats((n_out + 15) / 16 * 16, 1.0f) : nullptr;
    return {packed(n_out, n_in, 32, weights_, scale),
            scale,
            bias ? floats(n_out, 0.1f) : nullptr,
            n_in,
            n_out,
            weights_,
            0};
  }

  void add_adapter(Bytes& in, std::vector<weft_lora_site>& adapter) {
    const int kv = m.kv_heads * m.head_dim;
    const std::vector<int> mlp(size_t(m.gated ? 2 : 1), m.inner);
    const std::vector<int> outs[4] = {{m.heads * m.head_dim, kv, kv}, {m.hidden}, mlp, {m.hidden}};
    const int ins[4] = {m.hidden, m.heads * m.head_dim, m.hidden, m.inner};
    adapter.resize(size_t(m.layers) * 4);
    for (size_t i = 0; i < adapter.size(); i++) {
      weft_lora_site& site = adapter[i];
      int start = 0, columns = 0;
      const int present = in.byte();
      for (size_t j = 0; j < outs[i % 4].size(); start += outs[i % 4][j++]) {
        if (!(present >> j & 1)) continue;
        const int rank = in.of({1, 2, 3, 8, 15, 16, 17, 33, 1, 70});
        weft_lora_slice& slice = site.slice[site.n_slices++];
        slice = {
            packed(outs[i % 4][j], rank, 2, m.kind, nullptr), site.rank, rank, start, outs[i % 4][j], number(2.0f), 0};
        site.rank += rank;
        columns += (rank + 1) & ~1;
      }
      if (site.n_slices > 0) site.a = packed(site.rank, ins[i % 4], 32, m.kind, nullptr);
      site_rank = std::max(site_rank, columns);
    }
  }

  Random& random_;
  int weights_;
  std::vector<Buffer<float>> floats_;
  std::vector<Buffer<uint16_t>> halves_;
  std::vector<Buffer<char>> packed_;
};

// ---- sequences, and steps over them

struct Sequence {
  int slot;  // -1: no adapter, and no segment
  std::vector<int32_t> tokens, pages;
};

struct Part {  // of a sequence, in a step
  int sequence, begin, end;
  std::vector<int> wanted;
};

using Script = std::vector<std::vector<Part>>;
using Logits = std::map<std::pair<int, int>, std::vector<float>>;  // of (sequence, position)

struct Way {                                // in which a script is played
  int level, threads, workspace_fill, cut;  // cut: layers [0, cut) and the others in two calls
};

bool alike(float a, float b) { return std::memcmp(&a, &b, 4) == 0 || (a != a && b != b); }

int layers_called;
void count_layer(int32_t) { layers_called++; }

class Player {
 public:
  Player(const Model& model, const std::vector<Sequence>& sequences, int64_t pages)
      : model_(model), sequences_(sequences), kv_(pages * model.page_bytes()) {}

  Logits play(const Script& script, const Way& way) {
    Logits all;
    for (const std::vector<Part>& step : script) play_step(step, way, all);
    return all;
  }

  const Buffer<char>& kv() const { return kv_; }

  // What weft_run returns of a step that `break_it(model, step, level)` has changed.
  template <class Break>
  int32_t refused(const std::vector<Part>& parts, const Way& way, Break break_it) {
    Step step(*this, parts, way);
    break_it(step.model, step.s, step.level);
    return weft_run(step.level, pool_of(way.threads), &step.model, &step.s);
  }

 private:
  struct Step {
    weft_model model;
    weft_step s{};
    int level;
    std::vector<std::pair<int, int>> wanted;
    Buffer<int32_t> tokens, table, sampled;
    Buffer<weft_row> rows;
    Buffer<weft_segment> segments;
    Buffer<float> hidden, logits, scores;
    Buffer<char> workspace;

    Step(const Player& player, const std::vector<Part>& parts, const Way& way)
        : model(player.model_.m), level(way.level) {
      std::vector<int32_t> all_tokens, all_pages, all_sampled;
      std::vector<weft_row> all_rows;
      std::vector<weft_segment> all_segments;
      int context = 0;
      for (const Part& part : parts) {
        const Sequence& sequence = player.sequences_[size_t(part.sequence)];
        const int start = int(all_tokens.size()), end = start + part.end - part.begin;
        all_rows.push_back({start, end, part.begin, int(all_pages.size()), 0});
        all_tokens.insert(all_tokens.end(), sequence.tokens.begin() + part.begin, sequence.tokens.begin() + part.end);
        const int n_pages = (part.end + model.page_tokens - 1) / model.page_tokens;
        all_pages.insert(all_pages.end(), sequence.pages.begin(), sequence.pages.begin() + n_pages);
        for (int position : part.wanted) {
          wanted.push_back({part.sequence, position});
          all_sampled.push_back(start + position - part.begin);
        }
        if (sequence.slot >= 0) {
          if (!all_segments.empty() && all_segments.back().slot == sequence.slot && all_segments.back().end == start)
            all_segments.back().end = end;
          else
            all_segments.push_back({start, end, sequence.slot});
        }
        context = std::max(context, part.end);
      }
      const int n = int(all_tokens.size()), n_sampled = int(all_sampled.size());
      tokens = Buffer<int32_t>::of(all_tokens);
      table = Buffer<int32_t>::of(all_pages);
      sampled = Buffer<int32_t>::of(all_sampled);
      rows = Buffer<weft_row>::of(all_rows);
      segments = Buffer<weft_segment>::of(all_segments);
      hidden = Buffer<float>(int64_t(n) * model.hidden, way.workspace_fill);
      logits = Buffer<float>(int64_t(n_sampled) * model.vocab, way.workspace_fill);
      workspace = Buffer<char>(weft_workspace_bytes(&model, n, player.model_.site_rank, n_sampled), way.workspace_fill);
      model.kv = player.kv_.data();
      if (model.top_share > 0) {
        model.score_positions = (context + 63) / 64 * 64;
        scores = Buffer<float>(int64_t(way.threads) * 16 * model.score_positions, way.workspace_fill);
        model.scores = scores.data();
      }
      s.n_tokens = n, s.n_rows = int(all_rows.size()), s.n_segments = int(all_segments.size()), s.n_sampled = n_sampled;
      s.first = 0, s.last = model.layers;
      s.tokens = tokens.data(), s.rows = rows.data(), s.page_table = table.data(), s.segments = segments.data(),
      s.sampled = sampled.data();
      s.slots = player.model_.slots.data(), s.hidden = hidden.data(), s.logits = logits.data();
      s.workspace = workspace.data(), s.workspace_bytes = workspace.size();
    }
  };

  void play_step(const std::vector<Part>& parts, const Way& way, Logits& all) {
    Step step(*this, parts, way);
    int64_t done = 0;
    step.s.layers_done = &done;
    step.s.layer_done = count_layer;
    layers_called = 0;
    for (const int end : {std::min(way.cut, step.model.layers), step.model.layers}) {
      step.s.last = end;
      if (end > step.s.first) CHECK(weft_run(step.level, pool_of(way.threads), &step.model, &step.s) == 0);
      step.s.first = end;
    }
    CHECK(done == step.model.layers && layers_called == done);
    for (size_t i = 0; i < step.wanted.size(); i++) {
      const float* row = step.logits.data() + int64_t(i) * step.model.vocab;
      all[step.wanted[i]].assign(row, row + step.model.vocab);
    }
  }

  const Model& model_;
  const std::vector<Sequence>& sequences_;
  Buffer<char> kv_;
};

void check_same(const Logits& one, const Logits& other, const char* what) {
  for (const auto& [key, row] : one) {
    const auto found = other.find(key);
    CHECK(found != other.end(), "%s", what);
    for (size_t i = 0; i < row.size(); i++)
      CHECK(alike(row[i], found->second[i]), "%s: sequence %d, position %d, token %zu: %.9g and %.9g", what, key.first,
            key.second, i, row[i], found->second[i]);
  }
}

// ---- sampling

struct Draws {
  std::vector<weft_draw> rows;
  std::vector<Buffer<int32_t>> tokens;
  std::vector<Buffer<double>> numbers;
  std::vector<Buffer<uint32_t>> masks;
  bool valid = true;

  Draws(Bytes& in, int n, int vocab) {
    for (int i = 0; i < n; i++) rows.push_back(draw(in, vocab));
  }

 private:
  double number(Bytes& in) { return in.one_in(2) ? in.of(kStrange) : double(in.byte()) / 128.0; }

  weft_draw draw(Bytes& in, int vocab) {
    weft_draw made{};
    made.seed = in.word(2), made.choice = in.byte(), made.position = in.byte();
    made.temperature = number(in), made.top_p = number(in), made.min_p = number(in);
    made.top_k = in.one_in(2) ? in.below(vocab + 3) : 0;
    made.n_top = in.below(WEFT_MAX_TOP + 3) - 1;
    made.given = in.one_in(6) ? in.below(vocab + 2) : 0;
    if (in.one_in(3)) {
      masks.emplace_back((vocab + 31) / 32);
      for (int i = 0; i < masks.back().size(); i++) masks.back()[i] = uint32_t(in.one_in(2) ? in.word(4) : 0xffffffffu);
      made.mask = masks.back().data();
    }
    if (in.one_in(3)) shift(in, vocab, made);
    if (in.one_in(40)) made.top_k = -1;
    valid = valid && made.temperature >= 0.0 && std::isfinite(made.temperature) && !(made.min_p > 1.0) &&
            made.n_top <= WEFT_MAX_TOP && made.given <= vocab && made.top_k >= 0;
    return made;
  }

  void shift(Bytes& in, int vocab, weft_draw& made) {
    std::vector<int32_t> shifted;
    for (int i = 0, token = in.below(3) - 1; i < 8 && token < vocab + 2; i++, token += 1 + in.below(20))
      shifted.push_back(token);
    made.n_shifted = int(shifted.size());
    tokens.push_back(Buffer<int32_t>::of(shifted));
    made.shifted = tokens.back().data();
    const bool scaled = in.one_in(2);
    for (const double** numbers_of : {&made.shift, &made.bias, &made.scale}) {
      if (numbers_of != &made.shift && !scaled) continue;
      numbers.emplace_back(made.n_shifted);
      for (int i = 0; i < made.n_shifted; i++) numbers.back()[i] = number(in);
      *numbers_of = numbers.back().data();
    }
  }
};

// The row that a draw chooses from, in plain words.
std::vector<float> shifted_row(const float* x, int vocab, const weft_draw& draw) {
  std::vector<float> row(x, x + vocab);
  for (int i = 0; i < draw.n_shifted; i++) {
    const int token = draw.shifted[i];
    if (token < 0 || token >= vocab) continue;
    double y = x[token];
    if (draw.scale != nullptr) {
      y += draw.bias[i];
      y = y > 0.0 ? y / draw.scale[i] : y * draw.scale[i];
    }
    row[size_t(token)] = float(y + draw.shift[i]);
  }
  for (int i = 0; draw.mask != nullptr && i < vocab; i++)
    if (!(draw.mask[i / 32] >> (i % 32) & 1)) row[size_t(i)] = -INFINITY;
  return row;
}

bool has_maximum(const std::vector<float>& row) {
  float most = -INFINITY;
  for (float x : row) {
    if (x != x) return false;
    most = std::max(most, x);
  }
  return std::isfinite(most);
}

void check_token(const float* x, int vocab, const weft_draw& draw, const weft_sampled& out) {
  const std::vector<float> raw(x, x + vocab), row = shifted_row(x, vocab, draw);
  CHECK(out.n_top >= 0 && out.n_top <= std::max(0, std::min(draw.n_top, vocab)), "%d", out.n_top);
  if (!has_maximum(raw) || (draw.given == 0 && !has_maximum(row))) {
    CHECK(out.token == -1, "%d", out.token);
    return;
  }
  CHECK(out.token >= 0 && out.token < vocab, "%d of %d", out.token, vocab);
  for (int i = 0; i < out.n_top; i++) {
    CHECK(out.top_token[i] >= 0 && out.top_token[i] < vocab && std::isfinite(out.top_logprob[i]) &&
          out.top_logprob[i] < 1e-6f);
    if (i > 0)
      CHECK(x[out.top_token[i]] < x[out.top_token[i - 1]] ||
            (x[out.top_token[i]] == x[out.top_token[i - 1]] && out.top_token[i] > out.top_token[i - 1]));
  }
  if (draw.given > 0) {
    CHECK(out.token == draw.given - 1);
    return;
  }
  const float its = row[size_t(out.token)];
  CHECK(its > -INFINITY, "token %d is not possible", out.token);
  int better = 0;
  for (int i = 0; i < vocab; i++) better += row[size_t(i)] > its || (row[size_t(i)] == its && i < out.token);
  if (draw.temperature == 0.0 || draw.top_p <= 0.0) CHECK(better == 0, "%d better ones than %d", better, out.token);
  if (draw.top_k > 0) CHECK(better < draw.top_k, "%d better ones than %d", better, out.token);
}

void sample(Bytes& in, const std::vector<int>& levels, const float* logits, int n, int vocab) {
  const Draws draws(in, n, vocab);
  const Buffer<weft_draw> rows = Buffer<weft_draw>::of(draws.rows);
  std::vector<Buffer<weft_sampled>> found;
  for (const int level : levels) {
    found.emplace_back(n);
    const Buffer<char> workspace(weft_sample_workspace_bytes(vocab), 0xff);
    const int code = weft_sample(level, logits, vocab, vocab, n, rows.data(), found.back().data(), workspace.data(),
                                 workspace.size());
    CHECK(code == (draws.valid ? 0 : WEFT_E_SIZE), "%d", code);
    if (code != 0) return;
    CHECK(weft_sample(level, logits, vocab, vocab, n, rows.data(), found.back().data(), workspace.data(),
                      workspace.size() - 1) == WEFT_E_WORKSPACE);
  }
  for (int i = 0; i < n; i++) {
    const weft_sampled& one = found[0][i];
    check_token(logits + int64_t(i) * vocab, vocab, draws.rows[size_t(i)], one);
    for (const auto& other : found) {
      CHECK(other[i].token == one.token && other[i].n_top == one.n_top && alike(other[i].logprob, one.logprob),
            "levels differ");
      for (int k = 0; k < one.n_top; k++)
        CHECK(other[i].top_token[k] == one.top_token[k] && alike(other[i].top_logprob[k], one.top_logprob[k]));
    }
  }
}

void sample_any(Bytes& in, const std::vector<int>& levels) {
  const int vocab = 1 + in.below(700), n = 1 + in.below(3);
  const int spread = in.below(12);
  Random random(in.word(4));
  const Buffer<float> logits(int64_t(n) * vocab);
  for (int64_t i = 0; i < logits.size(); i++) logits[i] = random.within(float(1 << spread) / 8.0f);
  if (in.one_in(2))  // few values: many are equal
    for (int64_t i = 0; i < logits.size(); i++) logits[i] = float(int(logits[i]));
  for (int left = in.below(6); left > 0; left--) {
    float any;
    const uint32_t bits = uint32_t(in.word(4));
    std::memcpy(&any, &bits, 4);
    logits[in.below(n * vocab)] = in.one_in(2) ? kWild[in.below(8)] : any;
  }
  sample(in, levels, logits.data(), n, vocab);
}

// ---- a whole input

std::vector<Sequence> sequences_of(Bytes& in, const Model& model, Random& random, int64_t& n_pages) {
  std::vector<Sequence> sequences(size_t(1 + in.below(4)));
  n_pages = in.below(3);
  for (Sequence& sequence : sequences) {
    sequence.slot = in.below(int(model.slots.size()) + 1) - 1;
    sequence.tokens.resize(size_t(1 + (in.one_in(8) ? in.below(260) : in.below(40))));
    for (int32_t& token : sequence.tokens) token = int32_t(random.next() % uint64_t(model.m.vocab));
    sequence.pages.resize((sequence.tokens.size() + size_t(model.m.page_tokens) - 1) / size_t(model.m.page_tokens));
    n_pages += int64_t(sequence.pages.size());
  }
  std::vector<int32_t> free(static_cast<size_t>(n_pages));
  for (int32_t i = 0; i < n_pages; i++) free[size_t(i)] = i;
  for (size_t i = free.size(); i > 1; i--) std::swap(free[i - 1], free[random.next() % i]);
  for (Sequence& sequence : sequences)
    for (int32_t& page : sequence.pages) page = free.back(), free.pop_back();
  return sequences;
}

Script script_of(Bytes& in, const std::vector<Sequence>& sequences) {
  Script script;
  std::vector<int> done(sequences.size(), 0);
  for (int step = 1 + in.below(4); step > 0; step--) {
    std::vector<Part> parts;
    const int who = step == 1 ? 0xff : in.byte();
    for (size_t i = 0; i < sequences.size(); i++) {
      const int left = int(sequences[i].tokens.size()) - done[i];
      if (left == 0 || !(who >> i & 1)) continue;
      const int n = step == 1 ? left : 1 + (in.one_in(2) ? 0 : in.below(left));
      Part part{int(i), done[i], done[i] + n, {}};
      if (in.one_in(4)) part.wanted.push_back(part.begin);
      if (!in.one_in(4) && (part.wanted.empty() || n > 1)) part.wanted.push_back(part.end - 1);
      done[i] += n;
      parts.push_back(part);
    }
    if (!parts.empty()) script.push_back(parts);
  }
  return script;
}

// Each sequence alone and at once, and all logits that the script wants.
Script alone(const Script& script, const std::vector<Sequence>& sequences) {
  Script made;
  for (size_t i = 0; i < sequences.size(); i++) {
    Part whole{int(i), 0, 0, {}};
    for (const auto& parts : script)
      for (const Part& part : parts)
        if (part.sequence == int(i)) {
          whole.end = part.end;
          whole.wanted.insert(whole.wanted.end(), part.wanted.begin(), part.wanted.end());
        }
    if (whole.end > 0) made.push_back({whole});
  }
  return made;
}

// A level that computes the same bits: see numerics_class of the executor.
int level_alike(Bytes& in, const std::vector<int>& levels, int level, int kind) {
  const auto of_class = [&](int one) {
    return one == WEFT_PORTABLE ? 0 : one == WEFT_AVX512_BF16 && kind == WEFT_BF16 ? 1 : 2;
  };
  std::vector<int> same;
  for (int other : levels)
    if (of_class(other) == of_class(level)) same.push_back(other);
  return same[size_t(in.below(int(same.size())))];
}

void check_refused(Bytes& in, Player& player, const std::vector<Part>& parts, const Way& way) {
  const int which = in.below(12);
  int32_t expected = WEFT_E_SIZE;
  const int32_t code = player.refused(parts, way, [&](weft_model& m, weft_step& s, int& level) {
    if (which == 0) level = in.of<int>({-1, WEFT_LEVELS, 31, 1 << 20}), expected = WEFT_E_LEVEL;
    if (which == 1) s.n_tokens = -in.below(3);
    if (which == 2) m.hidden = in.of({0, -16, m.hidden + 1});
    if (which == 3) m.inner = in.of({0, -16, m.inner + 15});
    if (which == 4) m.head_dim = in.of({0, 8, 17, 272, 512});
    if (which == 5) m.page_tokens = in.of({0, -16, 24});
    if (which == 6) in.one_in(2) ? m.kv_heads = in.of({0, -1, 99}) : m.heads = in.of({0, -m.heads});
    if (which == 7) m.kv_kind = m.kind == WEFT_FP32 ? WEFT_BF16 : WEFT_INT8;
    if (which == 10) m.kind = m.kv_kind = in.of<int>({WEFT_INT8, WEFT_INT4, -1, 99});
    if (which == 11) in.one_in(2) ? s.first = -1 : s.last = in.of({-1, m.layers + 1});
    if (which == 8) s.workspace_bytes = in.of({0, 1, 64, 1000}), expected = WEFT_E_WORKSPACE;
    if (which == 9)
      m.top_share = 0.5f, m.score_positions = s.rows[0].position + s.rows[0].end - s.rows[0].start - 1,
      expected = WEFT_E_WORKSPACE;
  });
  CHECK(code == expected, "case %d: %d, not %d", which, code, expected);
}

void run(Bytes& in) {
  static const std::vector<int> levels = usable_levels();
  if (in.one_in(3)) return sample_any(in, levels);
  const int level = levels[size_t(in.below(int(levels.size())))];
  Random random(in.word(4));
  const Model model(in, random);
  int64_t n_pages = 0;
  const std::vector<Sequence> sequences = sequences_of(in, model, random, n_pages);
  const Script script = script_of(in, sequences);
  Player first(model, sequences, n_pages), second(model, sequences, n_pages);
  if (in.one_in(8)) return check_refused(in, first, script[0], {level, 1, 0, 0});

  const Logits logits = first.play(script, {level, 1, 0, 0});
  const Way other{level_alike(in, levels, level, model.m.kind), 1 + in.below(3), 0xff, in.below(4)};
  check_same(logits, second.play(script, other), "another way");
  if (!model.wild) {
    CHECK(std::memcmp(first.kv().data(), second.kv().data(), size_t(first.kv().size())) == 0, "keys and values");
    Player third(model, sequences, n_pages);
    check_same(logits, third.play(alone(script, sequences), {level, 2, 0xff, 0}), "alone");
  }
  for (const auto& [key, row] : logits) {
    (void)key;
    const Buffer<float> exact = Buffer<float>::of(row);
    sample(in, levels, exact.data(), 1, model.m.vocab);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size);
  run(in);
  return 0;
}
