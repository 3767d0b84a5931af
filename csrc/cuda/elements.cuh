// Decodes groups of consecutive elements, for kernels that use each element as soon as it is decoded: single
// elements, or columns. Neighbouring lanes read neighbouring bytes.
#pragma once

#include "column.cuh"
#include "launch.cuh"
#include "quantize.h"
#include "ranges.h"
#include "rounding.cuh"

namespace mesa_tune::cuda {

// What was packed.
struct Elements {
  Packed packed;
  Settings settings;
  Split parts;
};

// Reads elements at a fixed distance from each other.
class Reader {
 public:
  __device__ Reader(const Elements& elements, int64_t first, int64_t distance)
      : elements_(elements),
        group_(quotient(first, elements.settings.group_size)),
        groups_(quotient(distance, elements.settings.group_size)) {
    index_ = first - group_ * elements.settings.group_size;
    rest_ = distance - groups_ * elements.settings.group_size;
  }

  __device__ void advance() {
    group_ += groups_;
    index_ += rest_;
    if (index_ < elements_.settings.group_size) return;
    index_ -= elements_.settings.group_size;
    ++group_;
  }

  __device__ float value() {
    const Settings& s = elements_.settings;
    const Span& span = group_ < elements_.parts.whole.count ? elements_.parts.whole : elements_.parts.rest;
    const int64_t plane = span.plane(), run = quotient(index_, plane);
    const uint8_t* byte =
        elements_.packed.data + span.byte + (group_ - span.first) * s.bits * plane + (index_ - run * plane);
    uint32_t code = 0;
    for (int i = 0; i < s.bits; ++i, byte += plane) code |= (*byte >> run & 1u) << i;
    if (group_ != group_of_range_) {
      range_ = range_of(elements_.packed, group_, s.levels);
      group_of_range_ = group_;
    }
    if (range_.has_gaps() && code == static_cast<uint32_t>(s.levels - 1)) return bit_cast<float>(kNan);
    return Values(range_)(code);
  }

 private:
  const Elements& elements_;
  int64_t group_, index_, groups_, rest_;
  int64_t group_of_range_ = -1;
  Range range_{};  // kept: from ends it takes a division
};

__device__ inline float value_of(const Elements& elements, int64_t element) {
  return Reader(elements, element, 0).value();
}

// The number of columns of all groups.
constexpr int64_t columns_of(const Split& parts) {
  return parts.whole.count * parts.whole.plane() + parts.rest.count * parts.rest.plane();
}

// Calls visit(element, value) for the elements of one of the columns, in ascending order.
template <class Visit>
__device__ inline void decode_column(const Elements& elements, int64_t turn, const Visit& visit) {
  const Settings& s = elements.settings;
  const int64_t columns = elements.parts.whole.count * elements.parts.whole.plane();
  const bool is_rest = turn >= columns;
  const Span& span = is_rest ? elements.parts.rest : elements.parts.whole;
  const int64_t index = is_rest ? turn - columns : turn, plane = span.plane();
  const int64_t number = quotient(index, plane), column = index - number * plane;
  const Column values(elements.packed.data + span.byte + number * s.bits * plane + column, plane, s,
                      range_of(elements.packed, span.first + number, s.levels));
  for (int run = 0; run < 8; ++run) {
    const int64_t element = run * plane + column;
    if (element < span.size) visit(span.element + number * span.size + element, values(run));
  }
}

// The sum of the lanes' values, in each lane: always added in the same order.
__device__ inline float warp_sum(float value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value += bit_cast<float>(__shfl_xor_sync(kAllLanes, bit_cast<uint32_t>(value), distance));
  return value;
}

}  // namespace mesa_tune::cuda
