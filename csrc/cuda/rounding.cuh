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

// Takes an element's half of a word of noise to where 16 bits count units of 2^-24, as lift's `half`.
__device__ inline uint32_t noise_half(int64_t element) {
  return takes_upper_noise(element) ? 0x4324 : 0x4104;
}

// What is added to a position in units of 2^-24 before its fraction is dropped.
__device__ inline uint32_t lift(uint32_t counter, uint32_t key, uint32_t half) {
  return __byte_perm(noise(counter, key), 0, half);
}

// The code of a position, in the upper eight bits: the fraction, in units of 2^-16, and the noise carry into
// it.
__device__ inline uint32_t rounded(float position, uint32_t lift) {
  return __float2uint_rz(position * 0x1p16f + 0.5f) * 256 + lift;
}

// The nearest code, in the upper eight bits: one half stays below. In units of 2^-24 positions from 1 on are
// integers; those below 1 are rounded up, which leaves the comparison with an integer as it is.
__device__ inline uint32_t nearest(float position) {
  return __float2uint_ru(position * 0x1p24f) + 0x7FFFFF;
}

// The values of codes. Of a range too wide for fp32 a quarter is computed, and ends at what fits; so does
// that of a group with gaps, of which this is for the finite elements.
struct Values {
  float base, step, most, factor;

  __device__ explicit Values(const Range& stored) {
    constexpr float largest = std::numeric_limits<float>::max();
    const Range range = stored.revealed();
    const bool wide = range.wide();
    base = wide ? range.zero * kQuarter : range.zero;
    step = wide ? -range.step : range.step;
    most = stored.plain() ? std::numeric_limits<float>::infinity() : wide ? largest * kQuarter : largest;
    factor = wide ? 1 / kQuarter : 1.0f;
  }
  __device__ float operator()(uint32_t code) const {
    const float value = base + static_cast<float>(code) * step;
    return (value > most ? most : value) * factor;
  }
};

}  // namespace mesa_tune::cuda
