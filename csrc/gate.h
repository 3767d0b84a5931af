// Interface between the operators (gate.cpp) and their kernels (cpu/gate.cpp, cuda/gate.cu).
#pragma once

#include "quantize.h"

namespace mesa_tune {

// What is gated: `grad` and `out` are dense and of one dtype. A bit of `data` is that of `inner` neighbours.
struct Gate {
  Strided grad;
  const uint8_t* data;
  float slope;  // 0 gives 0 where the bit is set, even for NaN and Inf
  int64_t inner;
  Strided out;
};

namespace cpu {

// Packs one bit per element of the dense x: whether it is at most `limit`.
void pack_at_most(const Strided& x, float limit, uint8_t* data);
// Multiplies the gradient by the slope where the bit is set.
void gate(const Gate& task);

}  // namespace cpu

namespace cuda {

void pack_at_most(const Strided& x, float limit, uint8_t* data, void* stream);
void gate(const Gate& task, void* stream);

}  // namespace cuda
}  // namespace mesa_tune
