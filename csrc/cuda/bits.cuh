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

// Packs set(i) of elements i < numel. A warp gathers 32 words of 32 elements each; each of its lanes writes
// one.
template <class Set>
__device__ inline void pack_elements(int64_t numel, uint8_t* data, const Set& set) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t turn = thread_number(); (turn & -kWarp) * kWarp < numel; turn += thread_count()) {
    const int64_t first = (turn & -kWarp) * kWarp;
    uint32_t lane_bits = 0;
#pragma unroll
    for (int word = 0; word < kWarp; ++word) {
      const int64_t element = first + word * kWarp + lane;
      const uint32_t bits = __ballot_sync(kAllLanes, element < numel && set(element));
      if (lane == word) lane_bits = bits;
    }
    store_bits(lane_bits, turn, plane_bytes(numel), data);
  }
}

}  // namespace mesa_tune::cuda
