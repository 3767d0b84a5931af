// Sums and the like in a fixed number of lanes, so that every vector path gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

namespace mesa_tune::cpu {

constexpr int64_t kLanes = 16;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));

MESA_TUNE_INLINE void read(const float* values, Lanes& lanes) {
  std::memcpy(&lanes, values, sizeof(lanes));
}

MESA_TUNE_INLINE float total(const Lanes& lanes) {
  float values[kLanes];
  std::memcpy(values, &lanes, sizeof(lanes));
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) values[i] += values[i + half];
  return values[0];
}

// Of `n` values, a multiple of the lanes.
MESA_TUNE_INLINE float sum(const float* values, int64_t n) {
  Lanes sums = {}, next;
  for (int64_t i = 0; i < n; i += kLanes) {
    read(values + i, next);
    sums += next;
  }
  return total(sums);
}

MESA_TUNE_INLINE float product_sum(const float* a, const float* b, int64_t n) {
  Lanes sums = {}, left, right;
  for (int64_t i = 0; i < n; i += kLanes) {
    read(a + i, left);
    read(b + i, right);
    sums += left * right;
  }
  return total(sums);
}

// The greatest of them, of which there is one at least; NaN counts for nothing.
MESA_TUNE_INLINE float greatest(const float* values, int64_t n) {
  Lanes most, next;
  read(values, most);
  for (int64_t i = kLanes; i < n; i += kLanes) {
    read(values + i, next);
    most = next > most ? next : most;
  }
  float found[kLanes];
  std::memcpy(found, &most, sizeof(most));
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) found[i] = found[i] > found[i + half] ? found[i] : found[i + half];
  return found[0];
}

}  // namespace mesa_tune::cpu
