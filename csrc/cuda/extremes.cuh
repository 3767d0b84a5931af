// Minimum and maximum of numbers in words as they are in memory, so 16-bit numbers in pairs. The result is
// NaN if one of the numbers is NaN.
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

#if __CUDA_ARCH__ >= 800

__device__ inline uint32_t minimum(Float, uint32_t a, uint32_t b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(bit_cast<float>(a)), "f"(bit_cast<float>(b)));
  return bit_cast<uint32_t>(result);
}
__device__ inline uint32_t maximum(Float, uint32_t a, uint32_t b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(bit_cast<float>(a)), "f"(bit_cast<float>(b)));
  return bit_cast<uint32_t>(result);
}
__device__ inline uint32_t minimum(Half, uint32_t a, uint32_t b) {
  asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline uint32_t maximum(Half, uint32_t a, uint32_t b) {
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline uint32_t minimum(BFloat16, uint32_t a, uint32_t b) {
  asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ inline uint32_t maximum(BFloat16, uint32_t a, uint32_t b) {
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

#else  // the same in C++, for older GPUs, and for the tests that run these kernels on the host

template <class Type>
__device__ inline uint32_t minimum(Type, uint32_t a, uint32_t b) {
  const float x = number_of<Type>(a, 0), y = number_of<Type>(b, 0);
  const uint32_t low = x < y || x != x ? a : b;
  if constexpr (!kPairs<Type>) return low;
  const float z = number_of<Type>(a, 1), w = number_of<Type>(b, 1);
  const uint32_t high = z < w || z != z ? a : b;
  return (low & 0xFFFF) | (high & 0xFFFF0000);
}
template <class Type>
__device__ inline uint32_t maximum(Type type, uint32_t a, uint32_t b) {
  constexpr uint32_t signs = kPairs<Type> ? 0x80008000 : 0x80000000;
  return minimum(type, a ^ signs, b ^ signs) ^ signs;
}

#endif

// The extremes of the lane at this distance.
__device__ inline Extremes of_lane(const Extremes& extremes, int distance) {
  const int low = __shfl_xor_sync(kAllLanes, extremes.low, distance);
  const int high = __shfl_xor_sync(kAllLanes, extremes.high, distance);
  return {low, high};
}

// The extremes of all numbers, from the minima and the maxima of each half of the words.
template <class Type>
__device__ inline Extremes extremes_within(uint32_t low, uint32_t high) {
  if constexpr (kPairs<Type>) {
    low = minimum(Type(), low, low >> 16 | low << 16);
    high = maximum(Type(), high, high >> 16 | high << 16);
  }
  return {Extremes::ordered(number_of<Type>(low, 0)), Extremes::ordered(number_of<Type>(high, 0))};
}

}  // namespace mesa_tune::cuda
