// Interface between the operator (choose_rows.cpp) and its CPU kernel (cpu/choose_rows.cpp).
#pragma once

#include <cstdint>

namespace mesa_tune::cpu {

// Writes the numbers of `count` of these rows, ascending, and 1 over the probability of each.
void choose_rows(const float* norms, int64_t rows, int64_t count, int64_t key, int32_t* index,
                 float* inverse);

}  // namespace mesa_tune::cpu
