// The ops of ReLU and its relatives: pack_at_most packs one bit per element, whether it is at most the
// threshold; gate multiplies the gradient of these elements by a slope.

#include "gate.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "bits.h"
#include "paths.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kTile = 4096;  // elements processed at a time, in the first-level cache
constexpr int64_t kGrain = 8;    // grain size of parallel_for: fewest tiles per thread

MESA_TUNE_INLINE void compare_tiles(const float* x, int64_t numel, float limit, uint8_t* data, int64_t from,
                                    int64_t to) {
  alignas(64) uint8_t mask[kTile];
  for (int64_t tile = from; tile < to; ++tile) {
    const float* __restrict values = x + tile * kTile;
    const int64_t n = std::min(kTile, numel - tile * kTile);
    for (int64_t i = 0; i < n; ++i) mask[i] = values[i] <= limit;
    for (int64_t i = n; i % 8 != 0; ++i) mask[i] = 0;
    pack(mask, data + tile * (kTile / 8), (n + 7) / 8);
  }
}
MESA_TUNE_PATHS(compare_tiles,
                (const float* x, int64_t numel, float limit, uint8_t* data, int64_t from, int64_t to),
                (x, numel, limit, data, from, to))

MESA_TUNE_INLINE void gate_tiles(const float* grad, const uint8_t* data, int64_t numel, float slope,
                                 float* out, int64_t from, int64_t to) {
  alignas(64) uint8_t mask[kTile];
  for (int64_t tile = from; tile < to; ++tile) {
    const float* __restrict values = grad + tile * kTile;
    float* __restrict result = out + tile * kTile;
    const int64_t n = std::min(kTile, numel - tile * kTile);
    unpack(data + tile * (kTile / 8), mask, (n + 7) / 8);
    for (int64_t i = 0; i < n; ++i) {
      const float scaled = slope == 0.0f ? 0.0f : values[i] * slope;
      result[i] = mask[i] ? scaled : values[i];
    }
  }
}
MESA_TUNE_PATHS(gate_tiles,
                (const float* grad, const uint8_t* data, int64_t numel, float slope, float* out, int64_t from,
                 int64_t to),
                (grad, data, numel, slope, out, from, to))

int64_t tiles(int64_t numel) {
  return (numel + kTile - 1) / kTile;
}

}  // namespace

void pack_at_most(const float* x, int64_t numel, float limit, uint8_t* data) {
  torch::stable::parallel_for(0, tiles(numel), kGrain, [&](int64_t from, int64_t to) {
    compare_tiles_paths[path()](x, numel, limit, data, from, to);
  });
}

void gate(const float* grad, const uint8_t* data, int64_t numel, float slope, float* out) {
  torch::stable::parallel_for(0, tiles(numel), kGrain, [&](int64_t from, int64_t to) {
    gate_tiles_paths[path()](grad, data, numel, slope, out, from, to);
  });
}

}  // namespace mesa_tune::cpu
