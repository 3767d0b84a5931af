// What is encoded in place of the elements themselves: a function of each, made in the first-level cache.
#pragma once

#include <algorithm>

#include "curves.h"
#include "quantize.h"

namespace mesa_tune::cpu {

// (x - mean) * rstd; `inner` neighbours share a mean and a deviation, of which there are `count`, in turn.
MESA_TUNE_INLINE void normalize(const Map& map, const float* values, int64_t index, int64_t n, float* out) {
  int64_t at = index / map.inner % map.count, left = map.inner - index % map.inner;
  while (n > 0) {
    const int64_t here = std::min(n, map.inner == 1 ? map.count - at : left);
    const float mean = map.mean == nullptr ? 0.0f : map.mean[at], rstd = map.rstd[at];
    if (map.inner > 1) {
      for (int64_t i = 0; i < here; ++i) out[i] = (values[i] - mean) * rstd;
    } else {
      for (int64_t i = 0; i < here; ++i)
        out[i] = (values[i] - (map.mean == nullptr ? 0.0f : map.mean[at + i])) * map.rstd[at + i];
    }
    values += here, out += here, n -= here, left = map.inner;
    at = map.inner == 1 || at + 1 == map.count ? 0 : at + 1;
  }
}

// Elements [index, index + n) as they are encoded: in `out`, or `values` itself where nothing is to be done.
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
