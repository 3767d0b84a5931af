// The set bits of a bitmap as an Elias-Fano code on CUDA devices (positions.h). The bits of the code and of
// the bitmap are set one by one, by atomics whose order does not matter.

#include "positions.h"
#include "ranks.cuh"

namespace mesa_tune::cuda {
namespace {

// Sets a bit of bytes at any address. A word that reaches beyond them is still in their allocation.
__device__ inline void set_bit(uint8_t* bytes, int64_t bit) {
  const auto address = reinterpret_cast<uintptr_t>(bytes + bit / 8);
  atomicOr(reinterpret_cast<uint32_t*>(address & ~uintptr_t{3}), 1u << (8 * (address & 3) + bit % 8));
}

__global__ void write_code(const uint8_t* bitmap, const Positions positions, const int64_t* before,
                           uint8_t* data) {
  for_each_bit(bitmap, positions.numel, before, positions.count,
               [&](int64_t position, bool set, int64_t index) {
                 if (!set) return;
                 for (int64_t low = 0; low < positions.low; ++low)
                   if (position >> low & 1) set_bit(data + low * plane_bytes(positions.count), index);
                 set_bit(data + positions.low_bytes(), (position >> positions.low) + index);
               });
}

__global__ void write_bitmap(const uint8_t* data, const Positions positions, const int64_t* before,
                             uint8_t* bitmap) {
  const uint8_t* high = data + positions.low_bytes();
  for_each_bit(
      high, positions.high_bits(), before, positions.count, [&](int64_t bit, bool set, int64_t index) {
        if (!set) return;
        int64_t position = (bit - index) << positions.low;
        for (int64_t low = 0; low < positions.low; ++low)
          position |= int64_t{is_set(data + low * plane_bytes(positions.count), positions.count, index)}
                      << low;
        if (position < positions.numel) set_bit(bitmap, position);
      });
}

void clear(uint8_t* data, int64_t bytes, void* stream) {
  check(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
}

}  // namespace

int64_t positions_memory(const Positions& positions) {
  return portions_of(std::max(positions.numel, positions.high_bits()));
}

void pack_positions(const uint8_t* bitmap, const Positions& positions, uint8_t* data, int64_t* memory,
                    void* stream) {
  clear(data, positions.bytes(), stream);
  rank_portions(bitmap, positions.numel, memory, stream);
  launch(write_code, portions_of(positions.numel) * kWarp, stream, bitmap, positions, memory, data);
}

void unpack_positions(const uint8_t* data, const Positions& positions, uint8_t* bitmap, int64_t* memory,
                      void* stream) {
  clear(bitmap, plane_bytes(positions.numel), stream);
  rank_portions(data + positions.low_bytes(), positions.high_bits(), memory, stream);
  launch(write_bitmap, portions_of(positions.high_bits()) * kWarp, stream, data, positions, memory, bitmap);
}

}  // namespace mesa_tune::cuda
