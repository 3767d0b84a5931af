// What the kernels use of CUDA, on a host: each thread of a block is a fiber, and lanes that exchange values
// wait for each other. For tests of csrc/cuda where there is no GPU.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static  // blocks run one after the other
#define __launch_bounds__(...)
// So that threads take several turns, as they do on a GPU past some 10^8 of them.
#define MESA_TUNE_MAX_BLOCKS 2

struct dim3 {
  unsigned x = 1;
  dim3(unsigned x = 1) : x(x) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline dim3 gridDim, blockIdx, threadIdx;

namespace fibers {

constexpr int kWarp = 32;
constexpr size_t kStack = 1 << 16;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  bool done;
  int exchanges, barriers;
  uint64_t value;
};
inline std::vector<Fiber> block;
inline ucontext_t scheduler;
inline unsigned running;
inline std::function<void()> body;

inline void run() {
  body();
  block[running].done = true;
  swapcontext(&block[running].context, &scheduler);
}

inline void wait_for_others() {
  const unsigned me = running;
  swapcontext(&block[me].context, &scheduler);
  running = threadIdx.x = me;
}

inline void run_block(unsigned threads) {
  block.resize(threads);
  for (Fiber& fiber : block) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.done = false;
    fiber.exchanges = fiber.barriers = 0;
    makecontext(&fiber.context, run, 0);
  }
  for (bool busy = true; busy;) {
    busy = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (block[i].done) continue;
      running = threadIdx.x = i;
      swapcontext(&scheduler, &block[i].context);
      busy = true;
    }
  }
}

// The values of all lanes of the warp, which must all be at the same exchange.
inline std::vector<uint64_t> exchange(uint64_t value) {
  Fiber& own = block[running];
  own.value = value;
  ++own.exchanges;
  wait_for_others();
  const unsigned first = running / kWarp * kWarp;
  std::vector<uint64_t> values;
  for (unsigned i = first; i < first + kWarp; ++i) {
    if (block[i].exchanges != own.exchanges || block[i].done) {
      std::fprintf(stderr, "lanes %u and %u of a warp have parted\n", running, i);
      std::abort();
    }
    values.push_back(block[i].value);
  }
  wait_for_others();
  return values;
}

}  // namespace fibers

// Waits until all threads of the block are here.
inline void __syncthreads() {
  const int barrier = ++fibers::block[fibers::running].barriers;
  const auto is_missing = [&](const fibers::Fiber& fiber) { return fiber.barriers < barrier; };
  while (std::any_of(fibers::block.begin(), fibers::block.end(), is_missing)) {
    for (const fibers::Fiber& fiber : fibers::block) {
      if (!fiber.done || !is_missing(fiber)) continue;
      std::fprintf(stderr, "a thread of a block has ended before a barrier\n");
      std::abort();
    }
    fibers::wait_for_others();
  }
}

template <class Value>
Value __shfl_xor_sync(unsigned, Value value, int distance) {
  const unsigned lane = threadIdx.x % fibers::kWarp;
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  word = fibers::exchange(word)[lane ^ static_cast<unsigned>(distance)];
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

inline uint32_t __ballot_sync(unsigned, bool set) {
  const auto values = fibers::exchange(set);
  uint32_t bits = 0;
  for (int lane = 0; lane < fibers::kWarp; ++lane) bits |= static_cast<uint32_t>(values[lane]) << lane;
  return bits;
}

inline int __any_sync(unsigned lanes, bool set) {
  return __ballot_sync(lanes, set) != 0;
}

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return out;
}

inline uint32_t __float2uint_rz(float value) {
  return static_cast<uint32_t>(value);
}

inline uint32_t __float2uint_ru(float value) {
  return static_cast<uint32_t>(std::ceil(value));
}

inline void atomicMin(int32_t* address, int32_t value) {
  *address = std::min(*address, value);
}
inline void atomicMax(int32_t* address, int32_t value) {
  *address = std::max(*address, value);
}

inline void atomicOr(uint32_t* address, uint32_t bits) {
  *address |= bits;
}

template <class Integer>
void atomicAdd(Integer* address, Integer value) {
  *address += value;
}

inline int __popc(uint32_t bits) {
  return __builtin_popcount(bits);
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorNoKernelImageForDevice };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "";
}

inline cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  std::memset(address, value, bytes);
  return cudaSuccess;
}

inline int launches = 0;  // since the program began

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  ++launches;
  fibers::body = [&] { kernel(arguments...); };
  gridDim = config->gridDim;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) fibers::run_block(config->blockDim.x);
  return cudaSuccess;
}
