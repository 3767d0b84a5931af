// Interface between the operator (norm.cpp) and its CPU kernel (cpu/norm.cpp).
#pragma once

#include "quantize.h"

namespace mesa_tune {

// The backward of a norm over rows: dx = rstd * (u - mean(u) - xhat * mean(u * xhat)) with u = weight * grad.
// A norm that is not centered (RMS norm) has no mean(u). All tensors are dense.
struct NormBackward {
  Strided grad;         // of any dtype, as dx
  const float* rstd;    // one number per row
  const float* weight;  // `inner` numbers, one per column
  float limit;          // rows whose rstd is at least this are constant: their xhat counts as 0
  int64_t rows;
  int64_t inner;
  bool centered;
  Strided dx;
  float* dw;  // sums over rows of grad * xhat
  float* db;  // sums over rows of grad
};

namespace cpu {

// `packed`: xhat, in groups of consecutive elements.
void norm_backward(const NormBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu
}  // namespace mesa_tune
