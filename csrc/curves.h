// The elementwise functions that are computed while a tensor is encoded, for every device: derivatives of
// activations, mostly. What is hard is that they must give the bytes of mesa_tune/ops/maps.py: each operation
// and its order are the same there.
#pragma once

#include <cstdint>

#include "convert.h"

namespace mesa_tune {

// exp(x) for x <= 88, 0 below -87. x = n log(2) + r, so exp(x) is 2^n times a polynomial of r.
MESA_TUNE_INLINE float exponential(float x) {
  const float clamped = x > -87.0f ? x : -87.0f;
  const float shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: n is in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
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

// exp(-z^2 / 2) for 0 <= z <= 13 as 2^(n + r): n goes into the exponent, 2^r is a polynomial.
MESA_TUNE_INLINE float gaussian(float z) {
  const float t = z * z * -0.721347520f;
  const float shifted = t + 12582912.0f;  // 1.5 * 2^23: n is in the low bits
  const float r = t - (shifted - 12582912.0f);
  float p = 1.32768e-3f;
  p = p * r + 9.67556e-3f;
  p = p * r + 5.550712e-2f;
  p = p * r + 2.402212e-1f;
  p = p * r + 6.9314697e-1f;
  p = p * r + 1.0f;
  const uint32_t power = (bit_cast<uint32_t>(shifted) - 0x4B400000u + 127u) << 23;
  return p * bit_cast<float>(power);
}

// d/dx of x Phi(x), GELU's derivative. With z = |x| it is 1 - q at z and q at -z. q / exp(-z^2 / 2) is
// approximated by a minimax polynomial, with an error of 3e-7. Beyond 13 the result is 1 or 0 in fp32.
MESA_TUNE_INLINE float gelu_derivative(float x) {
  const float magnitude = x < 0.0f ? -x : x;
  const float z = magnitude > 13.0f ? 13.0f : magnitude;
  float p = -8.120477e-6f;
  p = p * z + 1.52635507e-4f;
  p = p * z + -1.2746394e-3f;
  p = p * z + 6.39234946e-3f;
  p = p * z + -2.22468854e-2f;
  p = p * z + 5.95140123e-2f;
  p = p * z + -1.31784373e-1f;
  p = p * z + 2.49756301e-1f;
  p = p * z + -7.97865387e-1f;
  p = p * z + 4.9999974e-1f;
  const float q = p * gaussian(z);
  return x < 0.0f ? q : 1.0f - q;
}

MESA_TUNE_INLINE float gelu_tanh_derivative(float x) {
  const float square = x * x;
  const float inner = x * (square * 0.0356774081f + 0.797884561f);
  const float bounded = inner < 40.0f ? inner : 40.0f;
  const float clamped = bounded > -40.0f ? bounded : -40.0f;
  const float s = 1.0f / (exponential(clamped * -2.0f) + 1.0f);  // (1 + tanh) / 2
  const float slope = square * 0.107032224f + 0.797884561f;
  return s + x * (s * (1.0f - s)) * 2.0f * slope;
}

MESA_TUNE_INLINE float silu_derivative(float x) {
  const float clamped = x > -80.0f ? x : -80.0f;
  const float s = 1.0f / (exponential(-clamped) + 1.0f);
  return s * (x * (1.0f - s) + 1.0f);
}

MESA_TUNE_INLINE float exp_derivative(float x) {
  return exponential(x > 88.0f ? 88.0f : x == x ? x : -88.0f);
}

MESA_TUNE_INLINE float definite(float x) {
  return x == x ? x : 0.0f;
}

}  // namespace mesa_tune
