// Interface between the operators (sparsify.cpp) and their CPU kernels (cpu/sparsify.cpp). Elements are
// floats of `width` bytes; their magnitudes are compared as integers, the bits without the sign.
#pragma once

#include <cstdint>

namespace mesa_tune::cpu {

// Writes a bitmap of the `count` elements with the largest magnitudes, and these elements in order.
void sparsify(const void* x, int64_t width, int64_t numel, int64_t count, uint8_t* bitmap, void* survivors);

// Returns the number of bits set; writes `out` only if it is `count`.
int64_t densify(const uint8_t* bitmap, const void* survivors, int64_t width, int64_t numel, int64_t count,
                void* out);

}  // namespace mesa_tune::cpu
