// Offsets of a group's elements and codes, and the division of work among threads.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "ranges.h"
#include "tile.h"

namespace mesa_tune::cpu {

constexpr int64_t kGrain = 1 << 15;  // grain size of parallel_for: fewest elements per thread

// Index of the group's first element, and number of the group, in its Layout. Groups of consecutive elements
// are one group of the Layout, the whole tensor.
MESA_TUNE_INLINE int64_t first_index(const Settings& settings, const Span& span, int64_t group) {
  return settings.quant_groups > 0 ? 0 : span.element + (group - span.first) * span.size;
}

MESA_TUNE_INLINE int64_t layout_group(const Settings& settings, int64_t group) {
  return settings.quant_groups > 0 ? group : 0;
}

MESA_TUNE_INLINE uint8_t* planes_of(const Packed& packed, const Settings& settings, const Span& span,
                                    int64_t group) {
  return packed.data + span.byte + (group - span.first) * settings.bits * span.plane();
}

// a / b, rounded up.
constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Number of elements of one run in a tile of `columns` columns. `first_element`: index in the group of the
// run's first element in the tile. The last run of a group may be shorter than the others, or empty.
MESA_TUNE_INLINE int64_t run_length(const Span& span, int64_t first_element, int64_t columns) {
  return std::clamp<int64_t>(span.size - first_element, 0, columns);
}

// Calls work(begin, end) for ranges of items on several threads.
template <class Work>
void parallel(int64_t items, int64_t elements_per_item, const Work& work) {
  torch::stable::parallel_for(0, items, std::max<int64_t>(1, kGrain / elements_per_item), work);
}

}  // namespace mesa_tune::cpu
