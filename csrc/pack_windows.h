// Interface between the operators (pack_windows.cpp) and their CPU kernels (cpu/pack_windows.cpp).
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace mesa_tune {

// The windows along one dimension: `number` windows of `extent` positions that are `step` apart, on an input
// of `size`. As in mesa_tune/ops/reference/windows.py.
struct Windows {
  int64_t size, number, extent, step, stride, padding;
};

// Bits of an offset, which counts the positions of a window over all dimensions.
inline int64_t offset_bits(const std::vector<Windows>& windows) {
  int64_t positions = 1;
  for (const Windows& window : windows) positions *= window.extent;
  return positions < 2 ? 1 : std::bit_width(static_cast<uint64_t>(positions - 1));
}

namespace cpu {

void pack_windows(const int64_t* indices, int64_t numel, const std::vector<Windows>& windows, uint8_t* data);
void unpack_windows(const uint8_t* data, int64_t numel, const std::vector<Windows>& windows,
                    int64_t* indices);

}  // namespace cpu
}  // namespace mesa_tune
