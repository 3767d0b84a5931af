// Rounds one element to its code, and decodes it. The results are those of csrc/cpu/rounding.h, by
// instructions that are fast on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "arithmetic.h"
#include "quantize.h"

namespace mesa_tune::cuda {

// The keys of the seed. A seed on the device is read there, so that the host does not wait for it.
__device__ inline Keys seed_keys(const Noise& noise) {
  Keys keys;
  if (noise.stochastic) keys.absorb(noise.seed_on_device != nullptr ? *noise.seed_on_device : noise.seed);
  return keys;
}

// Byte selector for `lift`: it moves an element's 16 bits of a word of noise to the bits where they count
// 2^-24.
__device__ inline uint32_t noise_half(int64_t element) {
  return takes_upper_noise(element) ? 0x4324 : 0x4104;
}

// The noise to add to a position in units of 2^-24 before its fraction is dropped.
__device__ inline uint32_t lift(uint32_t counter, uint32_t key, uint32_t half) {
  return __byte_perm(noise(counter, key), 0, half);
}

// The code of a position, in the upper eight bits. Below it, the sum of the fraction and the noise may carry
// to the next code.
__device__ inline uint32_t rounded(float position, uint32_t lift) {
  return __float2uint_rz(position * 0x1p16f + 0.5f) * 256 + lift;
}

// The nearest code, in the upper eight bits; a half is rounded down. In units of 2^-24, positions of 1 or
// more are integers. Smaller ones are rounded up to an integer, which does not change the comparison with a
// half.
__device__ inline uint32_t nearest(float position) {
  return __float2uint_ru(position * 0x1p24f) + 0x7FFFFF;
}

// The values of codes; in a group with gaps, of the finite elements. In a range too wide for fp32, quarters
// of the values are computed. There and in groups with gaps, values are limited to the largest fp32 number.
struct Values {
  float base, step, largest_value, factor;

  __device__ explicit Values(const Range& stored) {
    constexpr float largest = std::numeric_limits<float>::max();
    const Range range = stored.revealed();
    const bool wide = range.wide();
    base = wide ? range.zero * kQuarter : range.zero;
    step = wide ? -range.step : range.step;
    largest_value = stored.plain() ? std::numeric_limits<float>::infinity()
                    : wide         ? largest * kQuarter
                                   : largest;
    factor = wide ? 1 / kQuarter : 1.0f;
  }
  __device__ float operator()(uint32_t code) const {
    const float value = base + static_cast<float>(code) * step;
    return (value > largest_value ? largest_value : value) * factor;
  }
};

}  // namespace mesa_tune::cuda
