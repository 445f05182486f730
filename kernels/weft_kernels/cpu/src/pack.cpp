#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

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

template <class From>
void pack_from(Team& team, const From* source, int64_t stride, int64_t n_out, int64_t n_in, int pad_in, char* to, int kind, float* scale) {
  const int64_t padded = up(n_in, pad_in), group_bytes = padded * 16 * (kind == WEFT_FP32 ? 4 : kind == WEFT_BF16 ? 2 : 1);
  auto group = [&](int64_t g) {
    const From* rows[16] = {};
    const int n_rows = int(std::min<int64_t>(16, n_out - 16 * g));
    for (int r = 0; r < n_rows; r++) rows[r] = source + (16 * g + r) * stride;
    char* at = to + g * group_bytes;
    if (kind == WEFT_FP32)
      pack_fp32(rows, n_rows, n_in, padded, reinterpret_cast<float*>(at));
    else if (kind == WEFT_BF16)
      pack_bf16(rows, n_rows, n_in, padded, reinterpret_cast<uint16_t*>(at));
    else
      pack_int8(rows, n_rows, n_in, padded, reinterpret_cast<int8_t*>(at), scale + 16 * g);
  };
  struct Work {
    Team& team;
    decltype(group)& each;
    int64_t groups;
  } work{team, group, up(n_out, 16) / 16};
  team.run(
      [](void* context, int thread) {
        Work& w = *static_cast<Work*>(context);
        Member me(w.team, thread);
        me.share(w.groups, w.each);
      },
      &work);
}

}  // namespace

int64_t packed_bytes(int kind, int64_t n_out, int64_t n_in, int pad_in) {
  return up(n_out, 16) * up(n_in, pad_in) * (kind == WEFT_FP32 ? 4 : kind == WEFT_BF16 ? 2 : 1);
}

void pack(Team& team, const void* source, int from, int64_t stride, int64_t n_out, int64_t n_in, int pad_in, void* to, int kind, float* scale) {
  if (from == WEFT_FP32)
    pack_from(team, static_cast<const float*>(source), stride, n_out, n_in, pad_in, static_cast<char*>(to), kind, scale);
  else
    pack_from(team, static_cast<const uint16_t*>(source), stride, n_out, n_in, pad_in, static_cast<char*>(to), kind, scale);
}

}  // namespace weft
