// Elements as one of a few fixed levels: the code of an element is the number of boundaries below it. Plane p
// holds bit p of all codes, the first element in the lowest bit of its first byte.

#include "levels.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "bits.h"
#include "map.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kBlock = 1024;    // elements in the first-level cache
constexpr int64_t kGrain = 1 << 5;  // grain size of parallel_for: fewest blocks per thread

struct PackTask {
  const float* x;
  int64_t numel;
  const Map& map;
  const float* boundaries;
  int64_t count, bits;
  uint8_t* data;
};

// The codes of `n` values. Returns whether all values are finite.
MESA_TUNE_INLINE bool find_codes(const float* values, int64_t n, const float* boundaries, int64_t count,
                                 uint8_t* codes) {
  alignas(64) int32_t wide[kBlock] = {};
  for (int64_t k = 0; k < count; ++k) {
    const float boundary = boundaries[k];
    for (int64_t i = 0; i < n; ++i) wide[i] += values[i] > boundary;
  }
  int32_t odd = 0;
  for (int64_t i = 0; i < n; ++i) odd |= !(values[i] - values[i] == 0.0f);
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
  return odd == 0;
}

// Blocks [from, to). Clears `finite` if one of their elements is not.
MESA_TUNE_INLINE void pack_blocks(const PackTask& task, int64_t from, int64_t to, bool* finite) {
  alignas(64) float buffer[kBlock];
  alignas(64) uint8_t codes[kBlock];
  constexpr uint64_t lowest = 0x0101010101010101, gather = 0x0102040810204080;
  for (int64_t block = from; block < to; ++block) {
    const int64_t first = block * kBlock, n = std::min(kBlock, task.numel - first);
    const float* values = mapped(task.map, task.x + first, first, n, buffer);
    *finite &= find_codes(values, n, task.boundaries, task.count, codes);
    std::fill(codes + n, codes + kBlock, uint8_t{0});
    for (int64_t plane = 0; plane < task.bits; ++plane) {
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

struct UnpackTask {
  const uint8_t* data;
  int64_t numel;
  const float* values;
  int64_t bits;
  float* out;
};

MESA_TUNE_INLINE void unpack_blocks(const UnpackTask& task, int64_t from, int64_t to) {
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
    float* __restrict out = task.out + first;
    for (int64_t i = 0; i < n; ++i) out[i] = task.values[codes[i]];
  }
}
MESA_TUNE_PATHS(unpack_blocks, (const UnpackTask& task, int64_t from, int64_t to), (task, from, to))

int64_t blocks_of(int64_t numel) {
  return (numel + kBlock - 1) / kBlock;
}

}  // namespace

float pack_levels(const float* x, int64_t numel, const Map& map, const std::vector<float>& boundaries,
                  uint8_t* data) {
  const PackTask task{x,
                      numel,
                      map,
                      boundaries.data(),
                      static_cast<int64_t>(boundaries.size()),
                      level_bits(boundaries.size() + 1),
                      data};
  std::atomic<bool> all_finite{true};
  torch::stable::parallel_for(0, blocks_of(numel), kGrain, [&](int64_t from, int64_t to) {
    bool finite = true;
    pack_blocks_paths[path()](task, from, to, &finite);
    if (!finite) all_finite = false;
  });
  return all_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
}

void unpack_levels(const uint8_t* data, int64_t numel, const std::vector<float>& values, float* out) {
  std::vector<float> table = values;
  table.resize(kMostLevels, values.back());
  const UnpackTask task{data, numel, table.data(), level_bits(values.size()), out};
  torch::stable::parallel_for(0, blocks_of(numel), kGrain,
                              [&](int64_t from, int64_t to) { unpack_blocks_paths[path()](task, from, to); });
}

}  // namespace mesa_tune::cpu
