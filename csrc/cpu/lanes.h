// Sums in a fixed number of lanes, so that every instruction set adds in the same order and gives the same
// bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

namespace mesa_tune::cpu {

constexpr int64_t kLanes = 16;

// kLanes floats in two vectors of 32 bytes, the size of an AVX2 register. The compiler would put a vector
// larger than a register into memory.
struct Lanes {
  typedef float Vector __attribute__((vector_size(2 * kLanes)));

  static MESA_TUNE_INLINE Lanes read(const float* values) {
    Lanes lanes;
    std::memcpy(&lanes.low, values, sizeof(Vector));
    std::memcpy(&lanes.high, values + kLanes / 2, sizeof(Vector));
    return lanes;
  }
  MESA_TUNE_INLINE void add(const Lanes& other) {
    low += other.low;
    high += other.high;
  }
  MESA_TUNE_INLINE void multiply(const Lanes& other) {
    low *= other.low;
    high *= other.high;
  }
  MESA_TUNE_INLINE float total() const {
    const Vector sums = low + high;
    float values[kLanes / 2];
    std::memcpy(values, &sums, sizeof(sums));
    for (int64_t half = kLanes / 4; half > 0; half /= 2)
      for (int64_t i = 0; i < half; ++i) values[i] += values[i + half];
    return values[0];
  }

  Vector low = {}, high = {};
};

}  // namespace mesa_tune::cpu
