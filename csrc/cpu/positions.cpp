// The set bits of a bitmap as an Elias-Fano code: about 2 + log2(numel / count) bits for each.

#include "positions.h"

#include <algorithm>

#include "bits.h"

namespace mesa_tune::cpu {
namespace {

void set_bit(uint8_t* plane, int64_t index) {
  plane[index / 8] = static_cast<uint8_t>(plane[index / 8] | 1 << index % 8);
}

bool has_bit(const uint8_t* plane, int64_t index) {
  return (plane[index / 8] >> index % 8 & 1) != 0;
}

}  // namespace

int64_t pack_positions(const uint8_t* bitmap, const Positions& positions, uint8_t* data) {
  std::fill_n(data, positions.bytes(), uint8_t{0});
  uint8_t* high = data + positions.low_bytes();
  int64_t index = 0;
  for_each_bit(bitmap, plane_bytes(positions.numel), [&](int64_t position) {
    if (index < positions.count && position < positions.numel) {
      for (int64_t bit = 0; bit < positions.low; ++bit)
        if (position >> bit & 1) set_bit(data + bit * plane_bytes(positions.count), index);
      set_bit(high, (position >> positions.low) + index);
    }
    ++index;
  });
  return index;
}

int64_t unpack_positions(const uint8_t* data, const Positions& positions, uint8_t* bitmap) {
  std::fill_n(bitmap, plane_bytes(positions.numel), uint8_t{0});
  const uint8_t* high = data + positions.low_bytes();
  int64_t index = 0;
  for_each_bit(high, plane_bytes(positions.high_bits()), [&](int64_t bit) {
    if (index < positions.count) {
      int64_t position = (bit - index) << positions.low;
      for (int64_t low = 0; low < positions.low; ++low)
        position |= int64_t{has_bit(data + low * plane_bytes(positions.count), index)} << low;
      if (position < positions.numel) set_bit(bitmap, position);
    }
    ++index;
  });
  return index;
}

}  // namespace mesa_tune::cpu
