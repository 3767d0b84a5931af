// The backward of a cross-entropy on CUDA devices, from its packed probabilities. Each thread decodes columns
// of groups, whose elements may belong to several rows. A mean takes a launch before: its divisor is the sum
// of the weights of all rows, which one block adds.

#include <cassert>

#include "cross_entropy.h"
#include "elements.cuh"
#include "sums.cuh"

namespace mesa_tune::cuda {
namespace {

// The host does not wait to hear of a target that is no class: an assertion on the device fails, as in
// PyTorch's own kernels.
__device__ inline void check_target(const CrossEntropyBackward& task, int64_t row) {
  assert(!task.counts(row) || (task.target[row] >= 0 && task.target[row] < task.classes));
}

// One block.
__global__ void add_weights(const CrossEntropyBackward task, float* divisor) {
  double sum = 0;
  for (int64_t row = threadIdx.x; row < task.rows; row += kThreads) {
    check_target(task, row);
    sum += task.weight_of(row);
  }
  const double total = block_sums(sum).total;
  if (threadIdx.x == 0) *divisor = static_cast<float>(total);
}

__global__ void columns_backward(const CrossEntropyBackward task, const __grid_constant__ Elements elements,
                                 const float* divisor) {
  for (int64_t turn = thread_number(); turn < columns_of(elements.parts); turn += thread_count()) {
    int64_t row = 0, end = 0, target = 0;
    float scale = 0;
    decode_column(elements, turn, [&](int64_t element, float p) {
      if (element >= end) {
        row = quotient(element, task.classes);
        end = (row + 1) * task.classes;
        check_target(task, row);
        scale = task.scale_of(row, divisor == nullptr ? 1.0f : *divisor);
        target = scale == 0.0f ? -1 : end - task.classes + task.target[row];
      }
      task.dx[element] = scale * (element == target ? task.surplus[row] : p);
    });
  }
}

}  // namespace

void cross_entropy_backward(const CrossEntropyBackward& task, const Packed& packed, const Settings& settings,
                            float* divisor, void* stream) {
  const Elements elements{packed, settings, split(task.rows * task.classes, settings)};
  const int64_t columns = columns_of(elements.parts);
  launch(add_weights, task.mean && columns > 0 ? kThreads : 0, stream, task, divisor);
  launch(columns_backward, columns, stream, task, elements, task.mean ? divisor : nullptr);
}

}  // namespace mesa_tune::cuda
