// Interface between the operator (batch_norm.cpp) and its kernels (cpu/batch_norm.cpp, cuda/batch_norm.cu).
#pragma once

#include "inline.h"
#include "quantize.h"

namespace mesa_tune {

// Coefficients of one channel of dx.
struct Coefficients {
  float scale, slope, shift;

  MESA_TUNE_INLINE float dx(float grad, float xhat) const { return scale * grad + (slope * xhat + shift); }
};

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

  // Reads the sums.
  MESA_TUNE_INLINE Coefficients coefficients(int64_t channel) const {
    const float scale = rstd[channel] * (weight == nullptr ? 1.0f : weight[channel]);
    const float factor = -scale / static_cast<float>(samples * positions);
    return {scale, factor * dw[channel], factor * db[channel]};
  }
};

namespace cpu {

// `packed`: xhat, in groups of consecutive elements.
void batch_norm_backward(const BatchNormBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu

namespace cuda {

// The elements of each channel are added in this many portions.
int64_t batch_norm_portions(const BatchNormBackward& task);
// `memory`, not used for one portion, has 2 * portions * channels elements.
void batch_norm_backward(const BatchNormBackward& task, const Packed& packed, const Settings& settings,
                         float* memory, void* stream);

}  // namespace cuda
}  // namespace mesa_tune
