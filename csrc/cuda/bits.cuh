// Bits of elements on CUDA devices: eight neighbours in a byte, the first in its lowest bit.
#pragma once

#include "geometry.h"
#include "launch.cuh"

namespace mesa_tune::cuda {

// Packs set(i) of elements i < numel. A warp gathers 32 words of 32 elements each; each of its lanes writes
// one word, byte by byte: the packed bytes may have any alignment.
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
    const int64_t byte = turn * 4, bytes = plane_bytes(numel);
    for (int i = 0; i < 4; ++i)
      if (byte + i < bytes) data[byte + i] = static_cast<uint8_t>(lane_bits >> (8 * i));
  }
}

}  // namespace mesa_tune::cuda
