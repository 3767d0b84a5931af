// Decodes one column of a group: the up to eight elements whose codes share bytes.
#pragma once

#include "planes.cuh"
#include "quantize.h"
#include "rounding.cuh"

namespace mesa_tune::cuda {

class Column {
 public:
  // `byte`: that of the column in the first plane; `plane`: bytes of a plane.
  __device__ Column(const uint8_t* byte, int64_t plane, const Settings& s, const Range& stored)
      : value_(stored), gap_(static_cast<int>(stored.has_gaps() ? s.levels - 1 : s.levels)) {
    uint64_t bytes = 0;
    for (int i = 0; i < s.bits; ++i) bytes |= uint64_t{byte[i * plane]} << (8 * i);
    codes_ = transposed(bytes);
  }

  // The element of run 0 to 7.
  __device__ float operator()(int run) const {
    const int code = static_cast<int>(codes_ >> (8 * run)) & 0xFF;
    return code == gap_ ? bit_cast<float>(kNan) : value_(code);
  }

 private:
  Values value_;
  uint64_t codes_;
  int gap_;  // the code of NaN, or no code
};

}  // namespace mesa_tune::cuda
