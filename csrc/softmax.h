// What the dispatcher's side (softmax.cpp) asks of the CPU's kernel.
#pragma once

#include "quantize.h"

namespace mesa_tune {

// The backward of a softmax over rows: dx = y (grad - sum(y grad)). Dense float32.
struct SoftmaxBackward {
  const float* grad;
  int64_t rows;
  int64_t width;
  float* dx;
};

namespace cpu {

// y is what is packed, in groups of consecutive elements.
void softmax_backward(const SoftmaxBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu
}  // namespace mesa_tune
