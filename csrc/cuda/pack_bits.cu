// Bool masks in one bit per element on CUDA devices. The packed bytes may have any alignment.

#include <cstring>

#include "bits.cuh"
#include "quantize.h"

namespace mesa_tune::cuda {
namespace {

constexpr uint64_t kSpread = 0x0101010101010101;    // copies a byte into all eight bytes
constexpr uint64_t kDiagonal = 0x8040201008040201;  // bit i of byte i

__global__ void pack(const uint8_t* mask, int64_t numel, uint8_t* data) {
  pack_elements(numel, data, [&](int64_t element) { return mask[element] != 0; });
}

// One thread per byte.
__global__ void unpack(const uint8_t* data, int64_t numel, uint8_t* mask) {
  for (int64_t byte = thread_number(); byte * 8 < numel; byte += thread_count()) {
    const uint64_t bits = data[byte] * kSpread & kDiagonal;
    const uint64_t word = ((bits + 0x7F * kSpread) >> 7) & kSpread;
    if (byte * 8 + 8 <= numel) {
      reinterpret_cast<uint64_t*>(mask)[byte] = word;
    } else {
      for (int i = 0; byte * 8 + i < numel; ++i) mask[byte * 8 + i] = static_cast<uint8_t>(word >> (8 * i));
    }
  }
}

}  // namespace

void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* data, void* stream) {
  launch(pack, (numel + kWarp - 1) / kWarp, stream, mask, numel, data);
}

// `mask` is newly allocated, so it is aligned.
void unpack_bits(const uint8_t* data, int64_t numel, uint8_t* mask, void* stream) {
  launch(unpack, (numel + 7) / 8, stream, data, numel, mask);
}

}  // namespace mesa_tune::cuda
