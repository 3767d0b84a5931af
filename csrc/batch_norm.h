// Interface between the operator (batch_norm.cpp) and its CPU kernel (cpu/batch_norm.cpp).
#pragma once

#include "quantize.h"

namespace mesa_tune {

// The backward of a batch norm: dx = rstd * (u - mean(u) - xhat * mean(u * xhat)) with u = weight * grad and
// means per channel; or rstd * u if the statistics are fixed (not computed from the batch). All tensors are
// dense float32. Element (sample, channel, position) has index (sample * channels + channel) * positions +
// position.
struct BatchNormBackward {
  const float* grad;
  const float* rstd;    // one number per channel
  const float* weight;  // one number per channel; null: 1
  int64_t samples;
  int64_t channels;
  int64_t positions;
  bool fixed;
  float* dx;
  float* dw;  // per channel, the sum of grad * xhat
  float* db;  // per channel, the sum of grad
};

namespace cpu {

// `packed`: xhat, in groups of consecutive elements.
void batch_norm_backward(const BatchNormBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu
}  // namespace mesa_tune
