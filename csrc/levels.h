// Interface between the operators of levels.cpp and the kernels of each device.
#pragma once

#include <cstdint>

#include "quantize.h"

namespace mesa_tune {

constexpr int kMostLevels = 16;  // 4 bits per element

// Boundaries between levels, or their values: `count` numbers, and the last one again. `planes`: bits per
// element.
struct FewLevels {
  float numbers[kMostLevels];
  int count;
  int planes;
};

namespace cpu {

// Writes the bit planes of the number of boundaries below each mapped element. Returns 0, or NaN if one of
// the mapped elements is not finite.
float pack_levels(const void* x, Dtype dtype, int64_t numel, const Map& map, const FewLevels& boundaries,
                  uint8_t* data);

// Writes the value of each element's level plus `offset`, rounded to `dtype`.
void unpack_levels(const uint8_t* data, float offset, int64_t numel, const FewLevels& values, Dtype dtype,
                   void* out);

}  // namespace cpu

// These run on the current device, as those of the CPU do; `offset` is there.
namespace cuda {

void pack_levels(const void* x, Dtype dtype, int64_t numel, const Map& map, const FewLevels& boundaries,
                 uint8_t* data, float* offset, void* stream);
void unpack_levels(const uint8_t* data, const float* offset, int64_t numel, const FewLevels& values,
                   Dtype dtype, void* out, void* stream);

}  // namespace cuda
}  // namespace mesa_tune
