// The functions of which derivatives are encoded, on every device. Each operation and its order are those of
// mesa_tune/maps.py.
#pragma once

#include <cstdint>

#include "convert.h"

namespace mesa_tune {

// exp(x) for x <= 88, 0 below -87: 2^n times a polynomial of what is left of x.
MESA_TUNE_INLINE float exponential(float x) {
  const float most = x > -87.0f ? x : -87.0f;
  const float shifted = most * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the integer in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (most - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const uint32_t power = (bit_cast<uint32_t>(shifted) - 0x4B400000u + 127u) << 23;
  const float value = p * bit_cast<float>(power);
  return x > -87.0f ? value : (x == x ? 0.0f : x);
}

// d/dx of x Phi(x), Phi by Abramowitz and Stegun 7.1.26 (error below 1e-7).
MESA_TUNE_INLINE float gelu_derivative(float x) {
  const float z = x < 0.0f ? -x : x;
  const float e = exponential(x * x * -0.5f);
  const float t = 1.0f / (z * 0.231641900f + 1.0f);
  float p = t * 0.5307027145f + -0.7265760135f;
  p = p * t + 0.7107068705f;
  p = p * t + -0.142248368f;
  p = p * t + 0.127414796f;
  const float tail = p * t * e;
  const float whole = x < 0.0f ? tail : 1.0f - tail;
  return whole + x * e * 0.398942280f;
}

MESA_TUNE_INLINE float gelu_tanh_derivative(float x) {
  const float square = x * x;
  const float inner = x * (square * 0.0356774081f + 0.797884561f);
  const float below = inner < 40.0f ? inner : 40.0f;
  const float most = below > -40.0f ? below : -40.0f;
  const float s = 1.0f / (exponential(most * -2.0f) + 1.0f);  // (1 + tanh) / 2
  const float slope = square * 0.107032224f + 0.797884561f;
  return s + x * (s * (1.0f - s)) * 2.0f * slope;
}

MESA_TUNE_INLINE float silu_derivative(float x) {
  const float most = x > -80.0f ? x : -80.0f;
  const float s = 1.0f / (exponential(-most) + 1.0f);
  return s * (x * (1.0f - s) + 1.0f);
}

}  // namespace mesa_tune
