// Ranges of 16-bit tensors as ends, and back, on the CPU.

#include "ends.h"

#include "groups.h"
#include "quantize.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kElements = 64;  // a group takes about as long as so many elements take to copy

template <class Type>
void store(const float* ranges, int64_t groups, int64_t levels, uint16_t* ends) {
  parallel(groups, kElements, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      to_ends<Type>({ranges[2 * i], ranges[2 * i + 1]}, levels, ends + 2 * i);
  });
}

template <class Type>
void read(const uint16_t* ends, int64_t groups, int64_t levels, float* ranges) {
  parallel(groups, kElements, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const Range range = from_ends<Type>(ends + 2 * i, levels);
      ranges[2 * i] = range.zero;
      ranges[2 * i + 1] = range.step;
    }
  });
}

}  // namespace

void store_ends(const float* ranges, int64_t groups, int64_t levels, Dtype dtype, uint16_t* ends) {
  (dtype == Dtype::kHalf ? store<Half> : store<BFloat16>)(ranges, groups, levels, ends);
}

void read_ends(const uint16_t* ends, int64_t groups, int64_t levels, Dtype dtype, float* ranges) {
  (dtype == Dtype::kHalf ? read<Half> : read<BFloat16>)(ends, groups, levels, ranges);
}

}  // namespace mesa_tune::cpu
