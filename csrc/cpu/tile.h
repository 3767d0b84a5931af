// Moves elements of a group between a tensor and a small buffer of float32, whatever the tensor's dtype and
// strides.
#pragma once

#include <algorithm>

#include "convert.h"
#include "quantize.h"

namespace mesa_tune::cpu {

// Groups of up to this many elements are worked on whole, in the first-level cache; larger ones by tiles.
constexpr int64_t kTile = 4096;
constexpr int64_t kRun = kTile / 8;

template <class Type>
MESA_TUNE_INLINE void gather(const Strided& x, int64_t group, int64_t index, int64_t n, float* values) {
  const auto* data = static_cast<const typename Type::Storage*>(x.data);
  const auto run = [&](int64_t offset, int64_t stride, int64_t count) MESA_TUNE_FLATTEN {
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) values[i] = Type::load(data[offset + i]);
    } else {
      for (int64_t i = 0; i < count; ++i) values[i] = Type::load(data[offset + i * stride]);
    }
    values += count;
  };
  x.layout.for_each_run(group, index, n, run);
}

template <class Type>
MESA_TUNE_INLINE void scatter(const float* values, int64_t group, int64_t index, int64_t n,
                              const Strided& out) {
  auto* data = static_cast<typename Type::Storage*>(out.data);
  const auto run = [&](int64_t offset, int64_t stride, int64_t count) MESA_TUNE_FLATTEN {
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) data[offset + i] = Type::store(values[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) data[offset + i * stride] = Type::store(values[i]);
    }
    values += count;
  };
  out.layout.for_each_run(group, index, n, run);
}

// True if float32 neighbours can be read or written where they are.
inline bool direct(const Strided& x) {
  return x.dtype == Dtype::kFloat && x.layout.contiguous();
}

inline float* address(const Strided& x, int64_t group, int64_t index) {
  return static_cast<float*>(x.data) + group * x.layout.group_step + index;
}

// Elements [index, index + n) as float32: in `buffer`, or where they are.
MESA_TUNE_INLINE const float* load(const Strided& x, int64_t group, int64_t index, int64_t n, float* buffer) {
  if (direct(x)) return address(x, group, index);
  switch (x.dtype) {
    case Dtype::kFloat:
      gather<Float>(x, group, index, n, buffer);
      break;
    case Dtype::kHalf:
      gather<Half>(x, group, index, n, buffer);
      break;
    case Dtype::kBFloat16:
      gather<BFloat16>(x, group, index, n, buffer);
      break;
  }
  return buffer;
}

MESA_TUNE_INLINE void store(const float* values, int64_t group, int64_t index, int64_t n,
                            const Strided& out) {
  switch (out.dtype) {
    case Dtype::kFloat:
      return scatter<Float>(values, group, index, n, out);
    case Dtype::kHalf:
      return scatter<Half>(values, group, index, n, out);
    case Dtype::kBFloat16:
      return scatter<BFloat16>(values, group, index, n, out);
  }
}

}  // namespace mesa_tune::cpu
