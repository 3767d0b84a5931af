// What the dispatcher's side (batch_norm.cpp) asks of the CPU's kernel.
#pragma once

#include "quantize.h"

namespace mesa_tune {

// The backward of a batch norm: dx = r (u - mean(u) - xhat mean(u xhat)) with u = weight * grad and means by
// channel, or r u where the statistics are fixed. Dense float32; the element at (sample, channel, place) lies
// at (sample * channels + channel) * places + place.
struct BatchNormBackward {
  const float* grad;
  const float* rstd;    // one a channel
  const float* weight;  // one a channel; null: 1
  int64_t samples;
  int64_t channels;
  int64_t places;
  bool fixed;
  float* dx;
  float* dw;  // by channel, the sum of grad * xhat
  float* db;  // and of grad
};

namespace cpu {

// xhat is what is packed, in groups of consecutive elements.
void batch_norm_backward(const BatchNormBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu
}  // namespace mesa_tune
