// Bits of elements on CUDA devices: eight neighbours in a byte, the first in its lowest bit.
#pragma once

#include "geometry.h"
#include "launch.cuh"

namespace mesa_tune::cuda {

// Writes word number `word` of the packed bytes, byte by byte: they may have any alignment.
__device__ inline void store_bits(uint32_t bits, int64_t word, int64_t bytes, uint8_t* data) {
  for (int64_t i = 0; i < 4; ++i)
    if (4 * word + i < bytes) data[4 * word + i] = static_cast<uint8_t>(bits >> (8 * i));
}

// Packs the lowest `planes` bits of code(i) of elements i < numel, plane after plane, at most kPlanes. A warp
// gathers 32 words of 32 elements each; each of its lanes writes one word per plane.
template <int kPlanes, class Code>
__device__ inline void pack_planes(int64_t numel, int planes, uint8_t* data, const Code& code) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t bytes = plane_bytes(numel);
  for (int64_t turn = thread_number(); (turn & -kWarp) * kWarp < numel; turn += thread_count()) {
    const int64_t first = (turn & -kWarp) * kWarp;
    uint32_t lane_bits[kPlanes] = {};
#pragma unroll(kPlanes == 1 ? kWarp : 4)
    for (int word = 0; word < kWarp; ++word) {
      const int64_t element = first + word * kWarp + lane;
      const uint32_t found = element < numel ? static_cast<uint32_t>(code(element)) : 0;
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const uint32_t bits = __ballot_sync(kAllLanes, found >> plane & 1);
        if (lane == word) lane_bits[plane] = bits;
      }
    }
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      if (plane < planes) store_bits(lane_bits[plane], turn, bytes, data + plane * bytes);
  }
}

// Packs set(i) of elements i < numel.
template <class Set>
__device__ inline void pack_elements(int64_t numel, uint8_t* data, const Set& set) {
  pack_planes<1>(numel, 1, data, set);
}

}  // namespace mesa_tune::cuda
