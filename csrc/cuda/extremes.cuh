// Smallest and largest of numbers as they lie in memory, those of 16 bits in pairs; NaN if one of them is.
#pragma once

#include <cuda_runtime.h>

#include "arithmetic.h"
#include "launch.cuh"

namespace mesa_tune::cuda {

template <class Type>
constexpr bool kPairs = sizeof(typename Type::Storage) == 2;

// Number `i`, 0 or 1, of a word.
template <class Type>
__device__ inline float number_of(uint32_t word, int i) {
  if constexpr (kPairs<Type>) {
    return Type::load(static_cast<uint16_t>(word >> (16 * i)));
  } else {
    return bit_cast<float>(word);
  }
}

#ifdef __CUDA_ARCH__

__device__ inline uint32_t lesser(Float, uint32_t a, uint32_t b) {
  float found;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(bit_cast<float>(a)), "f"(bit_cast<float>(b)));
  return bit_cast<uint32_t>(found);
}
__device__ inline uint32_t greater(Float, uint32_t a, uint32_t b) {
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(bit_cast<float>(a)), "f"(bit_cast<float>(b)));
  return bit_cast<uint32_t>(found);
}
__device__ inline uint32_t lesser(Half, uint32_t a, uint32_t b) {
  asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline uint32_t greater(Half, uint32_t a, uint32_t b) {
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline uint32_t lesser(BFloat16, uint32_t a, uint32_t b) {
  asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline uint32_t greater(BFloat16, uint32_t a, uint32_t b) {
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

#else  // the same for hosts, which test these kernels

template <class Type>
uint32_t lesser(Type, uint32_t a, uint32_t b) {
  uint32_t found = 0;
  for (int i = 0; i <= kPairs<Type>; ++i) {
    const float one = number_of<Type>(a, i), two = number_of<Type>(b, i);
    const uint32_t from = one < two || one != one ? a : b;
    found |= kPairs<Type> ? from & 0xFFFFu << (16 * i) : from;
  }
  return found;
}
template <class Type>
uint32_t greater(Type type, uint32_t a, uint32_t b) {
  constexpr uint32_t signs = kPairs<Type> ? 0x80008000 : 0x80000000;
  return lesser(type, a ^ signs, b ^ signs) ^ signs;
}

#endif

// What the lane at this distance has found.
__device__ inline Extremes of_lane(const Extremes& own, int distance) {
  const int low = __shfl_xor_sync(kAllLanes, own.low, distance);
  const int high = __shfl_xor_sync(kAllLanes, own.high, distance);
  return {low, high};
}

// Of the numbers in the smallest and the largest words.
template <class Type>
__device__ inline Extremes extremes_within(uint32_t low, uint32_t high) {
  if constexpr (kPairs<Type>) {
    low = lesser(Type(), low, low >> 16 | low << 16);
    high = greater(Type(), high, high >> 16 | high << 16);
  }
  return {Extremes::ordered(number_of<Type>(low, 0)), Extremes::ordered(number_of<Type>(high, 0))};
}

}  // namespace mesa_tune::cuda
