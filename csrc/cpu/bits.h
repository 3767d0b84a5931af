// Eight bytes that are 0 or 1 as the bits of one, the first the lowest.
#pragma once

#include <cstdint>
#include <cstring>

#include "paths.h"

namespace mesa_tune::cpu {

MESA_TUNE_INLINE uint8_t gather_bits(const uint8_t* bytes) {
  constexpr uint64_t gather = 0x0102040810204080;  // brings their low bits into the top byte
  uint64_t word;
  std::memcpy(&word, bytes, 8);
  return static_cast<uint8_t>((word * gather) >> 56);
}

// Eight bits as bytes that are 0 or 1.
MESA_TUNE_INLINE void spread_bits(uint8_t bits, uint8_t* bytes) {
  constexpr uint64_t every = 0x0101010101010101;     // a byte into all eight
  constexpr uint64_t diagonal = 0x8040201008040201;  // bit i of byte i
  const uint64_t word = (((bits * every & diagonal) + 0x7F * every) >> 7) & every;
  std::memcpy(bytes, &word, 8);
}

MESA_TUNE_INLINE void pack(const uint8_t* __restrict mask, uint8_t* __restrict data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) data[i] = gather_bits(mask + 8 * i);
}

MESA_TUNE_INLINE void unpack(const uint8_t* __restrict data, uint8_t* __restrict mask, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) spread_bits(data[i], mask + 8 * i);
}

}  // namespace mesa_tune::cpu
