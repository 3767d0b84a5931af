// Packs masks, one byte of 0 or 1 per element, into one bit per element, and back. The first element is in
// the lowest bit.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "paths.h"

namespace mesa_tune::cpu {

// Eight bytes that are 0 or 1 as the bits of one byte.
MESA_TUNE_INLINE uint8_t gather_bits(const uint8_t* bytes) {
  constexpr uint64_t gather = 0x0102040810204080;  // moves the low bit of each byte into the top byte
  uint64_t word;
  std::memcpy(&word, bytes, 8);
  return static_cast<uint8_t>((word * gather) >> 56);
}

// The bits of one byte as eight bytes that are 0 or 1.
MESA_TUNE_INLINE void spread_bits(uint8_t bits, uint8_t* bytes) {
  constexpr uint64_t spread = 0x0101010101010101;    // copies a byte into all eight bytes
  constexpr uint64_t diagonal = 0x8040201008040201;  // bit i of byte i
  const uint64_t word = (((bits * spread & diagonal) + 0x7F * spread) >> 7) & spread;
  std::memcpy(bytes, &word, 8);
}

MESA_TUNE_INLINE void pack(const uint8_t* __restrict mask, uint8_t* __restrict data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) data[i] = gather_bits(mask + 8 * i);
}

MESA_TUNE_INLINE void unpack(const uint8_t* __restrict data, uint8_t* __restrict mask, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) spread_bits(data[i], mask + 8 * i);
}

// Calls visit(i) for each bit i that is set, in order.
template <class Visit>
MESA_TUNE_INLINE void for_each_bit(const uint8_t* bitmap, int64_t bytes, const Visit& visit) {
  for (int64_t byte = 0; byte < bytes; ++byte)
    for (unsigned bits = bitmap[byte]; bits != 0; bits &= bits - 1) visit(8 * byte + std::countr_zero(bits));
}

}  // namespace mesa_tune::cpu
