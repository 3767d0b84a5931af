// Interface between the operator (cross_entropy.cpp) and its kernels (cpu/cross_entropy.cpp,
// cuda/cross_entropy.cu).
#pragma once

#include "inline.h"
#include "quantize.h"

namespace mesa_tune {

// The backward of a cross-entropy for class indices: in each row dx = scale * p, but scale * surplus at the
// target. All tensors are dense.
struct CrossEntropyBackward {
  const int64_t* target;  // one class per row, or `ignore`
  const float* surplus;   // one number per row: p - 1 of the target
  const float* weight;    // one number per class; null: 1
  const float* grad;      // one number per row, or a single one for all
  bool single_grad;
  bool mean;  // the divisor is the sum of the rows' weights, else 1
  int64_t ignore;
  int64_t rows;
  int64_t classes;
  float* dx;

  MESA_TUNE_INLINE bool counts(int64_t row) const { return target[row] != ignore; }
  MESA_TUNE_INLINE float weight_of(int64_t row) const {
    if (!counts(row)) return 0.0f;
    return weight == nullptr ? 1.0f : weight[target[row]];
  }
  MESA_TUNE_INLINE float scale_of(int64_t row, float divisor) const {
    return counts(row) ? weight_of(row) * (grad[single_grad ? 0 : row] / divisor) : 0.0f;
  }
};

// In both, `packed` holds the probabilities p, in groups of consecutive elements.
namespace cpu {

// `scale`: one number per row.
void cross_entropy_backward(const CrossEntropyBackward& task, const float* scale, const Packed& packed,
                            const Settings& settings);

}  // namespace cpu

namespace cuda {

// `divisor`: memory for one number, if this is of a mean.
void cross_entropy_backward(const CrossEntropyBackward& task, const Packed& packed, const Settings& settings,
                            float* divisor, void* stream);

}  // namespace cuda
}  // namespace mesa_tune
