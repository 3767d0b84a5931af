// Codes to bit planes and back, as in csrc/cpu/planes.h, with four columns of bytes per word. The number of
// planes, 1, 2, 4 or 8, is known to the compiler, which omits swaps of bits that are always zero.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mesa_tune::cuda {

// The lower kDistance of each 2 * kDistance bits.
template <int kDistance>
constexpr uint32_t kLower = kDistance == 4   ? 0x0F0F0F0F
                            : kDistance == 2 ? 0x33333333
                                             : 0x55555555;

// Swaps the upper bits of the rows without `kDistance` in their number and the lower bits of those with it.
template <int kDistance, int kRows>
__device__ inline void swap_rows(uint32_t (&rows)[8]) {
#pragma unroll
  for (int low = 0; low < kRows; ++low) {
    if (low & kDistance) continue;
    const uint32_t change = ((rows[low] >> kDistance) ^ rows[low + kDistance]) & kLower<kDistance>;
    rows[low + kDistance] ^= change;
    rows[low] ^= change << kDistance;
  }
}

// The same if only the lower kDistance bits of each 2 * kDistance bits are in use before (merge_rows), or
// only the lower kDistance rows (split_rows).
template <int kDistance>
__device__ inline void merge_rows(uint32_t (&rows)[8]) {
#pragma unroll
  for (int low = 0; low < kDistance; ++low) rows[low] |= rows[low + kDistance] << kDistance;
}
template <int kDistance>
__device__ inline void split_rows(uint32_t (&rows)[8]) {
#pragma unroll
  for (int low = 0; low < kDistance; ++low) {
    rows[low + kDistance] = (rows[low] >> kDistance) & kLower<kDistance>;
    rows[low] &= kLower<kDistance>;
  }
}

template <int kDistance, int kPlanes>
__device__ inline void to_planes_round(uint32_t (&rows)[8]) {
  if constexpr (kPlanes <= kDistance) {
    merge_rows<kDistance>(rows);
  } else {
    swap_rows<kDistance, kPlanes>(rows);
  }
}

template <int kDistance, int kPlanes>
__device__ inline void to_codes_round(uint32_t (&rows)[8]) {
  if constexpr (kPlanes <= kDistance) {
    split_rows<kDistance>(rows);
  } else {
    swap_rows<kDistance, kPlanes>(rows);
  }
}

// Eight rows of codes, one per run, become `kPlanes` rows, one per plane.
template <int kPlanes>
__device__ inline void to_planes(uint32_t (&rows)[8]) {
  to_planes_round<4, kPlanes>(rows);
  to_planes_round<2, kPlanes>(rows);
  to_planes_round<1, kPlanes>(rows);
}

// `kPlanes` rows, one per plane, become eight rows of codes, one per run.
template <int kPlanes>
__device__ inline void to_codes(uint32_t (&rows)[8]) {
  to_codes_round<1, kPlanes>(rows);
  to_codes_round<2, kPlanes>(rows);
  to_codes_round<4, kPlanes>(rows);
}

// One column: byte k is the code of run k before, and the byte of plane k after, or the reverse.
__device__ inline uint64_t transposed(uint64_t x) {
  uint64_t change = (x ^ (x >> 7)) & 0x00AA00AA00AA00AA;
  x ^= change ^ (change << 7);
  change = (x ^ (x >> 14)) & 0x0000CCCC0000CCCC;
  x ^= change ^ (change << 14);
  change = (x ^ (x >> 28)) & 0x00000000F0F0F0F0;
  return x ^ change ^ (change << 28);
}

}  // namespace mesa_tune::cuda
