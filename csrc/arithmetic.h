// Ranges, rounding noise and scaling of one group, for every device. What is hard is that they must give the
// bytes of mesa_tune/ops/reference/__init__.py: each operation and its order are the same there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "convert.h"

namespace mesa_tune {

constexpr float kQuarter = 0.25f;
constexpr float kWide = 0x1p124f;
constexpr float kSmallestStep = 0x1p-126f;
constexpr float kRoom =
    1.0f + 0x1p-15f;        // factor of a hidden step, so that no finite element gets the top code
constexpr int kHidden = 9;  // lower bits of the step that a hidden step loses
constexpr int32_t kNan = 0x7FC00000;
constexpr uint32_t kMix1 = 0x21F0AAAD, kMix2 = 0x735A2D97;
constexpr uint32_t kLane1 = 0x2545F491, kLane2 = 0x6A09E667, kCarry = 0x27D4EB2F;

MESA_TUNE_INLINE bool is_finite(float value) {
  return (bit_cast<uint32_t>(value) & 0x7F800000) != 0x7F800000;
}

// Minimum and maximum of some floats, as integers in the order of their bits. NaNs are beyond the infinities,
// so the extremes show whether all numbers were finite. The result does not depend on the order of elements.
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
    int32_t smallest = low, largest = high;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t key = ordered(values[i]);
      smallest = std::min(smallest, key);
      largest = std::max(largest, key);
    }
    low = smallest;
    high = largest;
  }
  MESA_TUNE_INLINE void include_finite(const float* values, int64_t n) {
    int32_t smallest = low, largest = high;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t key = ordered(values[i]);
      const bool finite = is_finite(values[i]);
      smallest = std::min(smallest, finite ? key : smallest);
      largest = std::max(largest, finite ? key : largest);
    }
    low = smallest;
    high = largest;
  }
  MESA_TUNE_INLINE void include(const Extremes& other) {
    low = std::min(low, other.low);
    high = std::max(high, other.high);
  }
  MESA_TUNE_INLINE bool finite() const {
    constexpr int32_t infinity = 0x7F800000;
    return (high < infinity) & (low > ~infinity);
  }
  // Minimum and maximum as in PyTorch: NaN if one of the numbers is NaN. -0 becomes 0.
  MESA_TUNE_INLINE float minimum() const { return has_nan() ? bit_cast<float>(kNan) : value(low) + 0.0f; }
  MESA_TUNE_INLINE float maximum() const { return has_nan() ? bit_cast<float>(kNan) : value(high) + 0.0f; }
  MESA_TUNE_INLINE bool has_nan() const {
    constexpr int32_t infinity = 0x7F800000;
    return (high > infinity) | (low < ~infinity);
  }
  MESA_TUNE_INLINE bool empty() const { return low > high; }
};

// The two stored numbers of a group: the value of code 0, and the step between codes. Of a range too wide for
// fp32, a quarter of the step is stored, negated. A group with gaps (NaN or Inf) stores the range of its
// finite elements, with the step hidden in the bits of a NaN. If no finite element can be stored, both
// numbers are NaN.
struct Range {
  float zero;
  float step;

  MESA_TUNE_INLINE bool wide() const { return step < 0; }
  MESA_TUNE_INLINE bool valid() const { return step == step; }
  MESA_TUNE_INLINE bool plain() const { return step >= 0; }  // neither wide nor invalid
  MESA_TUNE_INLINE bool has_gaps() const { return !valid() && zero == zero; }
  // Hides the step: its upper bits, rounded up, in the payload of a NaN; the shift preserves the sign.
  MESA_TUNE_INLINE Range hidden() const {
    const int32_t bits = bit_cast<int32_t>(step * kRoom) + ((1 << kHidden) - 1);
    return {zero, bit_cast<float>(bits >> kHidden | kNan)};
  }
  MESA_TUNE_INLINE Range revealed() const {
    if (!has_gaps()) return *this;
    const uint32_t bits = bit_cast<uint32_t>(step);
    return {zero, bit_cast<float>((bits << kHidden & 0x7FFFFFFF) | (bits & 0x80000000))};
  }
};

// The range from minimum to maximum. Without branches, so that a loop over groups vectorizes.
MESA_TUNE_INLINE Range measure(const Extremes& extremes, int64_t levels) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const bool finite = extremes.finite();
  const float low = Extremes::value(extremes.low) + 0.0f;  // -0 becomes 0
  const float high = Extremes::value(extremes.high);
  const bool wide = high * kQuarter - low * kQuarter > kWide;
  const float factor = wide ? kQuarter : 1.0f;
  const float base = low * factor, end = high * factor;
  const float span = end - base, top = static_cast<float>(levels - 1);
  const float even = span / top;
  float step = span > 0 ? (even > kSmallestStep ? even : kSmallestStep) : 0.0f;
  for (int attempt = 0; attempt < 4; ++attempt)
    step = bit_cast<float>(bit_cast<int32_t>(step) + (base + top * step < end ? 1 : 0));
  return {finite ? low : nan, finite ? (wide ? -step : step) : nan};
}

// The range of a group. If it has gaps, `extremes` are those of its finite elements, and the top code is
// reserved for the gaps; with two levels, the one remaining code is not enough for the finite elements.
MESA_TUNE_INLINE Range measure(const Extremes& extremes, int levels, bool gaps) {
  const Range range = measure(extremes, levels - gaps);
  if (!gaps) return range;
  if (extremes.empty() || levels == 2) return {bit_cast<float>(kNan), bit_cast<float>(kNan)};
  return range.hidden();
}

// A bijective hash.
MESA_TUNE_INLINE uint32_t mix(uint32_t h) {
  h = (h ^ (h >> 16)) * kMix1;
  h = (h ^ (h >> 15)) * kMix2;
  return h ^ (h >> 15);
}

// The two keys of the noise: a hash of the seed, or of seed, group number and stored range.
struct Keys {
  uint32_t counter_key = kLane1;
  uint32_t hash_key = kLane2;

  MESA_TUNE_INLINE void absorb(uint32_t word) {
    counter_key = mix(counter_key ^ word);
    hash_key = mix(hash_key ^ word);
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

// Elements i and i + kNoiseBlock / 2 of each block of this many elements share one counter.
constexpr uint32_t kNoiseBlock = 256;

template <class Integer>
MESA_TUNE_INLINE Integer pair_of(Integer element) {
  constexpr Integer half = kNoiseBlock / 2;
  return element / kNoiseBlock * half + element % half;
}

MESA_TUNE_INLINE bool takes_upper_noise(int64_t element) {
  return (element & (kNoiseBlock / 2)) != 0;
}

// The counter has 32 bits. The upper 32 bits of the pair's number select another sequence, by kCarry.
MESA_TUNE_INLINE uint32_t counter_of(int64_t element, const Keys& keys) {
  const auto pair = pair_of(static_cast<uint64_t>(element));
  return static_cast<uint32_t>(pair) + keys.counter_key + static_cast<uint32_t>(pair >> 32) * kCarry;
}

// 16 random bits for the first element of a pair in the lower half, and 16 for the second in the upper half.
MESA_TUNE_INLINE uint32_t noise(uint32_t counter, uint32_t key) {
  uint32_t h = (counter ^ (counter >> 16)) * kMix1 + key;
  h = (h ^ (h >> 15)) * kMix2;
  return h ^ (h >> 16);
}

// Maps values to positions from 0, code 0, to `top`, the top code. The position is 0 where the step is NaN.
struct Scale {
  float base, inverse, top;

  MESA_TUNE_INLINE Scale(const Range& range, int64_t levels)
      : top(range.valid() ? static_cast<float>(levels - 1) : 0.0f) {
    const float step = range.wide() ? -range.step : range.step;
    base = range.wide() ? range.zero * kQuarter : range.zero;
    inverse = step > 0 ? 1.0f / step : 0.0f;
  }
  MESA_TUNE_INLINE float position(float value) const {
    const float position = (value - base) * inverse;
#ifdef __CUDA_ARCH__
    return fminf(position, top);  // one instruction; also gives `top` where the position is NaN
#else
    return position < top ? position : top;
#endif
  }
};

}  // namespace mesa_tune
