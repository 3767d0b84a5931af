// Sums in a fixed number of lanes, so that every vector path gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

namespace mesa_tune::cpu {

constexpr int64_t kLanes = 16;

// In two halves: what is wider than a register of AVX2 would go through memory there.
struct Lanes {
  typedef float Half __attribute__((vector_size(2 * kLanes)));

  static MESA_TUNE_INLINE Lanes read(const float* values) {
    Lanes lanes;
    std::memcpy(&lanes.low, values, sizeof(Half));
    std::memcpy(&lanes.high, values + kLanes / 2, sizeof(Half));
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
    const Half both = low + high;
    float values[kLanes / 2];
    std::memcpy(values, &both, sizeof(both));
    for (int64_t half = kLanes / 4; half > 0; half /= 2)
      for (int64_t i = 0; i < half; ++i) values[i] += values[i + half];
    return values[0];
  }

  Half low = {}, high = {};
};

}  // namespace mesa_tune::cpu
