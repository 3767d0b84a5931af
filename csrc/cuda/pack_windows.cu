// A max pool's indices as offsets in their windows, and back, on CUDA devices. Offsets are stored as bit
// planes, each packed as by pack_bits; a plane may begin at any address. What is hard is that threads have no
// iterator: each finds the start of its window by divisions.

#include "geometry.h"
#include "launch.cuh"
#include "pack_windows.h"

namespace mesa_tune::cuda {
namespace {

constexpr int kPlanes = 8;  // planes whose bytes of 32 outputs a warp writes at a time, one byte per lane

// `rest` counts the windows along the dimensions whose start is still to come.
template <size_t kDims>
struct DividedOutput {
  const FewWindows& windows;
  int64_t rest;

  MESA_TUNE_INLINE size_t dims() const { return kDims; }
  MESA_TUNE_INLINE const Windows& axis(size_t d) const { return windows.axes[d]; }
  MESA_TUNE_INLINE int64_t start(size_t d) {
    const int64_t outer = quotient(rest, axis(d).number), window = rest - outer * axis(d).number;
    rest = outer;
    return window_start(axis(d), window);
  }
};

// A warp packs 32 outputs at a time. All its lanes take part, also those past the last output.
template <size_t kDims>
__global__ void pack(const int64_t* indices, int64_t numel, const __grid_constant__ FewWindows windows,
                     uint8_t* data) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t bytes = plane_bytes(numel);
  for (int64_t output = thread_number(); (output & -kWarp) < numel; output += thread_count()) {
    uint32_t offset = 0;
    if (output < numel) {
      DividedOutput<kDims> divided{windows, output};
      offset = to_offset(indices[output], divided);
    }
    const int64_t byte = output / kWarp * 4 + lane % 4;
    for (int first = 0; first < windows.planes; first += kPlanes) {
      uint32_t lane_bits = 0;
#pragma unroll
      for (int i = 0; i < kPlanes; ++i) {
        const uint32_t bits = __ballot_sync(kAllLanes, offset >> (first + i) & 1);
        if (lane / 4 == i) lane_bits = bits;
      }
      const int plane = first + lane / 4;
      if (plane < windows.planes && byte < bytes)
        data[plane * bytes + byte] = static_cast<uint8_t>(lane_bits >> (8 * (lane % 4)));
    }
  }
}

// One thread per output.
template <size_t kDims>
__global__ void unpack(const uint8_t* data, int64_t numel, const __grid_constant__ FewWindows windows,
                       int64_t* indices) {
  const int64_t bytes = plane_bytes(numel);
  for (int64_t output = thread_number(); output < numel; output += thread_count()) {
    uint32_t offset = 0;
    for (int64_t plane = 0; plane < windows.planes; ++plane) {
      const uint32_t bits = data[plane * bytes + output / 8];
      offset |= (bits >> (output % 8) & 1) << plane;
    }
    DividedOutput<kDims> divided{windows, output};
    indices[output] = to_index(offset, divided);
  }
}

}  // namespace

void pack_windows(const int64_t* indices, int64_t numel, const FewWindows& windows, uint8_t* data,
                  void* stream) {
  const auto kernel = windows.dims == 1 ? pack<1> : windows.dims == 2 ? pack<2> : pack<3>;
  launch(kernel, numel, stream, indices, numel, windows, data);
}

void unpack_windows(const uint8_t* data, int64_t numel, const FewWindows& windows, int64_t* indices,
                    void* stream) {
  const auto kernel = windows.dims == 1 ? unpack<1> : windows.dims == 2 ? unpack<2> : unpack<3>;
  launch(kernel, numel, stream, data, numel, windows, indices);
}

}  // namespace mesa_tune::cuda
