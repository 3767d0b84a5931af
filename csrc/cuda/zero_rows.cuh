// Packs which rows are zero. A warp takes the eight rows of a byte; it reads each up to its first few
// elements that are not.
#pragma once

#include "launch.cuh"
#include "quantize.h"

namespace mesa_tune::cuda {

inline int64_t zero_rows_threads(const ZeroRows& to) {
  return plane_bytes(to.rows) * kWarp;
}

// One of `count` threads, whose number is `turn`. load(i): element i, in float32.
template <class Load>
__device__ inline void pack_rows(const ZeroRows& to, int64_t turn, int64_t count, const Load& load) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (; turn / kWarp * 8 < to.rows; turn += count) {
    const int64_t byte = turn / kWarp;
    uint32_t bits = 0;
    for (int64_t i = 0; i < 8 && 8 * byte + i < to.rows; ++i) {
      const int64_t first = (8 * byte + i) * to.width;
      bool others = false;
      for (int64_t begin = 0; begin < to.width && !others; begin += kWarp) {
        const int64_t column = begin + lane;
        const bool other = column < to.width && load(first + column) != 0.0f;
        others = __any_sync(kAllLanes, other);
      }
      bits |= static_cast<uint32_t>(!others) << i;
    }
    if (lane == 0) to.data[byte] = static_cast<uint8_t>(bits);
  }
}

}  // namespace mesa_tune::cuda
