// A whole step: layers [first, last) for a batch of rows, walked by all threads of a team together.
//
// Phases of a layer, each shared out in units and ended by a barrier:
//   norm | shrink q|k|v | project q|k|v, rotate, append to KV | attend | shrink o | project o, add | norm |
//   shrink gate|up | project gate|up, silu | shrink down | project down, add
// The shrinks fall away when no row has an adapter. Selective batching (ORCA, OSDI 2022, section 4.3): all but attention
// runs on the flattened tokens. LoRA as in Punica (arXiv 2310.18547, section 4): rows of one adapter are adjacent, a
// shrink reads a site's input once for all its projections, the expand adds to the projection while that is in cache.
//
// Of several tensor ranks each has some heads and inner features. After a shrink, and after `o` and `down`, they exchange
// what they have (S-LoRA, arXiv 2311.03285, section 6.1): at qkv and gate_up a rank has shrunk to some of the columns, at
// o and down to partial sums of all. B is always split by outputs; at o and down it goes into the rank's partial sum.
#pragma once
#include <atomic>
#include <cmath>

#include "attention.h"
#include "best_keys.h"
#include "pool.h"
#include "ranks.h"

namespace WEFT_NS {

constexpr int kNormRows = 8;     // tokens of a unit of norm or rotation
constexpr int kShrinkRows = 32;  // tokens of a unit of a shrink
enum { kQkv = 0, kOut = 1, kGateUp = 2, kDown = 3, kSites = 4 };

// Where a step keeps its intermediates: offsets into the caller's workspace. Matrices have rows to spare for whole tiles.
struct Layout {
  int64_t tokens, x_stride, act_stride, qkv_stride, q_stride, v_stride;
  int64_t x, act, qkv, q, v, cosine, head, units, bytes;

  Layout(const weft_model& m, int64_t n_tokens, int64_t site_rank, int64_t n_sampled, int64_t x_bytes) {
    int64_t at = 0;
    auto take = [&](int64_t n) {
      const int64_t begin = at;
      at = round_up(at + n, 64);
      return begin;
    };
    const int64_t q_size = int64_t(m.heads) * m.head_dim, kv_size = int64_t(m.kv_heads) * m.head_dim;
    tokens = n_tokens;
    const int64_t rows = round_up(n_tokens, 32) + 32;
    const bool post_norms = m.layers > 0 && m.layer != nullptr && m.layer[0].attention_post_norm != nullptr;
    x_stride = row_stride(std::max<int64_t>(m.hidden, q_size), x_bytes);
    act_stride = row_stride(m.inner, x_bytes);
    qkv_stride = q_size + 2 * kv_size;
    q_stride = q_size;
    v_stride = row_stride(site_rank, x_bytes);
    x = take(rows * x_stride * x_bytes);
    act = take(rows * act_stride * x_bytes);
    qkv = take(rows * std::max<int64_t>(qkv_stride, post_norms ? m.hidden : 0) * 4);
    q = take(rows * q_stride * x_bytes);
    v = take(rows * v_stride * x_bytes);
    cosine = take(m.ropes * n_tokens * m.head_dim * 4);
    head = take((round_up(n_sampled, 32) + 32) * x_stride * x_bytes);
    units = take((n_tokens + 2) * 4);
    bytes = at;
  }
};

template <class Kind>
class Step {
  using X = typename Kind::X;

 public:
  Step(const weft_model& model, const weft_step& step, int64_t site_rank)
      : m_(model), s_(step), at_(model, step.n_tokens, site_rank, step.n_sampled, sizeof(X)), tokens_(step.n_tokens) {
    char* w = static_cast<char*>(step.workspace);
    x_ = reinterpret_cast<X*>(w + at_.x);
    act_ = reinterpret_cast<X*>(w + at_.act);
    qkv_ = reinterpret_cast<float*>(w + at_.qkv);
    q_ = reinterpret_cast<X*>(w + at_.q);
    v_ = reinterpret_cast<X*>(w + at_.v);
    cosine_ = reinterpret_cast<float*>(w + at_.cosine);
    head_ = reinterpret_cast<X*>(w + at_.head);
    units_ = reinterpret_cast<int32_t*>(w + at_.units);
    group_ = m_.heads / m_.kv_heads;
    tile_tokens_ = std::max(1, kTile / group_);
    tiles_of_token_ = (group_ + kTile - 1) / kTile;
    const int64_t element = sizeof(X) == 4 && std::is_same<Kind, Fp32Kind>::value ? 4 : 2;
    head_bytes_ = int4_kv() ? m_.page_tokens / kPositions * kv_int4_bytes(m_.head_dim)
                            : int64_t(m_.page_tokens) * m_.head_dim * element;
    page_bytes_ = head_bytes_ * m_.kv_heads * 2 * m_.layers;
    list_units();
    if (ranks_ != nullptr && ranks_->exchange == nullptr) first_half_ = int(weft::exchanges(*ranks_) & 1);
  }

  // After the walk: another rank did not come, and nothing was computed from there on.
  bool lost() const { return lost_; }

  void walk(weft::Member& me) const {
    if (s_.first == 0 && m_.embedding != nullptr) each_token(me, [&](int t) { embed(t); });
    each_token(me, [&](int t) { angles(t); });
    for (int layer = s_.first; layer < s_.last; layer++) {
      if (!run_layer(me, layer)) return;
      if (me.thread() == 0) end_layer(layer);  // behind a barrier: the others have written what they had to
    }
    if (s_.last == m_.layers && m_.head.data != nullptr && s_.n_sampled > 0) logits(me);
  }

  // The adapters of one site of layer 0 alone: y[tokens][n_out] += scale (x A) B, x[tokens][n_in].
  void lora(weft::Member& me, int site, int n_in, int n_out, const float* x, float* y) const {
    each_token(me, [&](int t) {
      X* to = x_ + t * at_.x_stride;
      for (int c = 0; c < n_in; c += 16) store_as(Kind{}, to + c, load(x + int64_t(t) * n_in + c));
      for (int64_t c = n_in; c < at_.x_stride; c++) to[c] = X(0);
    });
    shrink(me, 0, site, x_, at_.x_stride, n_in);
    const int groups = n_out / 16;
    const auto unit = [&](int u, int row, int rows, const Chunk&) {
      const Span span{u * kUnitGroups, std::min(kUnitGroups, groups - u * kUnitGroups), 0};
      float *panel = reinterpret_cast<float*>(me.scratch()), *to = y + int64_t(row) * n_out + 16 * span.group;
      for (int m = 0; m < rows; m++) std::memcpy(panel + m * kUnitColumns, to + int64_t(m) * n_out, 64 * span.count);
      add_lora(0, site, row, rows, &span, 1, panel);
      for (int m = 0; m < rows; m++) std::memcpy(to + int64_t(m) * n_out, panel + m * kUnitColumns, 64 * span.count);
    };
    by_chunks(me, n_in, units_of(groups, kUnitGroups), unit, [] {});
  }

 private:
  // ---- a layer

  // False: another rank is lost.
  bool run_layer(weft::Member& me, int layer) const {
    const weft_layer& w = m_.layer[layer];
    norm_all(me, w.attention_norm);
    if (!shrink(me, layer, kQkv, x_, at_.x_stride, w.qkv.n_in)) return false;
    project_qkv(me, layer, w);
    me.share(int64_t(units_[s_.n_rows]) * m_.kv_heads * tiles_of_token_,
             [&](int64_t u) { attention(me, u, layer, w.window); });
    if (!project_back(me, layer, kOut, w.o, x_, at_.x_stride, w.attention_post_norm)) return false;
    norm_all(me, w.mlp_norm);
    if (!shrink(me, layer, kGateUp, x_, at_.x_stride, w.gate_up.n_in)) return false;
    m_.gated ? gate_up(me, layer, w.gate_up) : up(me, layer, w.gate_up);
    return project_back(me, layer, kDown, w.down, act_, at_.act_stride, w.mlp_post_norm);
  }

  // Queries rotated to q_, keys rotated and values to their pages: beside the product, where units hold whole heads and
  // nothing is asked of all of a token's.
  void project_qkv(weft::Member& me, int layer, const weft_layer& w) const {
    const int dim = m_.head_dim;
    if (kUnitColumns % dim == 0 && !m_.row_norms) {
      project(me, layer, kQkv, w.qkv, x_, at_.x_stride, [&](float* y, int row, int rows, const Span& span) {
        for (int m = 0; m < rows; m++)
          for (int c = 0; c < 16 * span.count; c += dim)
            place_head(y + m * kUnitColumns + c, (16 * span.group + c) / dim, row + m, layer, w);
      });
      return;
    }
    project(me, layer, kQkv, w.qkv, x_, at_.x_stride, copying(qkv_, at_.qkv_stride));
    each_token(me, [&](int t) {
      float* row = qkv_ + t * at_.qkv_stride;
      if (m_.row_norms) {
        root_mean_square_norm(row, w.q_norm, m_.heads * dim);
        root_mean_square_norm(row + m_.heads * dim, w.k_norm, m_.kv_heads * dim);
      }
      for (int h = 0; h < m_.heads + 2 * m_.kv_heads; h++) place_head(row + h * dim, h, t, layer, w);
    });
  }

  // `o` or `down`, added to the residual stream: of several ranks the sum of their parts, of a layer with post-norms its
  // norm, for which a row has to be whole.
  bool project_back(weft::Member& me, int layer, int site, const weft_matrix& w, const X* x, ptrdiff_t xs,
                    const float* post_norm) const {
    if (!shrink(me, layer, site, x, xs, w.n_in)) return false;
    if (ranks_ == nullptr && post_norm == nullptr) {
      project(me, layer, site, w, x, xs, adding());
      return true;
    }
    project(me, layer, site, w, x, xs, copying(ranks_ == nullptr ? qkv_ : own_slot(me), m_.hidden));
    if (ranks_ != nullptr && !exchange(me, int64_t(tokens_) * m_.hidden * 4, false)) return false;
    each_token(me, [&](int t) { add_row(me, t, post_norm); });
    return true;
  }

  // Row t of the residual stream += what was computed of it; of ranks partial sums, added up in their order.
  void add_row(weft::Member& me, int t, const float* post_norm) const {
    float* to = s_.hidden + int64_t(t) * m_.hidden;
    const auto whole = [&](int c) {
      const int64_t at = int64_t(t) * m_.hidden + c;
      F sum = load((ranks_ == nullptr ? qkv_ : slot(me, 0)) + at);
      for (int p = 1; ranks_ != nullptr && p < ranks_->size; p++) sum = add(sum, load(slot(me, p) + at));
      return sum;
    };
    const auto add_to = [&](int c, F value) { store(to + c, add(load(to + c), mul(value, set1(m_.residual_scale)))); };
    if (post_norm != nullptr) return normed(whole, post_norm, m_.hidden, add_to);
    for (int c = 0; c < m_.hidden; c += 16) add_to(c, whole(c));
  }

  void end_layer(int layer) const {
    if (s_.layers_done != nullptr) __atomic_fetch_add(s_.layers_done, 1, __ATOMIC_RELEASE);
    if (s_.layer_done == nullptr) return;
    leave_tiles();  // it may use tiles of its own
    s_.layer_done(layer);
  }

  // A product as it is, to rows of `stride` numbers.
  static auto copying(float* to, int64_t stride) {
    return [=](const float* y, int row, int rows, const Span& span) {
      for (int m = 0; m < rows; m++)
        std::memcpy(to + (row + m) * stride + 16 * span.group, y + m * kUnitColumns + span.column, 64 * span.count);
    };
  }

  // What `o` and `down` give is added to the residual stream, in fp32.
  auto adding() const {
    return [this](const float* y, int row, int rows, const Span& span) {
      for (int m = 0; m < rows; m++)
        for (int c = 0; c < 16 * span.count; c += 16) {
          float* to = s_.hidden + int64_t(row + m) * m_.hidden + 16 * span.group + c;
          store(to, add(load(to), mul(load(y + m * kUnitColumns + span.column + c), set1(m_.residual_scale))));
        }
    };
  }

  template <class Epilogue>
  void project(weft::Member& me, int layer, int site, const weft_matrix& w, const X* x, ptrdiff_t xs,
               Epilogue epilogue) const {
    const int groups = w.n_out / 16;
    panels(me, layer, site, w, x, xs, units_of(groups, kUnitGroups), epilogue, [&](int u) {
      const Span span{u * kUnitGroups, std::min(kUnitGroups, groups - u * kUnitGroups), 0};
      return UnitOf{span, {span}, 1};
    });
  }

  // act(gate) * up, the input of `down`: a unit computes both halves of the same columns, which lie side by side in the
  // matrix. To adapters all of gate comes before all of up.
  void gate_up(weft::Member& me, int layer, const weft_matrix& w) const {
    static_assert(16 * kUnitGroups == 2 * 32, "rows of gate and of up by turns, as weft_cpu.h has it");
    const int half = w.n_out / 32, of_unit = kUnitGroups / 2;
    const auto multiply = [this](const float* y, int row, int rows, const Span& both) {
      const int group = both.group / 2, count = both.count / 2;
      const auto all = [&](auto act) {
        activate(row, rows, group, count, [&](int m, int g) {
          const float* at = y + m * kUnitColumns + 16 * g;
          return mul(act(load(at)), load(at + 16 * count));
        });
      };
      m_.activation == WEFT_SILU ? all([](F x) { return silu(x); }) : all([](F x) { return gelu(x); });
    };
    panels(me, layer, kGateUp, w, x_, at_.x_stride, units_of(half, of_unit), multiply, [&](int u) {
      const int group = u * of_unit, count = std::min(of_unit, half - group);
      return UnitOf{{2 * group, 2 * count, 0}, {{group, count, 0}, {half + group, count, 16 * count}}, 2};
    });
  }

  // act(up), the input of `down` where there is no gate.
  void up(weft::Member& me, int layer, const weft_matrix& w) const {
    project(me, layer, kGateUp, w, x_, at_.x_stride, [this](const float* y, int row, int rows, const Span& span) {
      const auto all = [&](auto act) {
        activate(row, rows, span.group, span.count,
                 [&](int m, int g) { return act(load(y + m * kUnitColumns + 16 * g)); });
      };
      m_.activation == WEFT_SILU ? all([](F x) { return silu(x); }) : all([](F x) { return gelu(x); });
    });
  }

  // Groups of 16 inner features of some rows: made(row, group), both counted from the first of them.
  template <class Made>
  void activate(int row, int rows, int group, int count, Made made) const {
    for (int m = 0; m < rows; m++)
      for (int g = 0; g < count; g++)
        store_as(Kind{}, act_ + (row + m) * at_.act_stride + 16 * (group + g), made(m, g));
    if (16 * (group + count) == m_.inner)  // zeros up to whole blocks of pairs: what lies there may be no number
      for (int m = 0; m < rows; m++)
        for (int64_t c = m_.inner; c < at_.act_stride; c++) act_[(row + m) * at_.act_stride + c] = X(0);
  }

  // The columns of a unit: where they are in the matrix, and to adapters.
  struct UnitOf {
    Span span, site[2];
    int n_site;
  };

  // The panel before, whose sums wait for `epilogue(sums, row, rows, span)`: with tiles and many rows that is done beside the
  // next product.
  template <class Epilogue>
  struct Waiting {
    Epilogue* epilogue;
    float* y;
    int row, rows;
    Span span;

    static void work(void* context, int begin, int end) {
      const Waiting& w = *static_cast<const Waiting*>(context);
      (*w.epilogue)(w.y + begin * kUnitColumns, w.row + begin, end - begin, w.span);
    }
  };

  // All units of a product with its adapters, panel by panel. `columns_of(unit)`: its columns.
  template <class Epilogue, class ColumnsOf>
  void panels(weft::Member& me, int layer, int site, const weft_matrix& w, const X* x, ptrdiff_t xs, int64_t units,
              Epilogue& epilogue, ColumnsOf columns_of) const {
    float* const places = reinterpret_cast<float*>(me.scratch());
    Waiting<Epilogue> waiting{&epilogue, nullptr, 0, 0, {}};
    const auto unit = [&](int u, int row, int rows, const Chunk& chunk) {
      const UnitOf columns = columns_of(u);
      float* const y = places + (waiting.y == places ? kPanelBytes / sizeof(float) : 0);
      Beside beside;
      beside.add_rows(waiting.rows, Waiting<Epilogue>::work, &waiting);
      prefetch_lora(layer, site, row, rows, columns.site, columns.n_site, beside);
      prefetch_next<Kind>(w, columns.span, row - chunk.first, rows, chunk.last - chunk.first, beside);
      product<Kind>(me, w, x + row * xs, xs, rows, columns.span, y, beside);
      beside.all();
      waiting.rows = 0;
      add_lora(layer, site, row, rows, columns.site, columns.n_site, y);
      if (kTiles<Kind> && chunk.last - chunk.first >= kManyRows)
        waiting = {&epilogue, y, row, rows, columns.span};
      else
        epilogue(y, row, rows, columns.span);
    };
    by_chunks(me, w.n_in, units, unit, [&] { Waiting<Epilogue>::work(&waiting, 0, waiting.rows); });
  }

  // ---- LoRA

  const weft_lora_site* site_of(const weft_segment& segment, int layer, int site) const {
    const weft_lora_site* sites = s_.slots[segment.slot];
    const weft_lora_site* found = sites == nullptr ? nullptr : sites + layer * kSites + site;
    return found == nullptr || found->a == nullptr ? nullptr : found;
  }

  // v = scale * (x A) for every row with an adapter; each slice's part begins at an even column. A unit is some rows of a
  // segment and, where there are few such, 16 columns of its rank: one adapter for all rows has to keep all threads busy.
  //
  // Of several ranks each gives its columns, or its partial sums, unscaled and in fp32. False: another rank is lost.
  bool shrink(weft::Member& me, int layer, int site, const X* x, ptrdiff_t xs, int n_in) const {
    if (s_.n_segments == 0) return true;
    int64_t parts = 0;
    int rank = 0, width = 0;
    for (int i = 0; i < s_.n_segments; i++) {
      parts += units_of(s_.segments[i].end - s_.segments[i].start, kShrinkRows);
      if (const weft_lora_site* a = site_of(s_.segments[i], layer, site)) {
        rank = std::max(rank, a->rank);
        width = std::max(width, stacked_rank(*a));
      }
    }
    if (ranks_ == nullptr)
      shrink_all(me, layer, site, x, xs, n_in, parts, rank, nullptr, 0);
    else if (width > 0) {  // the same on every rank
      const int own = by_columns(site) ? int(units_of(width, ranks_->size)) : width;
      shrink_all(me, layer, site, x, xs, n_in, parts, rank, own_slot(me), own);
      if (!exchange(me, int64_t(tokens_) * own * 4, false)) return false;
      me.share(units_of(tokens_, kNormRows), [&](int64_t u) {
        each_adapter(layer, site, int(u) * kNormRows, std::min(kNormRows, tokens_ - int(u) * kNormRows),
                     [&](int begin, int end, const weft_lora_site& a) {
                       for (int t = begin; t < end; t++) join(me, site, a, t, own);
                     });
      });
    }
    return true;
  }

  static bool by_columns(int site) { return site == kQkv || site == kGateUp; }

  static int stacked_rank(const weft_lora_site& site) {
    const weft_lora_slice& last = site.slice[site.n_slices - 1];
    return last.rank_start + last.rank;
  }

  // v of token t from what all ranks have given, `width` columns each.
  void join(weft::Member& me, int site, const weft_lora_site& a, int t, int width) const {
    alignas(64) float whole[16];
    alignas(64) X narrow[16];
    const int64_t row = int64_t(t) * width;
    X* to = v_ + t * at_.v_stride;
    for (int i = 0; i < a.n_slices; to += (a.slice[i].rank + 1) & ~1, i++) {
      const weft_lora_slice& slice = a.slice[i];
      for (int r = 0; r < slice.rank; r += 16) {
        const int n = std::min(16, slice.rank - r);
        for (int k = 0; k < n; k++) whole[k] = joined(me, site, row, slice.rank_start + r + k);
        for (int k = n; k < 16; k++) whole[k] = 0;
        store_as(Kind{}, narrow, mul(load(whole), set1(slice.scale)));
        std::memcpy(to + r, narrow, n * sizeof(X));
      }
      if (slice.rank % 2) to[slice.rank] = X(0);
    }
  }

  float joined(weft::Member& me, int site, int64_t row, int column) const {
    if (by_columns(site)) return slot(me, column % ranks_->size)[row + column / ranks_->size];
    float sum = slot(me, 0)[row + column];
    for (int p = 1; p < ranks_->size; p++) sum += slot(me, p)[row + column];
    return sum;
  }

  // `rank`: the widest A here. `raw`: where rows of `width` columns go as they are; NULL: they go to v, scaled.
  void shrink_all(weft::Member& me, int layer, int site, const X* x, ptrdiff_t xs, int n_in, int64_t parts, int rank,
                  float* raw, int width) const {
    const int groups = parts < 2 * me.threads() ? 1 : kUnitGroups, columns = int(units_of(rank, 16 * groups));
    me.share(parts * columns, [&](int64_t u) {
      int64_t part = u / columns;
      const weft_segment* segment = s_.segments;
      for (int64_t n; part >= (n = units_of(segment->end - segment->start, kShrinkRows)); segment++) part -= n;
      const weft_lora_site* a = site_of(*segment, layer, site);
      const int row = segment->start + int(part) * kShrinkRows, rows = std::min(kShrinkRows, segment->end - row);
      const int group = int(u % columns) * groups;
      if (a == nullptr || 16 * group >= a->rank) return;
      shrink_rows(me, *a, x + row * xs, xs, n_in, row, rows, {group, std::min(groups, (a->rank + 15) / 16 - group), 0},
                  raw, width);
    });
  }

  void shrink_rows(weft::Member& me, const weft_lora_site& site, const X* x, ptrdiff_t xs, int n_in, int row, int rows,
                   const Span& span, float* raw, int width) const {
    const weft_matrix a{site.a, nullptr, nullptr, n_in, site.rank, m_.kind, 0};
    float* y = reinterpret_cast<float*>(me.scratch());
    Beside nothing;
    product<Kind>(me, a, x, xs, rows, span, y, nothing);
    if (raw != nullptr) {
      const int first = 16 * span.group, n = std::min(16 * span.count, site.rank - first);
      for (int m = 0; m < rows; m++)
        std::memcpy(raw + int64_t(row + m) * width + first, y + m * kUnitColumns, sizeof(float) * n);
      return;
    }
    int column = 0;
    for (int i = 0; i < site.n_slices; column += (site.slice[i].rank + 1) & ~1, i++)
      for (int m = 0; m < rows; m++)
        scaled(y + m * kUnitColumns, span, site.slice[i], v_ + (row + m) * at_.v_stride + column);
  }

  // The part of a slice that lies in the span's columns of the stacked rank.
  static void scaled(const float* y, const Span& span, const weft_lora_slice& slice, X* to) {
    alignas(64) X narrow[16];
    const F scale = set1(slice.scale);
    const int first = 16 * span.group, end = std::min(slice.rank_start + slice.rank, first + 16 * span.count);
    for (int r = std::max(slice.rank_start, first); r < end; r += 16) {
      store_as(Kind{}, narrow, mul(load(y + r - first), scale));
      std::memcpy(to + r - slice.rank_start, narrow, std::min(16, end - r) * sizeof(X));
    }
    if (slice.rank % 2 && end > first && end == slice.rank_start + slice.rank) to[slice.rank] = X(0);
  }

  // body(segment's tokens [begin, end) among those from `row` on, its site) for each adapter that has rows there.
  template <class Body>
  void each_adapter(int layer, int site, int row, int rows, Body body) const {
    for (int i = 0; i < s_.n_segments; i++) {
      const weft_segment& segment = s_.segments[i];
      const int begin = std::max(row, segment.start), end = std::min(row + rows, segment.end);
      const weft_lora_site* a = begin < end ? site_of(segment, layer, site) : nullptr;
      if (a != nullptr) body(begin, end, *a);
    }
  }

  void prefetch_lora(int layer, int site, int row, int rows, const Span* spans, int n_spans, Beside& beside) const {
    each_adapter(layer, site, row, rows, [&](int, int, const weft_lora_site& a) {
      for (int j = 0; j < a.n_slices; j++)
        for (int k = 0; k < n_spans; k++) prefetch_expand<Kind>(a.slice[j], spans[k], beside);
    });
  }

  void add_lora(int layer, int site, int row, int rows, const Span* spans, int n_spans, float* y) const {
    each_adapter(layer, site, row, rows, [&](int begin, int end, const weft_lora_site& a) {
      const X* v = v_ + begin * at_.v_stride;
      float* to = y + (begin - row) * kUnitColumns;
      for (int j = 0; j < a.n_slices; v += (a.slice[j].rank + 1) & ~1, j++)
        for (int k = 0; k < n_spans; k++) expand<Kind>(a.slice[j], v, at_.v_stride, end - begin, spans[k], to);
    });
  }

  // ---- norms, rotation, attention

  void norm_all(weft::Member& me, const float* weight) const {
    each_token(me, [&](int t) {
      norm(s_.hidden + int64_t(t) * m_.hidden, weight, m_.hidden, x_ + t * at_.x_stride, at_.x_stride);
    });
  }

  // The row is padded with zeros to whole blocks of pairs. `weight` NULL: it is only copied.
  void norm(const float* from, const float* weight, int size, X* to, int64_t padded) const {
    const auto each = [&](int c, F value) { store_as(Kind{}, to + c, value); };
    const auto row = [from](int c) { return load(from + c); };
    if (weight != nullptr)
      normed(row, weight, size, each);
    else
      for (int c = 0; c < size; c += 16) each(c, row(c));
    for (int64_t c = size; c < padded; c++) to[c] = X(0);
  }

  // to(c, 16 columns from c on) of a row's norm: root mean square (Zhang and Sennrich, 2019), or LayerNorm (Ba et al.,
  // arXiv 1607.06450).
  template <class From, class To>
  void normed(From from, const float* weight, int size, To to) const {
    if (!m_.layer_norm) {
      const F factor = set1(inverse_root_mean_square(from, size));
      for (int c = 0; c < size; c += 16) to(c, mul(mul(from(c), factor), load(weight + c)));
      return;
    }
    F total = zero();
    for (int c = 0; c < size; c += 16) total = add(total, from(c));
    const F mean = set1(sum(total) / float(size));
    const auto centred = [&](int c) { return sub(from(c), mean); };
    const F factor = set1(inverse_root_mean_square(centred, size));
    for (int c = 0; c < size; c += 16) to(c, fma(mul(centred(c), factor), load(weight + c), load(weight + size + c)));
  }

  void root_mean_square_norm(float* x, const float* weight, int size) const {
    const F factor = set1(inverse_root_mean_square([x](int c) { return load(x + c); }, size));
    for (int c = 0; c < size; c += 16) store(x + c, mul(mul(load(x + c), factor), load(weight + c)));
  }

  template <class From>
  float inverse_root_mean_square(From from, int size) const {
    F squares = zero();
    for (int c = 0; c < size; c += 16) {
      const F value = from(c);
      squares = fma(value, value, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / float(size) + m_.eps);
  }

  // Head `head` of token t's q|k|v, which is changed where it lies.
  void place_head(float* x, int head, int t, int layer, const weft_layer& w) const {
    const int dim = m_.head_dim, kv_head = (head - m_.heads) % m_.kv_heads;
    if (head < m_.heads) {
      const F scale = set1(m_.query_growth > 0 ? m_.query_scale * growth(t) : m_.query_scale);
      turn(x, w.q_norm, t, w.rope);
      for (int d = 0; d < dim; d += 16)
        store_as(Kind{}, q_ + t * at_.q_stride + head * dim + d, mul(load(x + d), scale));
      return;
    }
    const weft_row& owner = row_of(t);
    const int position = owner.position + t - owner.start;
    const Pages pages = pages_of(owner, layer, kv_head);
    if (head < m_.heads + m_.kv_heads) {
      turn(x, w.k_norm, t, w.rope);
      char* keys = const_cast<char*>(pages.keys(position));
      int4_kv() ? append_int4_keys(keys, position % 16, x, dim) : append_keys(Kind{}, keys, position % 16, x, dim);
    } else {
      if (s_.guesses != nullptr && s_.guesses[t] != 0 && !storable(x)) {
        s_.guesses[t] = 2;
        std::memset(x, 0, sizeof(float) * dim);
      }
      char* values = const_cast<char*>(pages.values(position));
      int4_kv() ? append_int4_values(values, position % 16, x, dim)
                : append_values(Kind{}, values, position % 16, x, dim);
    }
  }

  float growth(int t) const {
    const weft_row& owner = row_of(t);
    const int position = owner.position + t - owner.start;
    return 1.0f + m_.query_growth * float(std::log(1.0 + double(position / m_.growth_tokens)));
  }

  // A head's values are finite, also once they are rounded to what they are stored in.
  bool storable(const float* x) const {
    const F largest_kept = set1(int4_kv() ? 1.7e38f : std::is_same<Kind, Bf16Kind>::value ? 3.396e38f : 3.4028234e38f);
    F kept = set1(1.0f);
    for (int d = 0; d < m_.head_dim; d += 16)
      kept = where_less(negative_abs(load(x + d)), sub(zero(), largest_kept), zero(),
                        mul(kept, add(set1(1.0f), mul(load(x + d), zero()))));
    return sum(kept) == 16.0f;
  }

  // A head of token t, normed if it has not been with its row, and rotated by one of the model's ropes (-1: not). Halves
  // are paired, as in transformers: (a, b) -> (a cos - b sin, b cos + a sin).
  void turn(float* x, const float* norm_weight, int t, int rope) const {
    if (norm_weight != nullptr && !m_.row_norms) root_mean_square_norm(x, norm_weight, m_.head_dim);
    if (rope < 0) return;
    const int half = m_.rope[rope].size / 2;
    const float *cosine = cosine_of(rope, t), *sine = cosine + half;
    if (half % 16 == 0) {
      for (int d = 0; d < half; d += 16) {
        const F a = load(x + d), b = load(x + half + d), c = load(cosine + d), s = load(sine + d);
        store(x + d, sub(mul(a, c), mul(b, s)));
        store(x + half + d, add(mul(b, c), mul(a, s)));
      }
      return;
    }
    for (int d = 0; d < half; d++) {
      const float a = x[d], b = x[half + d];
      x[d] = a * cosine[d] - b * sine[d];
      x[half + d] = b * cosine[d] + a * sine[d];
    }
  }

  // Unit = a tile: tokens of one row x query heads of one KV head.
  void attention(weft::Member& me, int64_t unit, int layer, int window) const {
    const int per_tile = m_.kv_heads * tiles_of_token_, place = int(unit / per_tile), rest = int(unit % per_tile);
    const int kv_head = rest / tiles_of_token_, part = rest % tiles_of_token_;
    const int r = int(std::upper_bound(units_, units_ + s_.n_rows + 1, place) - units_) - 1;
    const weft_row& row = s_.rows[r];
    const int first = row.start + (place - units_[r]) * tile_tokens_, last = std::min(row.end, first + tile_tokens_);
    const int head = kv_head * group_ + part * kTile, heads = std::min(kTile, group_ - part * kTile);
    auto& tile = *reinterpret_cast<AttentionTile<Kind>*>(me.scratch());
    tile.cap = m_.score_cap;
    int n = 0;
    for (int t = first; t < last; t++)
      for (int h = 0; h < heads; h++, n++) {
        std::memcpy(tile.queries[n], q_ + t * at_.q_stride + (head + h) * m_.head_dim, m_.head_dim * sizeof(X));
        tile.position[n] = row.position + t - row.start;
      }
    const Pages pages = pages_of(row, layer, kv_head);
    if (int4_kv())
      attend_to(me, tile,
                Int4Kv<Kind>{tile, n, m_.head_dim,
                             *reinterpret_cast<typename Int4Kv<Kind>::Memory*>(me.scratch() + sizeof(tile))},
                window, pages);
    else
      attend_to(me, tile, PlainKv<Kind>{tile, n, m_.head_dim}, window, pages);
    n = 0;
    for (int t = first; t < last; t++)
      for (int h = 0; h < heads; h++, n++)
        attended(tile, n, m_.head_dim, s_.guesses != nullptr && s_.guesses[t] == 2,
                 x_ + t * at_.x_stride + (head + h) * m_.head_dim);
  }

  template <class Kv>
  void attend_to(weft::Member& me, AttentionTile<Kind>& tile, Kv kv, int window, const Pages& pages) const {
    if (m_.top_share > 0)
      attend_best(tile, kv, window, pages, m_.top_share, m_.scores + me.thread() * kTile * m_.score_positions,
                  m_.score_positions);
    else
      attend(tile, kv, window, pages);
  }

  bool int4_kv() const { return m_.kv_kind == WEFT_INT4; }

  Pages pages_of(const weft_row& row, int layer, int kv_head) const {
    const ptrdiff_t keys = (ptrdiff_t(layer) * 2 * m_.kv_heads + kv_head) * head_bytes_;
    const int page_groups = m_.page_tokens / 16;
    return {
        static_cast<const char*>(m_.kv), page_bytes_, head_bytes_ / page_groups, keys, keys + m_.kv_heads * head_bytes_,
        s_.page_table + row.page_offset, page_groups};
  }

  // ---- the ends

  void embed(int t) const {
    float* to = s_.hidden + int64_t(t) * m_.hidden;
    const int64_t at = int64_t(s_.tokens[t]) * m_.hidden;
    const F scale = set1(m_.embedding_scale);
    if (m_.embedding_kind == WEFT_FP32) {
      const float* from = static_cast<const float*>(m_.embedding) + at;
      for (int c = 0; c < m_.hidden; c += 16) store(to + c, mul(load(from + c), scale));
      return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(m_.embedding) + at;
    for (int c = 0; c < m_.hidden; c += 16) store(to + c, mul(load_bf16(from + c), scale));
  }

  // Angles in fp32 as in transformers; cosines and sines through double, so that they are the same wherever it runs.
  void angles(int t) const {
    const weft_row& row = row_of(t);
    const float position = float(row.position + t - row.start);
    for (int r = 0; r < m_.ropes; r++) {
      const weft_rope& rope = m_.rope[r];
      const float* frequency = row.long_text ? rope.long_frequency : rope.inverse_frequency;
      float* to = cosine_of(r, t);
      for (int d = 0; d < rope.size / 2; d++) {
        const double angle = position * frequency[d];
        to[d] = float(std::cos(angle)) * rope.factor;
        to[rope.size / 2 + d] = float(std::sin(angle)) * rope.factor;
      }
    }
  }

  float* cosine_of(int rope, int t) const { return cosine_ + (int64_t(rope) * tokens_ + t) * m_.head_dim; }

  void logits(weft::Member& me) const {
    me.share(s_.n_sampled, [&](int64_t i) {
      norm(s_.hidden + int64_t(s_.sampled[i]) * m_.hidden, m_.norm, m_.hidden, head_ + i * at_.x_stride, at_.x_stride);
    });
    const int groups = (m_.vocab + 15) / 16;
    float* to = ranks_ == nullptr ? s_.logits : own_slot(me);
    me.share(units_of(groups, kUnitGroups), [&](int64_t u) {
      const Span span{int(u) * kUnitGroups, std::min(kUnitGroups, groups - int(u) * kUnitGroups), 0};
      float* y = reinterpret_cast<float*>(me.scratch());
      for (int row = 0; row < s_.n_sampled; row += kPanelRows) {
        const int rows = std::min(kPanelRows, s_.n_sampled - row);
        Beside nothing;
        product<Kind>(me, m_.head, head_ + row * at_.x_stride, at_.x_stride, rows, span, y, nothing);
        const int n = std::min(16 * span.count, m_.vocab - 16 * span.group);
        if (m_.logit_cap > 0)
          for (int m = 0; m < rows; m++)
            for (int c = 0; c < n; c += 16)
              store(y + m * kUnitColumns + c, capped(load(y + m * kUnitColumns + c), set1(m_.logit_cap)));
        for (int m = 0; m < rows; m++)
          std::memcpy(to + int64_t(row + m) * m_.vocab + 16 * span.group, y + m * kUnitColumns, sizeof(float) * n);
      }
    });
    if (ranks_ == nullptr || !exchange(me, int64_t(s_.n_sampled) * m_.vocab * 4, true) || ranks_->rank != 0) return;
    me.share(int64_t(s_.n_sampled) * ranks_->size, [&](int64_t i) {
      const int64_t row = i / ranks_->size, p = i % ranks_->size;
      std::memcpy(s_.logits + i * m_.vocab, slot(me, int(p)) + row * m_.vocab, sizeof(float) * m_.vocab);
    });
  }

  // ---- other ranks

  // Where this rank's part of the next exchange goes; what rank p gave to the last one.
  float* own_slot(const weft::Member& me) const { return slot_of(me.exchanges, ranks_->rank); }
  const float* slot(const weft::Member& me, int p) const { return slot_of(me.exchanges - 1, p); }
  float* slot_of(unsigned exchange, int p) const {
    return reinterpret_cast<float*>(ranks_->slots + (half_of(exchange) * ranks_->size + p) * ranks_->slot_bytes);
  }
  int half_of(unsigned exchange) const { return int(exchange + first_half_) & 1; }

  // All threads call it behind a barrier. False: another rank is lost.
  bool exchange(weft::Member& me, int64_t bytes, bool to_root) const {
    if (me.thread() == 0) {
      leave_tiles();  // a wait may be long, and a callback may use tiles of its own
      if (ranks_->exchange == nullptr ? !weft::meet(*ranks_)
                                      : ranks_->exchange(ranks_->context, half_of(me.exchanges), bytes, to_root) != 0)
        lost_ = true;
    }
    me.exchanges++;
    me.meet();
    return !lost_;
  }

  // ---- how

  static int64_t units_of(int64_t n, int64_t of_unit) { return (n + of_unit - 1) / of_unit; }

  // body(token) for all tokens, some of them a unit.
  template <class Body>
  void each_token(weft::Member& me, Body body) const {
    me.share(units_of(tokens_, kNormRows), [&](int64_t u) {
      for (int t = int(u) * kNormRows; t < std::min(tokens_, int(u + 1) * kNormRows); t++) body(t);
    });
  }

  // body(unit, first row, rows, their chunk): all units for a chunk of rows, then for the next. A thread's range is few
  // chunks and all their units, so that their rows stay in its cache from unit to unit and from phase to phase.
  struct Chunk {
    int first, last;
  };
  template <class Body, class Last>
  void by_chunks(weft::Member& me, int n_in, int64_t units, Body body, Last last) const {
    const int of_chunk = chunk_rows(n_in * int(sizeof(X)));
    const auto unit = [&](int64_t i) {
      const int first = int(i / units) * of_chunk;
      const Chunk chunk{first, std::min(first + of_chunk, tokens_)};
      for (int row = first; row < chunk.last; row += kPanelRows)
        body(int(i % units), row, std::min(kPanelRows, chunk.last - row), chunk);
    };
    me.share(units * units_of(tokens_, of_chunk), unit, last);
  }

  // units_[r]: tiles of tokens in the rows before row r.
  void list_units() {
    units_[0] = 0;
    for (int r = 0; r < s_.n_rows; r++)
      units_[r + 1] = units_[r] + int(units_of(s_.rows[r].end - s_.rows[r].start, tile_tokens_));
  }

  const weft_row& row_of(int t) const {
    const weft_row* after = std::upper_bound(s_.rows, s_.rows + s_.n_rows, t,
                                             [](int token, const weft_row& row) { return token < row.start; });
    return after[-1];
  }

  const weft_model& m_;
  const weft_step& s_;
  const Layout at_;
  const int tokens_;
  const weft_ranks* const ranks_ = m_.ranks;
  int first_half_ = 0;
  mutable std::atomic<bool> lost_{false};
  X *x_, *act_, *q_, *v_, *head_;
  float *qkv_, *cosine_;
  int32_t* units_;
  int group_, tile_tokens_, tiles_of_token_;
  int64_t head_bytes_, page_bytes_;
};

}  // namespace WEFT_NS
