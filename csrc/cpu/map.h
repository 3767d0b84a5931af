// Applies a Map to elements that are about to be encoded, while they are in the first-level cache.
#pragma once

#include <algorithm>

#include "curves.h"
#include "quantize.h"

namespace mesa_tune::cpu {

// (x - mean) * rstd of elements [index, index + n). Element i uses statistic i / inner % count.
MESA_TUNE_INLINE void normalize(const Map& map, const float* values, int64_t index, int64_t n, float* out) {
  int64_t statistic = index / map.inner % map.count, remaining = map.inner - index % map.inner;
  while (n > 0) {
    const int64_t count = std::min(n, map.inner == 1 ? map.count - statistic : remaining);
    const float mean = map.mean == nullptr ? 0.0f : map.mean[statistic], rstd = map.rstd[statistic];
    if (map.inner > 1) {
      for (int64_t i = 0; i < count; ++i) out[i] = (values[i] - mean) * rstd;
    } else {
      for (int64_t i = 0; i < count; ++i)
        out[i] =
            (values[i] - (map.mean == nullptr ? 0.0f : map.mean[statistic + i])) * map.rstd[statistic + i];
    }
    values += count, out += count, n -= count, remaining = map.inner;
    statistic = map.inner == 1 || statistic + 1 == map.count ? 0 : statistic + 1;
  }
}

// Elements [index, index + n) as they are encoded: `values` itself without a map, else in `out`.
MESA_TUNE_INLINE const float* mapped(const Map& map, const float* values, int64_t index, int64_t n,
                                     float* out) {
  switch (map.kind) {
    case Map::kNone:
      return values;
    case Map::kNormalize:
      normalize(map, values, index, n, out);
      break;
    case Map::kGelu:
      for (int64_t i = 0; i < n; ++i) out[i] = gelu_derivative(values[i]);
      break;
    case Map::kGeluTanh:
      for (int64_t i = 0; i < n; ++i) out[i] = gelu_tanh_derivative(values[i]);
      break;
    case Map::kSilu:
      for (int64_t i = 0; i < n; ++i) out[i] = silu_derivative(values[i]);
      break;
    case Map::kExp:
      for (int64_t i = 0; i < n; ++i) out[i] = exp_derivative(values[i]);
      break;
    case Map::kDefinite:
      for (int64_t i = 0; i < n; ++i) out[i] = definite(values[i]);
      break;
  }
  return out;
}

}  // namespace mesa_tune::cpu
