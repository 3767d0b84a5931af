// The ops of ReLU and its relatives: pack_at_most packs one bit per element, whether it is at most the
// threshold; gate multiplies the gradient of these elements by a slope.

#include "gate.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "bits.h"
#include "paths.h"
#include "tile.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kGrain = 8;  // grain size of parallel_for: fewest tiles per thread

MESA_TUNE_INLINE void compare_tiles(const Strided& x, float limit, uint8_t* data, int64_t from, int64_t to) {
  alignas(64) uint8_t mask[kTile];
  alignas(64) float buffer[kTile];
  for (int64_t tile = from; tile < to; ++tile) {
    const int64_t n = std::min(kTile, x.numel - tile * kTile);
    const float* __restrict values = load(x, 0, tile * kTile, n, buffer);
    for (int64_t i = 0; i < n; ++i) mask[i] = values[i] <= limit;
    for (int64_t i = n; i % 8 != 0; ++i) mask[i] = 0;
    pack(mask, data + tile * (kTile / 8), (n + 7) / 8);
  }
}
MESA_TUNE_PATHS(compare_tiles, (const Strided& x, float limit, uint8_t* data, int64_t from, int64_t to),
                (x, limit, data, from, to))

// The bits of elements [first, first + n), one byte each.
MESA_TUNE_INLINE void unpack_for(const Gate& task, int64_t first, int64_t n, uint8_t* mask) {
  if (task.inner == 1) return unpack(task.data + first / 8, mask, (n + 7) / 8);
  for (int64_t i = 0; i < n;) {
    const int64_t row = (first + i) / task.inner, end = std::min(n, (row + 1) * task.inner - first);
    std::fill(mask + i, mask + end, static_cast<uint8_t>(task.data[row / 8] >> (row % 8) & 1));
    i = end;
  }
}

MESA_TUNE_INLINE void gate_tiles(const Gate& task, int64_t from, int64_t to) {
  alignas(64) uint8_t mask[kTile];
  alignas(64) float buffer[kTile], result[kTile];
  const float slope = task.slope;
  for (int64_t tile = from; tile < to; ++tile) {
    const int64_t first = tile * kTile, n = std::min(kTile, task.grad.numel - first);
    const float* __restrict values = load(task.grad, 0, first, n, buffer);
    float* __restrict out = direct(task.out) ? address(task.out, 0, first) : result;
    unpack_for(task, first, n, mask);
    for (int64_t i = 0; i < n; ++i) {
      const float scaled = slope == 0.0f ? 0.0f : values[i] * slope;
      out[i] = mask[i] ? scaled : values[i];
    }
    if (out == result) store(result, 0, first, n, task.out);
  }
}
MESA_TUNE_PATHS(gate_tiles, (const Gate& task, int64_t from, int64_t to), (task, from, to))

int64_t tiles(int64_t numel) {
  return (numel + kTile - 1) / kTile;
}

}  // namespace

void pack_at_most(const Strided& x, float limit, uint8_t* data) {
  torch::stable::parallel_for(0, tiles(x.numel), kGrain, [&](int64_t from, int64_t to) {
    compare_tiles_paths[path()](x, limit, data, from, to);
  });
}

void gate(const Gate& task) {
  torch::stable::parallel_for(0, tiles(task.grad.numel), kGrain,
                              [&](int64_t from, int64_t to) { gate_tiles_paths[path()](task, from, to); });
}

}  // namespace mesa_tune::cpu
