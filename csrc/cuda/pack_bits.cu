// Bool masks at one bit an element on CUDA devices, at any alignment.

#include <cstring>

#include "launch.cuh"
#include "quantize.h"

namespace mesa_tune::cuda {
namespace {

constexpr uint64_t kSpread = 0x0101010101010101;    // a byte into all eight
constexpr uint64_t kDiagonal = 0x8040201008040201;  // bit i of byte i

// A warp gathers 32 words of 32 elements, and each of its lanes keeps one.
__global__ void pack(const uint8_t* mask, int64_t numel, uint8_t* data) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t turn = thread_number(); (turn & -kWarp) * kWarp < numel; turn += thread_count()) {
    const int64_t first = (turn & -kWarp) * kWarp;
    uint32_t kept = 0;
#pragma unroll
    for (int word = 0; word < kWarp; ++word) {
      const int64_t element = first + word * kWarp + lane;
      const uint32_t bits = __ballot_sync(kAllLanes, element < numel && mask[element] != 0);
      if (lane == word) kept = bits;
    }
    const int64_t byte = turn * 4, bytes = (numel + 7) / 8;
    for (int i = 0; i < 4; ++i)
      if (byte + i < bytes) data[byte + i] = static_cast<uint8_t>(kept >> (8 * i));
  }
}

// A thread a byte.
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

// `mask` is new memory, and so aligned.
void unpack_bits(const uint8_t* data, int64_t numel, uint8_t* mask, void* stream) {
  launch(unpack, (numel + 7) / 8, stream, data, numel, mask);
}

}  // namespace mesa_tune::cuda
