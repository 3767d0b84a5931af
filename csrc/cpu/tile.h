// Copies elements of a group between a tensor of any dtype and strides and a small float32 buffer.
#pragma once

#include <algorithm>

#include "convert.h"
#include "quantize.h"

namespace mesa_tune::cpu {

// Groups of up to this many elements are processed whole, in the first-level cache; larger ones in tiles. A
// tile has kRun elements of each of the group's eight runs.
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

// True if elements can be read or written without a buffer: they are float32, and consecutive in memory.
inline bool direct(const Strided& x) {
  return x.dtype == Dtype::kFloat && x.layout.contiguous();
}

inline float* address(const Strided& x, int64_t group, int64_t index) {
  return static_cast<float*>(x.data) + group * x.layout.group_step + index;
}

// Elements [index, index + n) as float32: the tensor's own memory, or a copy in `buffer`.
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

// Rounds values to those that this dtype has.
MESA_TUNE_INLINE void round_to(Dtype dtype, float* values, int64_t n) {
  if (dtype == Dtype::kHalf) {
    for (int64_t i = 0; i < n; ++i) values[i] = Half::load(Half::store(values[i]));
  } else if (dtype == Dtype::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) values[i] = BFloat16::load(BFloat16::store(values[i]));
  }
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
