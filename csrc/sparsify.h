// What the dispatcher's side (sparsify.cpp) asks of a device's kernels. Numbers are `width` bytes wide, and
// their magnitude is what their bits say without the sign.
#pragma once

#include <cstdint>

namespace mesa_tune::cpu {

void sparsify(const void* x, int64_t width, int64_t numel, int64_t count, uint8_t* bitmap, void* survivors);

// The number of bits set; writes `out` only if there are `count`.
int64_t densify(const uint8_t* bitmap, const void* survivors, int64_t width, int64_t numel, int64_t count,
                void* out);

}  // namespace mesa_tune::cpu
