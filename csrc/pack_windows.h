// What the dispatcher's side (pack_windows.cpp) asks of a device's kernels.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace mesa_tune {

// The windows along one dimension, as mesa_tune/ops/reference/windows.py has them.
struct Windows {
  int64_t size, number, extent, step, stride, padding;
};

// Bits of an offset in a window of all dimensions.
inline int64_t offset_bits(const std::vector<Windows>& windows) {
  int64_t positions = 1;
  for (const Windows& each : windows) positions *= each.extent;
  return positions < 2 ? 1 : std::bit_width(static_cast<uint64_t>(positions - 1));
}

namespace cpu {

void pack_windows(const int64_t* indices, int64_t numel, const std::vector<Windows>& windows, uint8_t* data);
void unpack_windows(const uint8_t* data, int64_t numel, const std::vector<Windows>& windows,
                    int64_t* indices);

}  // namespace cpu
}  // namespace mesa_tune
