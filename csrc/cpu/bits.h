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

}  // namespace mesa_tune::cpu
