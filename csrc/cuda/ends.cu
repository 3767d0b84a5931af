// Ranges of 16-bit tensors as ends, and back, on CUDA devices.

#include "ends.h"
#include "launch.cuh"
#include "quantize.h"

namespace mesa_tune::cuda {
namespace {

template <class Type>
__global__ void store(const float* ranges, int64_t groups, int64_t levels, uint16_t* ends) {
  for (int64_t i = thread_number(); i < groups; i += thread_count())
    to_ends<Type>({ranges[2 * i], ranges[2 * i + 1]}, levels, ends + 2 * i);
}

template <class Type>
__global__ void read(const uint16_t* ends, int64_t groups, int64_t levels, float* ranges) {
  for (int64_t i = thread_number(); i < groups; i += thread_count()) {
    const Range range = from_ends<Type>(ends + 2 * i, levels);
    ranges[2 * i] = range.zero;
    ranges[2 * i + 1] = range.step;
  }
}

}  // namespace

void store_ends(const float* ranges, int64_t groups, int64_t levels, Dtype dtype, uint16_t* ends,
                void* stream) {
  const auto kernel = dtype == Dtype::kHalf ? store<Half> : store<BFloat16>;
  launch(kernel, groups, stream, ranges, groups, levels, ends);
}

void read_ends(const uint16_t* ends, int64_t groups, int64_t levels, Dtype dtype, float* ranges,
               void* stream) {
  const auto kernel = dtype == Dtype::kHalf ? read<Half> : read<BFloat16>;
  launch(kernel, groups, stream, ends, groups, levels, ranges);
}

}  // namespace mesa_tune::cuda
