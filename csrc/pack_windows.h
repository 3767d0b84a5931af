// Interface between the operators (pack_windows.cpp) and their kernels (cpu/pack_windows.cpp,
// cuda/pack_windows.cu), and the arithmetic of the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "inline.h"

namespace mesa_tune {

// The windows along one dimension: `number` windows of `extent` positions that are `step` apart, on an input
// of `size`. As in mesa_tune/ops/reference/windows.py.
struct Windows {
  int64_t size, number, extent, step, stride, padding;
};

// Bits of an offset, which counts the positions of a window over all dimensions.
inline int64_t offset_bits(const std::vector<Windows>& windows) {
  int64_t positions = 1, bits = 1;
  for (const Windows& window : windows) positions *= window.extent;
  while (bits < 64 && static_cast<uint64_t>(positions - 1) >> bits != 0) ++bits;
  return bits;
}

// Divides in 32 bits where both numbers fit: twice as fast.
MESA_TUNE_INLINE uint64_t quotient(uint64_t a, uint64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// The first position of a window along a dimension.
MESA_TUNE_INLINE int64_t window_start(const Windows& axis, int64_t window) {
  if (axis.stride > 0) return window * axis.stride - axis.padding;
  return static_cast<int64_t>(quotient(window * axis.size, axis.number));
}

// An `Output` has the windows of `dims()` dimensions, `axis(d)`, and the first position of its own along
// each, `start(d)`, which is called once per dimension, the last dimension first.
template <class Output>
MESA_TUNE_INLINE uint32_t to_offset(int64_t index, Output& output) {
  int64_t offset = 0, scale = 1;
  for (size_t d = output.dims(); d-- > 0;) {
    const Windows& axis = output.axis(d);
    const auto rest = static_cast<int64_t>(quotient(index, axis.size));
    const int64_t distance = index - rest * axis.size - output.start(d);
    offset += (axis.step == 1 ? distance : distance / axis.step) * scale;
    scale *= axis.extent;
    index = rest;
  }
  return static_cast<uint32_t>(offset);
}

template <class Output>
MESA_TUNE_INLINE int64_t to_index(uint32_t offset, Output& output) {
  int64_t index = 0, scale = 1;
  for (size_t d = output.dims(); d-- > 0;) {
    const Windows& axis = output.axis(d);
    const auto rest = static_cast<uint32_t>(quotient(offset, axis.extent));
    const int64_t step = offset - rest * axis.extent;
    index += (step * axis.step + output.start(d)) * scale;
    scale *= axis.size;
    offset = rest;
  }
  return index;
}

namespace cpu {

void pack_windows(const int64_t* indices, int64_t numel, const std::vector<Windows>& windows, uint8_t* data);
void unpack_windows(const uint8_t* data, int64_t numel, const std::vector<Windows>& windows,
                    int64_t* indices);

}  // namespace cpu

// These run on the current device; `stream` is a cudaStream_t.
namespace cuda {

constexpr int64_t kMostDims = 3;  // those of max pools

// Windows that kernels take by value. `planes`: bits of an offset.
struct FewWindows {
  Windows axes[kMostDims];
  int64_t dims, planes;
};

void pack_windows(const int64_t* indices, int64_t numel, const FewWindows& windows, uint8_t* data,
                  void* stream);
void unpack_windows(const uint8_t* data, int64_t numel, const FewWindows& windows, int64_t* indices,
                    void* stream);

}  // namespace cuda
}  // namespace mesa_tune
