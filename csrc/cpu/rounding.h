// Ranges, noise and rounding of one group. Each operation and its order are those of mesa_tune/reference.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "convert.h"

namespace mesa_tune::cpu {

constexpr float kQuarter = 0.25f;
constexpr float kWide = 0x1p124f;
constexpr float kSmallestStep = 0x1p-126f;
constexpr uint32_t kMix1 = 0x21F0AAAD, kMix2 = 0x735A2D97;
constexpr uint32_t kLane1 = 0x2545F491, kLane2 = 0x6A09E667, kCarry = 0x27D4EB2F;

// Smallest and largest of some floats, in the integer order of their bits: NaN of either sign lies outside
// the infinities, so extremes show whether all numbers were finite, and the order of elements never matters.
struct Extremes {
  int32_t low = std::numeric_limits<int32_t>::max();
  int32_t high = std::numeric_limits<int32_t>::min();

  static MESA_TUNE_INLINE int32_t ordered(float value) {
    const int32_t bits = bit_cast<int32_t>(value);
    return bits ^ static_cast<int32_t>(static_cast<uint32_t>(bits >> 31) >> 1);
  }
  static MESA_TUNE_INLINE float value(int32_t key) {
    return bit_cast<float>(key ^ static_cast<int32_t>(static_cast<uint32_t>(key >> 31) >> 1));
  }
  MESA_TUNE_INLINE void include(const float* values, int64_t n) {
    int32_t least = low, most = high;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t key = ordered(values[i]);
      least = std::min(least, key);
      most = std::max(most, key);
    }
    low = least;
    high = most;
  }
  void include(const Extremes& other) {
    low = std::min(low, other.low);
    high = std::max(high, other.high);
  }
  MESA_TUNE_INLINE bool finite() const {
    constexpr int32_t infinity = 0x7F800000;
    return (high < infinity) & (low > ~infinity);
  }
};

// The two stored numbers of a group: the value of code 0, and the step between codes. A range too wide for
// fp32 has a quarter of its step, negated; one that holds NaN or Inf has NaN in both.
struct Range {
  float zero;
  float step;

  bool wide() const { return step < 0; }
  bool valid() const { return step == step; }
};

// Without branches, so that a loop over groups vectorizes.
MESA_TUNE_INLINE Range measure(const Extremes& extremes, int64_t levels) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const bool finite = extremes.finite();
  const float low = Extremes::value(extremes.low) + 0.0f;  // -0 and 0 are one minimum
  const float high = Extremes::value(extremes.high);
  const bool wide = high * kQuarter - low * kQuarter > kWide;
  const float factor = wide ? kQuarter : 1.0f;
  const float base = low * factor, end = high * factor;
  const float span = end - base, top = static_cast<float>(levels - 1);
  const float least = span / top > kSmallestStep ? span / top : kSmallestStep;
  float step = span > 0 ? least : 0.0f;
  for (int round = 0; round < 4; ++round)
    step = bit_cast<float>(bit_cast<int32_t>(step) + (base + top * step < end ? 1 : 0));
  return {finite ? low : nan, finite ? (wide ? -step : step) : nan};
}

MESA_TUNE_INLINE uint32_t mix(uint32_t h) {
  h = (h ^ (h >> 16)) * kMix1;
  h = (h ^ (h >> 15)) * kMix2;
  return h ^ (h >> 15);
}

struct Keys {
  uint32_t one = kLane1;
  uint32_t two = kLane2;

  MESA_TUNE_INLINE void absorb(uint32_t word) {
    one = mix(one ^ word);
    two = mix(two ^ word);
  }
  MESA_TUNE_INLINE void absorb(int64_t word) {
    absorb(static_cast<uint32_t>(word));
    absorb(static_cast<uint32_t>(word >> 32));
  }
  MESA_TUNE_INLINE Keys of_group(int64_t group, const Range& range) const {
    Keys keys = *this;
    keys.absorb(group);
    keys.absorb(bit_cast<uint32_t>(range.zero));
    keys.absorb(bit_cast<uint32_t>(range.step));
    return keys;
  }
};

// Uniform in [0, 1), a multiple of 2^-24.
MESA_TUNE_INLINE float noise(uint32_t counter, uint32_t key) {
  uint32_t h = (counter ^ (counter >> 16)) * kMix1 + key;
  h = (h ^ (h >> 15)) * kMix2;
  return static_cast<float>(static_cast<int32_t>(h >> 8)) * 0x1p-24f;
}

// Rounds values of one group to codes.
class Encoder {
 public:
  Encoder(const Range& range, int64_t levels, bool stochastic, const Keys& keys)
      : stochastic_(stochastic), keys_(keys), top_(static_cast<float>(levels - 1)) {
    const float step = range.wide() ? -range.step : range.step;
    base_ = range.wide() ? range.zero * kQuarter : range.zero;
    inverse_ = step > 0 ? 1.0f / step : 0.0f;
  }

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
  MESA_TUNE_INLINE float position(float value) const {
    const float position = (value - base_) * inverse_;
    return position < top_ ? position : top_;
  }
  MESA_TUNE_INLINE void encode_stochastic(const float* __restrict values, int64_t n, uint32_t counter,
                                          uint8_t* __restrict codes) const {
    for (int64_t i = 0; i < n; ++i, ++counter) {  // a counter of its own: vectors of 32 bits, not 64
      const float at = position(values[i]);
      const int32_t whole = static_cast<int32_t>(at);
      const bool up = at - static_cast<float>(whole) > noise(counter, keys_.two);
      codes[i] = static_cast<uint8_t>(whole + up);
    }
  }
  MESA_TUNE_INLINE void encode_nearest(const float* __restrict values, int64_t n,
                                       uint8_t* __restrict codes) const {
    for (int64_t i = 0; i < n; ++i) {
      const float at = position(values[i]);
      const int32_t whole = static_cast<int32_t>(at);
      codes[i] = static_cast<uint8_t>(whole + (at - static_cast<float>(whole) > 0.5f));
    }
  }

  bool stochastic_;
  Keys keys_;
  float base_, inverse_, top_;
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
