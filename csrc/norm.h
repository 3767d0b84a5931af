// Interface between the operator (norm.cpp) and its kernels (cpu/norm.cpp, cuda/norm.cu).
#pragma once

#include "numbers.h"
#include "quantize.h"

namespace mesa_tune {

// The backward of a norm over rows: dx = rstd * (u - mean(u) - xhat * mean(u * xhat)) with u = weight * grad.
// A norm that is not centered (RMS norm) has no mean(u). All tensors are dense, of any dtype; the CPU takes
// all but grad and dx in float32.
struct NormBackward {
  Strided grad;
  Numbers rstd;    // one number per row
  Numbers weight;  // `inner` numbers, one per column
  float limit;     // rows whose rstd is at least this are constant: their xhat counts as 0
  int64_t rows;
  int64_t inner;
  bool centered;
  Strided dx;  // of the dtype of grad
  Numbers dw;  // sums over rows of grad * xhat
  Numbers db;  // sums over rows of grad
};

namespace cpu {

// `packed`: xhat, in groups of consecutive elements.
void norm_backward(const NormBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu

namespace cuda {

// Rows are added in this many portions.
int64_t norm_portions(int64_t rows, int64_t inner);
// `sums` has 2 * portions * inner elements.
void norm_backward(const NormBackward& task, const Packed& packed, const Settings& settings, float* sums,
                   void* stream);

}  // namespace cuda
}  // namespace mesa_tune
