// Bool masks in one bit per element, the first element in the lowest bit of the first byte.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bits.h"
#include "quantize.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kGrain = 1 << 15;  // grain size of parallel_for: fewest bytes of packed mask per thread

MESA_TUNE_PATHS(pack, (const uint8_t* mask, uint8_t* data, int64_t bytes), (mask, data, bytes))

MESA_TUNE_PATHS(unpack, (const uint8_t* data, uint8_t* mask, int64_t bytes), (data, mask, bytes))

}  // namespace

void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* data) {
  const int64_t whole = numel / 8;
  torch::stable::parallel_for(0, whole, kGrain, [&](int64_t from, int64_t to) {
    pack_paths[path()](mask + 8 * from, data + from, to - from);
  });
  if (numel % 8 > 0) {
    uint8_t last[8] = {};
    std::memcpy(last, mask + 8 * whole, static_cast<size_t>(numel % 8));
    pack_paths[0](last, data + whole, 1);
  }
}

void unpack_bits(const uint8_t* data, int64_t numel, uint8_t* mask) {
  const int64_t whole = numel / 8;
  torch::stable::parallel_for(0, whole, kGrain, [&](int64_t from, int64_t to) {
    unpack_paths[path()](data + from, mask + 8 * from, to - from);
  });
  if (numel % 8 > 0) {
    uint8_t last[8];
    unpack_paths[0](data + whole, last, 1);
    std::memcpy(mask + 8 * whole, last, static_cast<size_t>(numel % 8));
  }
}

}  // namespace mesa_tune::cpu
