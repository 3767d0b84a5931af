// How kernels start, on torch's current stream, and how their threads share the work.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace mesa_tune::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFF;
constexpr int64_t kMostBlocks = 1 << 20;  // from there on, threads take several turns

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // told here, and not again by whoever asks next
  throw std::runtime_error(std::string("a CUDA kernel of mesa-tune did not start: ") +
                           cudaGetErrorString(error));
}

// Starts enough blocks for that many threads; none for none.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t threads, void* stream, Arguments&&... arguments) {
  if (threads == 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min((threads + kThreads - 1) / kThreads, kMostBlocks)));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// This thread's number, and how many there are: the work of its next turn lies that much further.
__device__ inline int64_t thread_number() {
  return int64_t{blockIdx.x} * kThreads + threadIdx.x;
}
__device__ inline int64_t thread_count() {
  return int64_t{gridDim.x} * kThreads;
}

}  // namespace mesa_tune::cuda
