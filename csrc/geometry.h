// Sizes and offsets of a packed tensor, as in mesa_tune/ops/reference/__init__.py. All of it is in 64 bits:
// tensors may have more than 2^31 elements.
#pragma once

#include <cstdint>

namespace mesa_tune {

struct Settings {
  int64_t bits;
  int64_t levels;
  int64_t group_size;
  int64_t quant_groups;
};

// Bytes of one bit plane of a group of `size` elements; also the length of each of the group's eight runs.
constexpr int64_t plane_bytes(int64_t size) {
  return (size + 7) / 8;
}

// Consecutive groups of one size.
struct Span {
  int64_t first;    // number of the first group
  int64_t count;    // number of groups
  int64_t size;     // elements of each group
  int64_t element;  // index of the first group's first element, in packing order
  int64_t byte;     // offset of the first group's planes in the data

  constexpr int64_t plane() const { return plane_bytes(size); }
};

// The groups of a tensor: whole groups, and after them at most one partial group, the rest.
struct Split {
  Span whole;
  Span rest;

  constexpr int64_t groups() const { return whole.count + rest.count; }
  constexpr int64_t bytes(int64_t bits) const {
    return bits * (whole.count * whole.plane() + rest.count * rest.plane());
  }
};

constexpr Split split(int64_t numel, const Settings& s) {
  const bool fixed = s.quant_groups > 0;
  const int64_t count = fixed ? s.quant_groups : numel / s.group_size;
  const int64_t size = fixed ? numel / s.quant_groups : s.group_size;
  const int64_t rest = fixed ? 0 : numel % s.group_size;
  const int64_t rest_count = rest > 0 ? 1 : 0;
  return {{0, count, size, 0, 0},
          {count, rest_count, rest, count * size, s.bits * count * plane_bytes(size)}};
}

// More than 2^31 elements, groups, bytes, and elements of one group: checked without the memory for them.
constexpr int64_t kLarge = (int64_t{1} << 40) + 5;
static_assert(split(kLarge, {4, 16, 256, 0}).groups() == (int64_t{1} << 32) + 1);
static_assert(split(kLarge, {4, 16, 256, 0}).rest.element == int64_t{1} << 40);
static_assert(split(kLarge, {4, 16, 256, 0}).rest.byte == int64_t{1} << 39);
static_assert(split(kLarge, {4, 16, 256, 0}).bytes(4) == (int64_t{1} << 39) + 4);
static_assert(split(kLarge, {8, 256, kLarge + 1, 0}).rest.size == kLarge);
static_assert(split(kLarge - 5, {1, 2, 0, 2}).whole.plane() == int64_t{1} << 36);

}  // namespace mesa_tune
