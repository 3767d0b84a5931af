// Elements as one of a few fixed levels: the code of an element is the number of boundaries below it. Plane p
// holds bit p of all codes, the first element in the lowest bit of its first byte.

#include "levels.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "bits.h"
#include "convert.h"
#include "map.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kBlock = 1024;    // elements in the first-level cache
constexpr int64_t kGrain = 1 << 5;  // grain size of parallel_for: fewest blocks per thread

struct PackTask {
  const void* x;
  Dtype dtype;
  int64_t numel;
  const Map& map;
  const FewLevels& boundaries;
  uint8_t* data;
};

template <class Type>
MESA_TUNE_INLINE void widen(const void* x, int64_t first, int64_t n, float* out) {
  const auto* data = static_cast<const typename Type::Storage*>(x) + first;
  for (int64_t i = 0; i < n; ++i) out[i] = Type::load(data[i]);
}

// Elements [first, first + n) in float32: the tensor's own memory, or a copy in `buffer`.
MESA_TUNE_INLINE const float* loaded(const PackTask& task, int64_t first, int64_t n, float* buffer) {
  if (task.dtype == Dtype::kFloat) return static_cast<const float*>(task.x) + first;
  if (task.dtype == Dtype::kHalf)
    widen<Half>(task.x, first, n, buffer);
  else
    widen<BFloat16>(task.x, first, n, buffer);
  return buffer;
}

// The codes of `n` values. Returns whether all values are finite.
MESA_TUNE_INLINE bool find_codes(const float* values, int64_t n, const FewLevels& boundaries,
                                 uint8_t* codes) {
  alignas(64) int32_t wide[kBlock] = {};
  for (int k = 0; k < boundaries.count; ++k) {
    const float boundary = boundaries.numbers[k];
    for (int64_t i = 0; i < n; ++i) wide[i] += values[i] > boundary;
  }
  int32_t odd = 0;
  for (int64_t i = 0; i < n; ++i) odd |= !(values[i] - values[i] == 0.0f);
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
  return odd == 0;
}

// Blocks [from, to). Clears `finite` if one of their elements is not.
MESA_TUNE_INLINE void pack_blocks(const PackTask& task, int64_t from, int64_t to, bool* finite) {
  alignas(64) float source[kBlock], buffer[kBlock];
  alignas(64) uint8_t codes[kBlock];
  constexpr uint64_t lowest = 0x0101010101010101, gather = 0x0102040810204080;
  for (int64_t block = from; block < to; ++block) {
    const int64_t first = block * kBlock, n = std::min(kBlock, task.numel - first);
    const float* values = mapped(task.map, loaded(task, first, n, source), first, n, buffer);
    *finite &= find_codes(values, n, task.boundaries, codes);
    std::fill(codes + n, codes + kBlock, uint8_t{0});
    for (int64_t plane = 0; plane < task.boundaries.planes; ++plane) {
      uint8_t* out = task.data + plane * plane_bytes(task.numel) + first / 8;
      for (int64_t byte = 0; byte < plane_bytes(n); ++byte) {
        uint64_t word;
        std::memcpy(&word, codes + 8 * byte, 8);
        out[byte] = static_cast<uint8_t>((((word >> plane) & lowest) * gather) >> 56);
      }
    }
  }
}
MESA_TUNE_PATHS(pack_blocks, (const PackTask& task, int64_t from, int64_t to, bool* finite),
                (task, from, to, finite))

// `values`: a table of elements of the output, all in its type.
template <class Element>
struct UnpackTask {
  const uint8_t* data;
  int64_t numel, bits;
  const Element* values;
  Element* out;
};

template <class Element>
MESA_TUNE_INLINE void unpack_blocks(const UnpackTask<Element>& task, int64_t from, int64_t to) {
  alignas(64) uint8_t codes[kBlock];
  for (int64_t block = from; block < to; ++block) {
    const int64_t first = block * kBlock, n = std::min(kBlock, task.numel - first);
    for (int64_t byte = 0; byte < plane_bytes(n); ++byte) {
      uint64_t word = 0;
      for (int64_t plane = 0; plane < task.bits; ++plane) {
        uint64_t bits;
        uint8_t spread[8];
        spread_bits(task.data[plane * plane_bytes(task.numel) + first / 8 + byte], spread);
        std::memcpy(&bits, spread, 8);
        word |= bits << plane;
      }
      std::memcpy(codes + 8 * byte, &word, 8);
    }
    Element* __restrict out = task.out + first;
    for (int64_t i = 0; i < n; ++i) out[i] = task.values[codes[i]];
  }
}
MESA_TUNE_INLINE void unpack_single(const UnpackTask<float>& task, int64_t from, int64_t to) {
  unpack_blocks(task, from, to);
}
MESA_TUNE_PATHS(unpack_single, (const UnpackTask<float>& task, int64_t from, int64_t to), (task, from, to))

MESA_TUNE_INLINE void unpack_short(const UnpackTask<uint16_t>& task, int64_t from, int64_t to) {
  unpack_blocks(task, from, to);
}
MESA_TUNE_PATHS(unpack_short, (const UnpackTask<uint16_t>& task, int64_t from, int64_t to), (task, from, to))

int64_t blocks_of(int64_t numel) {
  return (numel + kBlock - 1) / kBlock;
}

}  // namespace

float pack_levels(const void* x, Dtype dtype, int64_t numel, const Map& map, const FewLevels& boundaries,
                  uint8_t* data) {
  const PackTask task{x, dtype, numel, map, boundaries, data};
  std::atomic<bool> all_finite{true};
  torch::stable::parallel_for(0, blocks_of(numel), kGrain, [&](int64_t from, int64_t to) {
    bool finite = true;
    pack_blocks_paths[path()](task, from, to, &finite);
    if (!finite) all_finite = false;
  });
  return all_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
}

void unpack_levels(const uint8_t* data, float offset, int64_t numel, const FewLevels& values, Dtype dtype,
                   void* out) {
  float table[kMostLevels];
  uint16_t narrow[kMostLevels];
  for (int i = 0; i < kMostLevels; ++i) {
    table[i] = values.numbers[i] + offset;
    narrow[i] = dtype == Dtype::kHalf ? Half::store(table[i]) : BFloat16::store(table[i]);
  }
  if (dtype == Dtype::kFloat) {
    const UnpackTask<float> task{data, numel, values.planes, table, static_cast<float*>(out)};
    torch::stable::parallel_for(0, blocks_of(numel), kGrain, [&](int64_t from, int64_t to) {
      unpack_single_paths[path()](task, from, to);
    });
    return;
  }
  const UnpackTask<uint16_t> task{data, numel, values.planes, narrow, static_cast<uint16_t*>(out)};
  torch::stable::parallel_for(0, blocks_of(numel), kGrain,
                              [&](int64_t from, int64_t to) { unpack_short_paths[path()](task, from, to); });
}

}  // namespace mesa_tune::cpu
