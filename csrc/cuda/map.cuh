// Applies a Map to elements that are about to be encoded, as csrc/cpu/map.h does.
#pragma once

#include "curves.h"
#include "quantize.h"

namespace mesa_tune::cuda {

// The index of an element's mean and deviation, and the element's index among the `inner` elements that share
// them.
struct StatisticIndex {
  int64_t statistic;
  int64_t element;

  MESA_TUNE_INLINE StatisticIndex(const Map& map, int64_t index) {
    const int64_t run = quotient(index, map.inner);
    element = index - run * map.inner;
    statistic = run - quotient(run, map.count) * map.count;
  }
  // Changes this to the StatisticIndex of the sum of both indices.
  MESA_TUNE_INLINE void add(const Map& map, const StatisticIndex& step) {
    statistic += step.statistic;
    element += step.element;
    if (element >= map.inner) {
      element -= map.inner;
      ++statistic;
    }
    if (statistic >= map.count) statistic -= map.count;
  }
};

__device__ inline float normalized(const Map& map, const StatisticIndex& index, float value) {
  const float mean = map.mean == nullptr ? 0.0f : map.mean[index.statistic];
  return (value - mean) * map.rstd[index.statistic];
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

// Applies any map to the element with index `index` in the tensor.
__device__ inline float mapped(const Map& map, int64_t index, float value) {
  switch (map.kind) {
    case Map::kNone:
      return value;
    case Map::kNormalize:
      return normalized(map, StatisticIndex(map, index), value);
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
