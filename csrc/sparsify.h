// Interface between the operators (sparsify.cpp) and their kernels (cpu/sparsify.cpp, cuda/sparsify.cu).
// Elements are floats of `width` bytes; their magnitudes are compared as integers, the bits without the sign.
#pragma once

#include <cstdint>

#include "inline.h"

namespace mesa_tune {

template <class U>
MESA_TUNE_INLINE U magnitude(U bits) {
  return static_cast<U>(bits & (static_cast<U>(~U{0}) >> 1));
}

// The smallest magnitude that survives.
struct Threshold {
  uint64_t value;
  int64_t equal;  // number of survivors of exactly this magnitude
};

namespace cpu {

// Writes a bitmap of the `count` elements with the largest magnitudes, and these elements in order.
void sparsify(const void* x, int64_t width, int64_t numel, int64_t count, uint8_t* bitmap, void* survivors);

// Returns the number of bits set; writes `out` only if it is `count`.
int64_t densify(const uint8_t* bitmap, const void* survivors, int64_t width, int64_t numel, int64_t count,
                void* out);

}  // namespace cpu

// The same on the current device; `stream` is a cudaStream_t. `memory` has as many numbers as the function
// before says.
namespace cuda {

int64_t sparsify_memory(int64_t width, int64_t numel);
void sparsify(const void* x, int64_t width, int64_t numel, int64_t count, uint8_t* bitmap, void* survivors,
              int64_t* memory, void* stream);

// A number of bits set that is not `count` fails an assertion on the device.
int64_t densify_memory(int64_t numel);
void densify(const uint8_t* bitmap, const void* survivors, int64_t width, int64_t numel, int64_t count,
             void* out, int64_t* memory, void* stream);

}  // namespace cuda
}  // namespace mesa_tune
