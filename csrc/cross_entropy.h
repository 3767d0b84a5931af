// What the dispatcher's side (cross_entropy.cpp) asks of the CPU's kernel.
#pragma once

#include "quantize.h"

namespace mesa_tune {

// The backward of a cross-entropy for class indices: in each row dx = scale p, at the target scale surplus.
// Dense.
struct CrossEntropyBackward {
  const int64_t* target;  // only looked at where the scale is not 0
  const float* surplus;   // one per row: p - 1 of the target
  const float* scale;     // one per row
  int64_t rows;
  int64_t classes;
  float* dx;
};

namespace cpu {

// p is what is packed, in groups of consecutive elements.
void cross_entropy_backward(const CrossEntropyBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu
}  // namespace mesa_tune
