// Sums over the threads of a block, always added in the same order.
#pragma once

#include "launch.cuh"

namespace mesa_tune::cuda {

template <class Number>
struct BlockSums {
  Number before;  // of the values of the threads before this one; exact only for integers
  Number total;   // of all threads
};

// All threads of the block must call it.
template <class Number>
__device__ inline BlockSums<Number> block_sums(Number value) {
  __shared__ Number sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = value;
  for (int distance = 1; distance < kThreads; distance *= 2) {
    __syncthreads();
    const Number other = thread >= distance ? sums[thread - distance] : Number{0};
    __syncthreads();
    sums[thread] += other;
  }
  __syncthreads();
  const BlockSums<Number> result{sums[thread] - value, sums[kThreads - 1]};
  __syncthreads();  // the next call writes again
  return result;
}

}  // namespace mesa_tune::cuda
