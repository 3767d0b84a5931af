// Interface between the operators of positions.cpp and the kernels of each device.
#pragma once

#include <cstdint>

#include "geometry.h"

namespace mesa_tune {

// Elias-Fano code of `count` ascending positions below `numel`: `low` planes of the lowest bits of each, then
// one plane in which the bit (position >> low) + index is set for each.
struct Positions {
  int64_t numel, count, low;

  constexpr int64_t low_bytes() const { return low * plane_bytes(count); }
  constexpr int64_t high_bits() const { return count + ((numel + (int64_t{1} << low) - 1) >> low); }
  constexpr int64_t bytes() const { return low_bytes() + plane_bytes(high_bits()); }
};

namespace cpu {

// Writes the code of the bits that are set. Returns how many are; the code is right if these are `count`.
int64_t pack_positions(const uint8_t* bitmap, const Positions& positions, uint8_t* data);

// Writes the bitmap. Returns how many bits are set.
int64_t unpack_positions(const uint8_t* data, const Positions& positions, uint8_t* bitmap);

}  // namespace cpu

// The same on the current device; `stream` is a cudaStream_t, and `memory` has `positions_memory` numbers. A
// number of bits set that is not `count` fails an assertion on the device.
namespace cuda {

int64_t positions_memory(const Positions& positions);
void pack_positions(const uint8_t* bitmap, const Positions& positions, uint8_t* data, int64_t* memory,
                    void* stream);
void unpack_positions(const uint8_t* data, const Positions& positions, uint8_t* bitmap, int64_t* memory,
                      void* stream);

}  // namespace cuda
}  // namespace mesa_tune
