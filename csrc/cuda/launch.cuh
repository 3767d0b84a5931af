// Launches kernels on torch's current stream, and divides their work among threads.
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

// For more work than that, each thread takes several turns.
#ifdef MESA_TUNE_MAX_BLOCKS
constexpr int64_t kMaxBlocks = MESA_TUNE_MAX_BLOCKS;
#else
constexpr int64_t kMaxBlocks = 1 << 20;
#endif

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that it is reported only once
  const bool is_old = error == cudaErrorNoKernelImageForDevice;
  throw std::runtime_error(std::string("a CUDA kernel of mesa-tune did not start: ") +
                           cudaGetErrorString(error) +
                           (is_old ? "\nset MESA_TUNE_REFERENCE=1: plain PyTorch runs on older cards" : ""));
}

// The blocks for this many threads.
inline int64_t blocks_for(int64_t threads) {
  return std::min((threads + kThreads - 1) / kThreads, kMaxBlocks);
}

template <class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), int64_t blocks, void* stream, Arguments&&... arguments) {
  if (blocks == 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// Launches enough blocks for this many threads; nothing for 0 threads.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t threads, void* stream, Arguments&&... arguments) {
  launch_blocks(kernel, blocks_for(threads), stream, arguments...);
}

// The index of this thread, which is its first turn, and the number of threads, the distance to its next
// turn.
__device__ inline int64_t thread_number() {
  return int64_t{blockIdx.x} * kThreads + threadIdx.x;
}
__device__ inline int64_t thread_count() {
  return int64_t{gridDim.x} * kThreads;
}

}  // namespace mesa_tune::cuda
