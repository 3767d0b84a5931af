// pack_zero_rows and clear_rows on CUDA devices.

#include "encode.cuh"
#include "zero_rows.cuh"

namespace mesa_tune::cuda {
namespace {

template <class Type>
__global__ void pack(const __grid_constant__ Layout layout, const typename Type::Storage* x,
                     const ZeroRows to) {
  pack_rows(to, thread_number(), thread_count(),
            [&](int64_t element) { return Type::load(x[layout.offset(0, element)]); });
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

void pack_zero_rows(const Strided& x, const ZeroRows& zero_rows, void* stream) {
  with_type(x.dtype, [&](auto type) {
    using Type = decltype(type);
    launch(pack<Type>, zero_rows_threads(zero_rows), stream, x.layout,
           static_cast<const typename Type::Storage*>(x.data), zero_rows);
  });
}

void clear_rows(const uint8_t* bits, int64_t rows, int64_t bytes, void* out, void* stream) {
  launch(clear, plane_bytes(rows) * kWarp, stream, bits, rows, bytes / 2, static_cast<uint16_t*>(out));
}

}  // namespace mesa_tune::cuda
