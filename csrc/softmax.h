// Interface between the operator (softmax.cpp) and its kernels (cpu/softmax.cpp, cuda/softmax.cu).
#pragma once

#include "quantize.h"

namespace mesa_tune {

// The backward of a softmax over rows: dx = y * (grad - sum(y * grad)). All tensors are dense float32.
struct SoftmaxBackward {
  const float* grad;
  int64_t rows;
  int64_t width;
  float* dx;
};

namespace cpu {

// `packed`: y, the output of the softmax, in groups of consecutive elements.
void softmax_backward(const SoftmaxBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu

namespace cuda {

void softmax_backward(const SoftmaxBackward& task, const Packed& packed, const Settings& settings,
                      void* stream);

}  // namespace cuda
}  // namespace mesa_tune
