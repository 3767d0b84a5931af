// Offsets of a group's elements in a tensor of any shape and strides.
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

// Integer quotient of two non-negative numbers. A GPU divides 64-bit numbers many times slower than 32-bit
// ones.
MESA_TUNE_INLINE int64_t quotient(int64_t a, int64_t b) {
#ifdef __CUDA_ARCH__
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
#endif
  return a / b;
}

// The offset of element i of group g is g * group_step plus the offset of i in row-major order over the axes.
// For groups of consecutive elements the axes are those of the whole tensor, group_step and g are 0, and i
// counts the elements of the tensor.
class Layout {
 public:
  // Adds an axis. Drops it if its size is 1; merges it with the last one if together they have one stride.
  void append(int64_t size, int64_t stride) {
    if (size == 1) return;
    if (count_ > 0 && axes_[count_ - 1].stride == size * stride) {
      axes_[count_ - 1] = {axes_[count_ - 1].size * size, stride};
      return;
    }
    axes_[count_++] = {size, stride};
  }

  // True if consecutive elements of a group are consecutive in memory.
  bool contiguous() const { return count_ == 0 || (count_ == 1 && axes_[0].stride == 1); }

  // Calls visit(offset, stride, count) for elements [index, index + n), once per row of the last axis.
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

  // The offset of one element.
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

  // Fewer than 2^63 elements have fewer than 64 axes of size 2 or more.
  Axis axes_[64] = {};
  int count_ = 0;
};

// The layout of a tensor for these settings. `Sizes`: any type that is indexed by the dimension.
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
