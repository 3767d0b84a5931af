// pack_zero_rows and clear_rows on CUDA devices. A warp takes the eight rows of a byte; it reads each up to
// its first few elements that are not zero.

#include "encode.cuh"

namespace mesa_tune::cuda {
namespace {

template <class Type>
__global__ void pack_rows(const __grid_constant__ Layout layout, const typename Type::Storage* x,
                          int64_t rows, int64_t width, uint8_t* data) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t turn = thread_number(); turn / kWarp * 8 < rows; turn += thread_count()) {
    const int64_t byte = turn / kWarp;
    uint32_t bits = 0;
    for (int64_t i = 0; i < 8 && 8 * byte + i < rows; ++i) {
      const int64_t first = (8 * byte + i) * width;
      bool others = false;
      for (int64_t begin = 0; begin < width && !others; begin += kWarp) {
        const int64_t column = begin + lane;
        const bool other = column < width && Type::load(x[layout.offset(0, first + column)]) != 0.0f;
        others = __any_sync(kAllLanes, other);
      }
      bits |= static_cast<uint32_t>(!others) << i;
    }
    if (lane == 0) data[byte] = static_cast<uint8_t>(bits);
  }
}

__global__ void clear(const uint8_t* bits, int64_t rows, int64_t width, uint16_t* out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t turn = thread_number(); turn / kWarp * 8 < rows; turn += thread_count()) {
    const int64_t byte = turn / kWarp;
    for (int64_t i = 0; i < 8; ++i) {
      if (!(bits[byte] >> i & 1)) continue;
      uint16_t* row = out + (8 * byte + i) * width;
      for (int64_t column = lane; column < width; column += kWarp) row[column] = 0;
    }
  }
}

}  // namespace

void pack_zero_rows(const Strided& x, int64_t rows, int64_t width, uint8_t* data, void* stream) {
  with_type(x.dtype, [&](auto type) {
    using Type = decltype(type);
    launch(pack_rows<Type>, plane_bytes(rows) * kWarp, stream, x.layout,
           static_cast<const typename Type::Storage*>(x.data), rows, width, data);
  });
}

void clear_rows(const uint8_t* bits, int64_t rows, int64_t bytes, void* out, void* stream) {
  launch(clear, plane_bytes(rows) * kWarp, stream, bits, rows, bytes / 2, static_cast<uint16_t*>(out));
}

}  // namespace mesa_tune::cuda
