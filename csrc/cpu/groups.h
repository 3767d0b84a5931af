// Where a group's elements, codes and ranges are, and what one thread takes at a time.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "arithmetic.h"
#include "tile.h"

namespace mesa_tune::cpu {

constexpr int64_t kGrain = 1 << 15;  // elements that are worth a thread

// Where elements of a group are in a layout's count: groups of consecutive elements count through the tensor.
MESA_TUNE_INLINE int64_t start(const Settings& settings, const Span& span, int64_t group) {
  return settings.quant_groups > 0 ? 0 : span.element + (group - span.first) * span.size;
}

MESA_TUNE_INLINE int64_t layout_group(const Settings& settings, int64_t group) {
  return settings.quant_groups > 0 ? group : 0;
}

MESA_TUNE_INLINE uint8_t* planes_of(const Packed& packed, const Settings& settings, const Span& span,
                                    int64_t group) {
  return packed.data + span.byte + (group - span.first) * settings.bits * span.plane();
}

MESA_TUNE_INLINE Range range_of(const Packed& packed, int64_t group) {
  return {packed.ranges[2 * group], packed.ranges[2 * group + 1]};
}

MESA_TUNE_INLINE void store_range(const Packed& packed, int64_t group, const Range& range) {
  packed.ranges[2 * group] = range.zero;
  packed.ranges[2 * group + 1] = range.step;
}

constexpr int64_t ceil_div(int64_t size, int64_t piece) {
  return (size + piece - 1) / piece;
}

// Elements of run `run` of a tile that begins at column `column`.
MESA_TUNE_INLINE int64_t run_length(const Span& span, int64_t first, int64_t columns) {
  return std::clamp<int64_t>(span.size - first, 0, columns);
}

template <class Work>
void parallel(int64_t count, int64_t elements_each, const Work& work) {
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, kGrain / elements_each), work);
}

}  // namespace mesa_tune::cpu
