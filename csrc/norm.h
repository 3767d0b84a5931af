// What the dispatcher's side (norm.cpp) asks of the CPU's kernels.
#pragma once

#include "quantize.h"

namespace mesa_tune {

// The backward of a norm over rows: dx = r (u - mean(u) - xhat mean(u xhat)) with u = weight * grad, without
// mean(u) where the norm subtracts none. All dense float32.
struct NormBackward {
  const float* grad;
  const float* rstd;    // one a row
  const float* weight;  // `inner` numbers
  int64_t rows;
  int64_t inner;
  bool centered;
  float* dx;
  float* dw;  // sums over rows of grad * xhat
  float* db;  // and of grad
};

namespace cpu {

// xhat is what is packed, in groups of consecutive elements.
void norm_backward(const NormBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu
}  // namespace mesa_tune
