// Rounds values of one group to codes and back.
#pragma once

#include "arithmetic.h"

namespace mesa_tune::cpu {

// Rounds values of one group to codes.
class Encoder {
 public:
  Encoder(const Range& range, int64_t levels, bool stochastic, const Keys& keys)
      : stochastic_(stochastic), keys_(keys), scale_(range, levels) {}

  // Elements [element, element + n) of the group, already quartered if its range is wide.
  MESA_TUNE_INLINE void encode(const float* values, int64_t n, int64_t element, uint8_t* codes) const {
    if (!stochastic_) return encode_nearest(values, n, codes);
    // The counter has 32 bits; where the element's number leaves them, the carry starts another sequence.
    while (n > 0) {
      const int64_t here = std::min(n, (int64_t{1} << 32) - (element & 0xFFFFFFFF));
      const auto low = static_cast<uint32_t>(element), high = static_cast<uint32_t>(element >> 32);
      encode_stochastic(values, here, low + keys_.one + high * kCarry, codes);
      values += here, codes += here, element += here, n -= here;
    }
  }

 private:
  MESA_TUNE_INLINE void encode_stochastic(const float* __restrict values, int64_t n, uint32_t counter,
                                          uint8_t* __restrict codes) const {
    for (int64_t i = 0; i < n; ++i, ++counter) {  // a counter of its own: vectors of 32 bits, not 64
      const float at = scale_.position(values[i]);
      const int32_t whole = static_cast<int32_t>(at);
      const bool up = at - static_cast<float>(whole) > noise(counter, keys_.two);
      codes[i] = static_cast<uint8_t>(whole + up);
    }
  }
  MESA_TUNE_INLINE void encode_nearest(const float* __restrict values, int64_t n,
                                       uint8_t* __restrict codes) const {
    for (int64_t i = 0; i < n; ++i) {
      const float at = scale_.position(values[i]);
      const int32_t whole = static_cast<int32_t>(at);
      codes[i] = static_cast<uint8_t>(whole + (at - static_cast<float>(whole) > 0.5f));
    }
  }

  bool stochastic_;
  Keys keys_;
  Scale scale_;
};

MESA_TUNE_INLINE void decode(const Range& range, const uint8_t* __restrict codes, int64_t n,
                             float* __restrict values) {
  const float zero = range.zero, step = range.step;
  for (int64_t i = 0; i < n; ++i) values[i] = zero + static_cast<float>(codes[i]) * step;
}

inline void decode_wide(const Range& range, const uint8_t* codes, int64_t n, float* values) {
  const float base = range.zero * kQuarter, step = -range.step;
  constexpr float most = std::numeric_limits<float>::max() * kQuarter;
  for (int64_t i = 0; i < n; ++i)
    values[i] = std::min(base + static_cast<float>(codes[i]) * step, most) / kQuarter;
}

}  // namespace mesa_tune::cpu
