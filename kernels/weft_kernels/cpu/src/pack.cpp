#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "weft_cpu.h"

namespace weft {

namespace {

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

float widen(uint16_t value) {
  const uint32_t bits = uint32_t(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

uint16_t narrow(float value) {  // round to nearest even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return value != value ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float as_float(float value) { return value; }
float as_float(uint16_t value) { return widen(value); }
uint16_t as_bf16(float value) { return narrow(value); }
uint16_t as_bf16(uint16_t value) { return value; }

// A pair of one row's bf16 is one word, as it lies there: packing transposes words.
int64_t pack_pairs(const uint16_t* const* rows, int n_rows, int64_t n_in, uint16_t* to) {
  if (n_rows < 16) return 0;
  for (int64_t k = 0; k + 1 < n_in; k += 2)
    for (int r = 0; r < 16; r++) std::memcpy(to + k * 16 + r * 2, rows[r] + k, 4);
  return n_in / 2 * 2;
}

int64_t pack_pairs(const float* const*, int, int64_t, uint16_t*) { return 0; }

template <class From>
void pack_bf16(const From* const* rows, int n_rows, int64_t n_in, int64_t padded, uint16_t* to) {
  for (int64_t k = pack_pairs(rows, n_rows, n_in, to); k < padded; k++)
    for (int r = 0; r < 16; r++) to[k / 2 * 32 + r * 2 + k % 2] = r < n_rows && k < n_in ? as_bf16(rows[r][k]) : 0;
}

template <class From>
void pack_fp32(const From* const* rows, int n_rows, int64_t n_in, int64_t padded, float* to) {
  for (int64_t k = 0; k < padded; k++)
    for (int r = 0; r < 16; r++) to[k * 16 + r] = r < n_rows && k < n_in ? as_float(rows[r][k]) : 0.0f;
}

// Symmetric, one scale per output: w = scale * q, |q| <= 127.
template <class From>
void pack_int8(const From* const* rows, int n_rows, int64_t n_in, int64_t padded, int8_t* to, float* scale) {
  for (int r = 0; r < 16; r++) {
    float most = 0;
    for (int64_t k = 0; r < n_rows && k < n_in; k++) most = std::max(most, std::fabs(as_float(rows[r][k])));
    scale[r] = most / 127;
    const float inverse = most > 0 ? 127 / most : 0;
    for (int64_t k = 0; k < padded; k++)
      to[k * 16 + r] = r < n_rows && k < n_in ? int8_t(std::lrintf(as_float(rows[r][k]) * inverse)) : 0;
  }
}

// Each 64 inputs of an output between their minimum and their maximum, in 15 steps; both numbers are rounded to bf16 first.
template <class From>
void pack_int4(const From* const* rows, int n_rows, int64_t n_in, char* to) {
  for (int64_t begin = 0; begin < n_in; begin += kInt4Inputs, to += kInt4Bytes) {
    const int64_t end = std::min(begin + kInt4Inputs, n_in);
    uint16_t* scales = reinterpret_cast<uint16_t*>(to);
    std::memset(to, 0, kInt4Bytes);
    for (int r = 0; r < n_rows; r++) {
      float least = as_float(rows[r][begin]), most = least;
      for (int64_t k = begin; k < end; k++)
        least = std::min(least, as_float(rows[r][k])), most = std::max(most, as_float(rows[r][k]));
      scales[r] = narrow((most - least) / 15);
      scales[16 + r] = narrow(least);
      const float scale = widen(scales[r]), minimum = widen(scales[16 + r]);
      for (int64_t k = begin; k < end; k++) {
        const float step = scale > 0 ? (as_float(rows[r][k]) - minimum) / scale : 0;
        const int q = int(std::lrintf(std::min(15.0f, std::max(0.0f, step)))), at = int(k - begin);
        to[64 + 64 * (at / 8) + 4 * r + at % 2 * 2 + at % 8 / 4] |= char(at % 4 < 2 ? q : q << 4);
      }
    }
  }
}

// One group of 16 outputs; `rows` has `n_rows` of them.
template <class From>
void pack_group(const From* const* rows, int n_rows, int64_t n_in, int pad_in, char* to, int kind, float* scale) {
  const int64_t padded = up(n_in, pad_in);
  if (kind == WEFT_FP32)
    pack_fp32(rows, n_rows, n_in, padded, reinterpret_cast<float*>(to));
  else if (kind == WEFT_BF16)
    pack_bf16(rows, n_rows, n_in, padded, reinterpret_cast<uint16_t*>(to));
  else if (kind == WEFT_INT4)
    pack_int4(rows, n_rows, n_in, to);
  else
    pack_int8(rows, n_rows, n_in, padded, reinterpret_cast<int8_t*>(to), scale);
}

// Do units [0, n) with all threads.
template <class Unit>
void share(Team& team, int64_t n, Unit unit) {
  struct Work {
    Team& team;
    int64_t n;
    Unit& each;
  } work{team, n, unit};
  team.run(
      [](void* context, int thread) {
        Work& w = *static_cast<Work*>(context);
        Member me(w.team, thread);
        me.share(w.n, w.each);
      },
      &work);
}

template <class From>
void pack_from(Team& team, const void* source, int64_t stride, int64_t n_out, int64_t n_in, int pad_in, char* to,
               int kind, float* scale) {
  const int64_t group_bytes = packed_bytes(kind, 16, n_in, pad_in);
  share(team, up(n_out, 16) / 16, [&](int64_t g) {
    const From* rows[16] = {};
    const int n_rows = int(std::min<int64_t>(16, n_out - 16 * g));
    for (int r = 0; r < n_rows; r++) rows[r] = static_cast<const From*>(source) + (16 * g + r) * stride;
    pack_group(rows, n_rows, n_in, pad_in, to + g * group_bytes, kind, scale == nullptr ? nullptr : scale + 16 * g);
  });
}

// Of a matrix whose rows lie in up to three dense parts.
template <class From>
void pack_part_rows(const weft_pack_job& job, int64_t group, int kind) {
  const From* rows[16] = {};
  int n_rows = 0;
  int64_t row = 16 * group;
  for (int part = 0; part < 3 && n_rows < 16; part++) {
    for (; row < job.rows[part] && n_rows < 16; row++)
      rows[n_rows++] = static_cast<const From*>(job.source[part]) + row * job.n_in;
    row = std::max<int64_t>(0, row - job.rows[part]);
  }
  char* to = static_cast<char*>(job.to) + group * packed_bytes(kind, 16, job.n_in, job.pad_in);
  pack_group(rows, n_rows, job.n_in, job.pad_in, to, kind, nullptr);
}

constexpr int64_t kUnitBytes = 8192;  // at least, that a thread takes of a matrix or of memory to copy at a time
constexpr int64_t kPageBytes = 4096;

}  // namespace

int64_t packed_bytes(int kind, int64_t n_out, int64_t n_in, int pad_in) {
  if (kind == WEFT_INT4) return up(n_out, 16) / 16 * (up(n_in, kInt4Inputs) / kInt4Inputs) * kInt4Bytes;
  return up(n_out, 16) * up(n_in, pad_in) * (kind == WEFT_FP32 ? 4 : kind == WEFT_BF16 ? 2 : 1);
}

void pack(Team& team, const void* source, int from, int64_t stride, int64_t n_out, int64_t n_in, int pad_in, void* to,
          int kind, float* scale) {
  (from == WEFT_FP32 ? pack_from<float> : pack_from<uint16_t>)(team, source, stride, n_out, n_in, pad_in,
                                                               static_cast<char*>(to), kind, scale);
}

bool pack_jobs(Team& team, const weft_pack_job* jobs, int n_jobs, int kind) {
  int64_t* const first =
      static_cast<int64_t*>(std::malloc((size_t(n_jobs) + 1) * sizeof(int64_t)));  // unit of each job
  if (first == nullptr) return false;
  first[0] = 0;
  auto groups = [&](int j) { return up(int64_t(jobs[j].rows[0]) + jobs[j].rows[1] + jobs[j].rows[2], 16) / 16; };
  auto per_unit = [&](int j) {
    return std::max<int64_t>(1, kUnitBytes / packed_bytes(kind, 16, jobs[j].n_in, jobs[j].pad_in));
  };
  for (int j = 0; j < n_jobs; j++) first[j + 1] = first[j] + up(groups(j), per_unit(j)) / per_unit(j);
  share(team, first[n_jobs], [&](int64_t unit) {
    const int j = int(std::upper_bound(first, first + n_jobs + 1, unit) - first) - 1;
    const int64_t begin = (unit - first[j]) * per_unit(j), end = std::min(begin + per_unit(j), groups(j));
    for (int64_t g = begin; g < end; g++)
      jobs[j].kind == WEFT_FP32 ? pack_part_rows<float>(jobs[j], g, kind) : pack_part_rows<uint16_t>(jobs[j], g, kind);
  });
  std::free(first);
  return true;
}

void touch_jobs(const weft_pack_job* jobs, int n_jobs, int kind) {
  const auto each_page = [](int64_t n_bytes, auto touch) {
    for (int64_t i = 0; i < n_bytes; i += kPageBytes) touch(i);
    if (n_bytes > 0) touch(n_bytes - 1);
  };
  for (int j = 0; j < n_jobs; j++) {
    const weft_pack_job& job = jobs[j];
    for (int part = 0; part < 3; part++) {
      const volatile char* from = static_cast<const char*>(job.source[part]);
      each_page(int64_t(job.rows[part]) * job.n_in * (job.kind == WEFT_FP32 ? 4 : 2),
                [=](int64_t i) { (void)from[i]; });
    }
    volatile char* to = static_cast<char*>(job.to);
    each_page(packed_bytes(kind, int64_t(job.rows[0]) + job.rows[1] + job.rows[2], job.n_in, job.pad_in),
              [=](int64_t i) { to[i] = 0; });
  }
}

void copy_blocks(Team& team, void* const* to, const void* const* from, int64_t n, int64_t bytes) {
  const int64_t per_block = up(bytes, 8 * kUnitBytes) / (8 * kUnitBytes);
  share(team, n * per_block, [&](int64_t unit) {
    const int64_t block = unit / per_block, begin = unit % per_block * 8 * kUnitBytes;
    std::memcpy(static_cast<char*>(to[block]) + begin, static_cast<const char*>(from[block]) + begin,
                size_t(std::min(8 * kUnitBytes, bytes - begin)));
  });
}

}  // namespace weft
