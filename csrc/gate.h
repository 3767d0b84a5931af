// What the dispatcher's side (gate.cpp) asks of the CPU's kernels.
#pragma once

#include <cstdint>

namespace mesa_tune::cpu {

// One bit an element: whether it is at most `limit`.
void pack_at_most(const float* x, int64_t numel, float limit, uint8_t* data);
// `slope` times the gradient where the bit is set, 0 if that is 0; else the gradient.
void gate(const float* grad, const uint8_t* data, int64_t numel, float slope, float* out);

}  // namespace mesa_tune::cpu
