// Interface between the operators of levels.cpp and their CPU kernels (cpu/levels.cpp).
#pragma once

#include <cstdint>
#include <vector>

#include "quantize.h"

namespace mesa_tune {

constexpr int64_t kMostLevels = 16;  // 4 bits per element

// Bits per element of so many levels.
inline int64_t level_bits(size_t levels) {
  int64_t bits = 1;
  while (size_t{1} << bits < levels) ++bits;
  return bits;
}

namespace cpu {

// Writes the bit planes of the number of boundaries below each mapped element. Returns 0, or NaN if one of
// the mapped elements is not finite.
float pack_levels(const void* x, Dtype dtype, int64_t numel, const Map& map,
                  const std::vector<float>& boundaries, uint8_t* data);

// Writes the value of each element's level, rounded to `dtype`.
void unpack_levels(const uint8_t* data, int64_t numel, const std::vector<float>& values, Dtype dtype,
                   void* out);

}  // namespace cpu
}  // namespace mesa_tune
