// The backward of a softmax over rows on CUDA devices, from its packed output: one warp per row.

#include "elements.cuh"
#include "softmax.h"

namespace mesa_tune::cuda {
namespace {

__global__ void rows_backward(const SoftmaxBackward task, const __grid_constant__ Elements elements) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t turn = thread_number(); turn / kWarp < task.rows; turn += thread_count()) {
    const int64_t first = turn / kWarp * task.width;
    float product = 0;
    Reader values(elements, first + lane, kWarp);
    for (int64_t i = lane; i < task.width; i += kWarp, values.advance())
      product += task.grad[first + i] * values.value();
    product = warp_sum(product);
    Reader again(elements, first + lane, kWarp);
    for (int64_t i = lane; i < task.width; i += kWarp, again.advance())
      task.dx[first + i] = again.value() * (task.grad[first + i] - product);
  }
}

}  // namespace

void softmax_backward(const SoftmaxBackward& task, const Packed& packed, const Settings& settings,
                      void* stream) {
  const Elements elements{packed, settings, split(task.rows * task.width, settings)};
  launch(rows_backward, task.width > 0 ? task.rows * kWarp : 0, stream, task, elements);
}

}  // namespace mesa_tune::cuda
