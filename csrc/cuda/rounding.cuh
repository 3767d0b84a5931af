// Rounding to codes and back for one element: the results of csrc/cpu/rounding.h, by what a GPU does fast.
#pragma once

#include <cuda_runtime.h>

#include "arithmetic.h"
#include "quantize.h"

namespace mesa_tune::cuda {

// The seed is read where it lies, so that nothing waits for it.
__device__ inline Keys seed_keys(const Noise& noise) {
  Keys keys;
  if (noise.stochastic) keys.absorb(noise.seed_on_device != nullptr ? *noise.seed_on_device : noise.seed);
  return keys;
}

// The counter has 32 bits; where the element's number leaves them, the carry starts another sequence.
__device__ inline uint32_t counter_of(int64_t element, const Keys& keys) {
  return static_cast<uint32_t>(element) + keys.one + static_cast<uint32_t>(element >> 32) * kCarry;
}

// What an element's fraction, in units of 2^-24, lacks at most for the next code: it goes up if it exceeds
// its noise, or one half.
__device__ inline uint32_t slack(uint32_t counter, uint32_t key) {
  return (stirred(counter, key) * (0 - kMix2) - 1) >> 8;  // ~(h * m) in one instruction
}
constexpr uint32_t kNearestSlack = 0x7FFFFF;

// The code of a position, in the upper eight bits: a fraction that exceeds the noise carries into it. In
// units of 2^-24 positions from 1 on are integers; those below 1 are rounded up, which leaves the comparison
// with an integer as it is.
__device__ inline uint32_t rounded(float position, uint32_t slack) {
  return __float2uint_ru(position * 0x1p24f) + slack;
}

// The values of codes. Of a range too wide for fp32 a quarter is computed, and ends at what fits.
struct Values {
  float base, step, most, factor;

  __device__ explicit Values(const Range& range) {
    constexpr float largest = std::numeric_limits<float>::max();
    const bool wide = range.wide();
    base = wide ? range.zero * kQuarter : range.zero;
    step = wide ? -range.step : range.step;
    most = wide ? largest * kQuarter : std::numeric_limits<float>::infinity();
    factor = wide ? 1 / kQuarter : 1.0f;
  }
  __device__ float operator()(uint32_t code) const {
    const float value = base + static_cast<float>(code) * step;
    return (value > most ? most : value) * factor;
  }
};

}  // namespace mesa_tune::cuda
