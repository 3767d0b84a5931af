// Elements as one of a few fixed levels on CUDA devices, as csrc/cpu/levels.cpp stores them. What is hard is
// that whether all elements are finite stays on the device: `offset` is 0 unless a thread writes NaN.

#include "bits.cuh"
#include "encode.cuh"
#include "levels.h"

namespace mesa_tune::cuda {
namespace {

constexpr int kPlanes = 4;
static_assert(kMostLevels == 1 << kPlanes);

template <class Type>
__global__ void pack(const typename Type::Storage* x, int64_t numel, const Map map,
                     const __grid_constant__ FewLevels boundaries, uint8_t* data, float* offset) {
  bool finite = true;
  pack_planes<kPlanes>(numel, boundaries.planes, data, [&](int64_t element) {
    const float value = mapped(map, element, Type::load(x[element]));
    finite = finite && is_finite(value);
    uint32_t code = 0;
    for (int i = 0; i < boundaries.count; ++i) code += value > boundaries.numbers[i];
    return code;
  });
  if (!finite) *offset = bit_cast<float>(kNan);
}

// One thread per element.
template <class Type>
__global__ void unpack(const uint8_t* data, const float* offset, int64_t numel,
                       const __grid_constant__ FewLevels values, typename Type::Storage* out) {
  const int64_t bytes = plane_bytes(numel);
  for (int64_t element = thread_number(); element < numel; element += thread_count()) {
    uint32_t code = 0;
    for (int plane = 0; plane < values.planes; ++plane)
      code |= (data[plane * bytes + element / 8] >> (element % 8) & 1u) << plane;
    out[element] = Type::store(values.numbers[code] + *offset);
  }
}

}  // namespace

void pack_levels(const void* x, Dtype dtype, int64_t numel, const Map& map, const FewLevels& boundaries,
                 uint8_t* data, float* offset, void* stream) {
  check(cudaMemsetAsync(offset, 0, sizeof(float), static_cast<cudaStream_t>(stream)));
  with_type(dtype, [&](auto type) {
    using Type = decltype(type);
    launch(pack<Type>, (numel + kWarp - 1) / kWarp, stream, static_cast<const typename Type::Storage*>(x),
           numel, map, boundaries, data, offset);
  });
}

void unpack_levels(const uint8_t* data, const float* offset, int64_t numel, const FewLevels& values,
                   Dtype dtype, void* out, void* stream) {
  with_type(dtype, [&](auto type) {
    using Type = decltype(type);
    launch(unpack<Type>, numel, stream, data, offset, numel, values,
           static_cast<typename Type::Storage*>(out));
  });
}

}  // namespace mesa_tune::cuda
