// The ranges of groups as they are stored, on every device: two numbers of float32, or, of 16-bit elements,
// ends: the values of the lowest and the highest code, 16 bits each. What is hard is that the range must
// follow from the ends without loss, for groups with gaps (NaN or Inf) as well: these have the highest value
// first, and then -Inf if it is also the lowest.
#pragma once

#include "arithmetic.h"
#include "quantize.h"

namespace mesa_tune {

template <class Type>
constexpr uint16_t kLargest = 0x7F7F;
template <>
inline constexpr uint16_t kLargest<Half> = 0x7BFF;

template <class Type>
constexpr uint16_t kLowest = 0xFF80;  // -Inf
template <>
inline constexpr uint16_t kLowest<Half> = 0xFC00;

// Steps were rounded up; rounding to 16 bits makes the value of the highest code the greatest element again.
template <class Type>
MESA_TUNE_INLINE void to_ends(const Range& stored, int64_t levels, uint16_t* ends) {
  const bool gaps = stored.has_gaps();
  const Range range = stored.revealed();
  const float factor = range.wide() ? kQuarter : 1.0f, step = range.wide() ? -range.step : range.step;
  const float top = static_cast<float>(levels - 1 - gaps), largest = Type::load(kLargest<Type>);
  const float highest = (range.zero * factor + top * step) / factor;
  const uint16_t low = Type::store(range.zero), high = Type::store(highest > largest ? largest : highest);
  ends[0] = gaps ? high : low;
  ends[1] = !gaps ? high : Type::load(low) < Type::load(high) ? low : kLowest<Type>;
}

// Equal to the range that was stored, except for the last bit of the step.
template <class Type>
MESA_TUNE_INLINE Range from_ends(const uint16_t* ends, int64_t levels) {
  const float first = Type::load(ends[0]), second = Type::load(ends[1]);
  const bool gaps = first > second;
  const float low = gaps && ends[1] != kLowest<Type> ? second : first, high = gaps ? first : second;
  const float quarter = high * kQuarter - low * kQuarter;
  const float span = quarter > kWide ? -quarter : high - low;
  const Range range{low, span / static_cast<float>(levels - 1 - gaps)};
  return gaps ? range.hidden() : range;
}

// The range of a group. Ranges in float32, where there are any, are those that were measured; ends give them
// except for the last bit of the step.
MESA_TUNE_INLINE Range range_of(const Packed& packed, int64_t group, int64_t levels) {
  if (packed.ranges != nullptr) return {packed.ranges[2 * group], packed.ranges[2 * group + 1]};
  const uint16_t* ends = packed.ends + 2 * group;
  return packed.ends_dtype == Dtype::kHalf ? from_ends<Half>(ends, levels)
                                           : from_ends<BFloat16>(ends, levels);
}

// `kEnds`: whether there may be ends. A kernel for float32, which has none, would spill registers for them.
template <bool kEnds = true>
MESA_TUNE_INLINE void store_range(const Packed& packed, int64_t group, const Range& range, int64_t levels) {
  if (!kEnds || packed.ranges != nullptr) {
    packed.ranges[2 * group] = range.zero;
    packed.ranges[2 * group + 1] = range.step;
  }
  if (!kEnds || packed.ends == nullptr) return;
  uint16_t* ends = packed.ends + 2 * group;
  if (packed.ends_dtype == Dtype::kHalf) {
    to_ends<Half>(range, levels, ends);
  } else {
    to_ends<BFloat16>(range, levels, ends);
  }
}

}  // namespace mesa_tune
