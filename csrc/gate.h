// Interface between the operators (gate.cpp) and their CPU kernels (cpu/gate.cpp).
#pragma once

#include <cstdint>

namespace mesa_tune::cpu {

// Packs one bit per element: whether it is at most `limit`.
void pack_at_most(const float* x, int64_t numel, float limit, uint8_t* data);
// Multiplies the gradient by `slope` where the bit is set; slope 0 gives 0, even for NaN and Inf.
void gate(const float* grad, const uint8_t* data, int64_t numel, float slope, float* out);

}  // namespace mesa_tune::cpu
