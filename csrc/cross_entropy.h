// Interface between the operator (cross_entropy.cpp) and its CPU kernel (cpu/cross_entropy.cpp).
#pragma once

#include "quantize.h"

namespace mesa_tune {

// The backward of a cross-entropy for class indices: in each row dx = scale * p, but scale * surplus at the
// target. All tensors are dense.
struct CrossEntropyBackward {
  const int64_t* target;  // one class per row; not read where the scale is 0
  const float* surplus;   // one number per row: p - 1 of the target
  const float* scale;     // one number per row
  int64_t rows;
  int64_t classes;
  float* dx;
};

namespace cpu {

// `packed`: the probabilities p, in groups of consecutive elements.
void cross_entropy_backward(const CrossEntropyBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu
}  // namespace mesa_tune
