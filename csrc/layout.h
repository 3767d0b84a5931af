// How the elements of a group lie in a tensor of any shape and strides.
#pragma once

#include <algorithm>
#include <cstdint>

#include "geometry.h"
#include "inline.h"

namespace mesa_tune {

struct Axis {
  int64_t size;
  int64_t stride;
};

// Whole quotient of numbers that are not negative. A GPU divides 64 bits many times slower than 32.
MESA_TUNE_INLINE int64_t quotient(int64_t a, int64_t b) {
#ifdef __CUDA_ARCH__
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
#endif
  return a / b;
}

// Element i of group g lies at g * group_step + the offset of i in row-major order over the axes. Groups of
// consecutive elements share one set of axes, the whole tensor's, and group_step is 0: i counts through.
class Layout {
 public:
  // Axes of size 1 are dropped and neighbours that lie like one axis are joined.
  void append(int64_t size, int64_t stride) {
    if (size == 1) return;
    if (count_ > 0 && axes_[count_ - 1].stride == size * stride) {
      axes_[count_ - 1] = {axes_[count_ - 1].size * size, stride};
      return;
    }
    axes_[count_++] = {size, stride};
  }

  // True if `n` elements from `index` on are neighbours in memory.
  bool contiguous() const { return count_ == 0 || (count_ == 1 && axes_[0].stride == 1); }

  // Calls visit(offset, stride, count) for each run along the last axis of elements [index, index + n).
  template <class Visit>
  inline __attribute__((always_inline)) void for_each_run(int64_t group, int64_t index, int64_t n,
                                                          const Visit& visit) const {
    const int64_t base = group * group_step;
    if (count_ == 0) return visit(base, 1, n);
    const Axis last = axes_[count_ - 1];
    int64_t row = count_ == 1 ? 0 : index / last.size;
    int64_t column = index - row * last.size;
    while (n > 0) {
      const int64_t count = std::min(n, last.size - column);
      visit(base + row_offset(row) + column * last.stride, last.stride, count);
      n -= count;
      column = 0;
      ++row;
    }
  }

  // Where one element lies.
  MESA_TUNE_INLINE int64_t offset(int64_t group, int64_t index) const {
    const int64_t base = group * group_step;
    if (count_ == 0) return base;
    const Axis last = axes_[count_ - 1];
    const int64_t row = quotient(index, last.size);
    return base + row_offset(row) + (index - row * last.size) * last.stride;
  }

  int64_t group_step = 0;

 private:
  MESA_TUNE_INLINE int64_t row_offset(int64_t row) const {
    int64_t offset = 0;
    for (int axis = count_ - 2; axis > 0 && row > 0; --axis) {
      const int64_t next = quotient(row, axes_[axis].size);
      offset += (row - next * axes_[axis].size) * axes_[axis].stride;
      row = next;
    }
    return count_ > 1 ? offset + row * axes_[0].stride : offset;
  }

  // Fewer than 2^63 elements cannot have more axes that are longer than 1.
  Axis axes_[64] = {};
  int count_ = 0;
};

// The layout of a tensor for these settings: `Sizes` is anything indexed by dimension.
template <class Sizes>
Layout make_layout(const Sizes& sizes, const Sizes& strides, int64_t dims, const Settings& s) {
  Layout layout;
  const int64_t grouped = s.quant_groups == 0 || dims == 0 ? -1 : dims == 4 || dims == 5 ? 1 : dims - 1;
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t size = d == grouped ? sizes[d] / s.quant_groups : sizes[d];
    if (d == grouped) layout.group_step = size * strides[d];
    layout.append(size, strides[d]);
  }
  return layout;
}

}  // namespace mesa_tune
