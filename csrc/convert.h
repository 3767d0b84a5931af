// Conversion of float32 to and from the 16-bit types, to nearest, ties to even. On the CPU by integer
// arithmetic: it vectorizes with every instruction set, and it does not depend on how the processor is set to
// treat denormal numbers.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace mesa_tune {

template <class To, class From>
MESA_TUNE_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

struct Float {
  using Storage = float;
  static MESA_TUNE_INLINE float load(float value) { return value; }
  static MESA_TUNE_INLINE float store(float value) {
#ifdef __CUDA_ARCH__
    return value == value ? value : bit_cast<float>(0x7FC00000);  // the bits of NaN as on the CPU
#else
    return value;
#endif
  }
};

struct BFloat16 {
  using Storage = uint16_t;
  static MESA_TUNE_INLINE float load(uint16_t value) { return bit_cast<float>(uint32_t{value} << 16); }
  static MESA_TUNE_INLINE uint16_t store(float value) {
#ifdef __CUDA_ARCH__
    return value == value ? __bfloat16_as_ushort(__float2bfloat16_rn(value)) : uint16_t{0x7FC0};
#else
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
#endif
  }
};

struct Half {
  using Storage = uint16_t;
  static MESA_TUNE_INLINE float load(uint16_t value) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(value));  // exact, and one instruction
#else
    const uint32_t sign = uint32_t{value & 0x8000u} << 16;
    const uint32_t rest = uint32_t{value & 0x7FFFu} << 13;
    const uint32_t exponent = rest & (0x1Fu << 23);
    const uint32_t normal = rest + (exponent == (0x1Fu << 23) ? 224u << 23 : 112u << 23);
    // A denormal half is a multiple of 2^-24: with the exponent of 2^-14 it is 2^-14 too large.
    const float tiny = bit_cast<float>(rest + (113u << 23)) - bit_cast<float>(113u << 23);
    return bit_cast<float>(sign | (exponent == 0 ? bit_cast<uint32_t>(tiny) : normal));
#endif
  }
  static MESA_TUNE_INLINE uint16_t store(float value) {
#ifdef __CUDA_ARCH__
    return value == value ? __half_as_ushort(__float2half_rn(value)) : uint16_t{0x7E00};
#else
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t rest = bits & 0x7FFFFFFF;
    const uint32_t normal = (rest - (112u << 23) + 0xFFF + ((rest >> 13) & 1)) >> 13;
    // After adding 1/2, the lowest bit counts 2^-24, the step of denormal halves.
    const uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3F000000;
    uint32_t half = rest < 0x38800000 ? tiny : normal;
    half = rest >= 0x47800000 ? 0x7C00 : half;
    half = rest > 0x7F800000 ? 0x7E00 : half;
    return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
#endif
  }
};

}  // namespace mesa_tune
