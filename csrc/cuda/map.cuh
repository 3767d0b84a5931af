// What is encoded in place of the elements themselves: a function of each, as csrc/cpu/map.h has it.
#pragma once

#include "curves.h"
#include "quantize.h"

namespace mesa_tune::cuda {

// Which mean and deviation an element takes, and which it is of the neighbours that share them.
struct Place {
  int64_t at;
  int64_t within;

  MESA_TUNE_INLINE Place(const Map& map, int64_t index) {
    const int64_t turn = quotient(index, map.inner);
    within = index - turn * map.inner;
    at = turn - quotient(turn, map.count) * map.count;
  }
  // The place of the sum of both indices.
  MESA_TUNE_INLINE void add(const Map& map, const Place& other) {
    at += other.at;
    within += other.within;
    if (within >= map.inner) {
      within -= map.inner;
      ++at;
    }
    if (at >= map.count) at -= map.count;
  }
};

__device__ inline float normalized(const Map& map, const Place& place, float value) {
  const float mean = map.mean == nullptr ? 0.0f : map.mean[place.at];
  return (value - mean) * map.rstd[place.at];
}

template <Map::Kind kKind>
__device__ inline float curve(float value) {
  if constexpr (kKind == Map::kGelu) {
    return gelu_derivative(value);
  } else if constexpr (kKind == Map::kGeluTanh) {
    return gelu_tanh_derivative(value);
  } else if constexpr (kKind == Map::kSilu) {
    return silu_derivative(value);
  } else if constexpr (kKind == Map::kExp) {
    return exp_derivative(value);
  } else {
    static_assert(kKind == Map::kDefinite);
    return definite(value);
  }
}

// Any map of element `index`.
__device__ inline float mapped(const Map& map, int64_t index, float value) {
  switch (map.kind) {
    case Map::kNone:
      return value;
    case Map::kNormalize:
      return normalized(map, Place(map, index), value);
    case Map::kGelu:
      return curve<Map::kGelu>(value);
    case Map::kGeluTanh:
      return curve<Map::kGeluTanh>(value);
    case Map::kSilu:
      return curve<Map::kSilu>(value);
    case Map::kExp:
      return curve<Map::kExp>(value);
    case Map::kDefinite:
      return curve<Map::kDefinite>(value);
  }
  return value;
}

}  // namespace mesa_tune::cuda
