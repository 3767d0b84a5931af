// A dense array of any dtype, whose elements are float32 where they are used.
#pragma once

#include "convert.h"
#include "quantize.h"

namespace mesa_tune {

struct Numbers {
  void* data;
  Dtype dtype;

  float* floats() const { return static_cast<float*>(data); }

  MESA_TUNE_INLINE float load(int64_t i) const {
    const auto* words = static_cast<const uint16_t*>(data);
    if (dtype == Dtype::kFloat) return static_cast<const float*>(data)[i];
    return dtype == Dtype::kHalf ? Half::load(words[i]) : BFloat16::load(words[i]);
  }
  MESA_TUNE_INLINE void store(int64_t i, float value) const {
    auto* words = static_cast<uint16_t*>(data);
    if (dtype == Dtype::kFloat) {
      static_cast<float*>(data)[i] = value;
    } else {
      words[i] = dtype == Dtype::kHalf ? Half::store(value) : BFloat16::store(value);
    }
  }
};

}  // namespace mesa_tune
