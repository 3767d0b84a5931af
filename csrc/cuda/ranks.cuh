// Ranks of the elements that are chosen, in portions: a warp takes one portion, 32 elements at a time. A
// launch counts what is chosen in each portion, and another sums these counts.
#pragma once

#include <algorithm>
#include <cassert>

#include "launch.cuh"
#include "sums.cuh"

namespace mesa_tune::cuda {

constexpr int64_t kPortion = 32 * kWarp;  // elements of which a warp writes the bits

inline int64_t portions_of(int64_t numel) {
  return (numel + kPortion - 1) / kPortion;
}

// Calls visit(portion) for all portions, one warp per portion.
template <class Visit>
__device__ inline void for_each_portion(int64_t numel, const Visit& visit) {
  for (int64_t turn = thread_number(); turn / kWarp * kPortion < numel; turn += thread_count())
    visit(turn / kWarp);
}

// Calls visit(word, element) for one element of each 32 of a portion; it may be past the last one.
template <class Visit>
__device__ inline void for_each_word(int64_t portion, const Visit& visit) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int word = 0; word < kPortion / kWarp; ++word) visit(word, portion * kPortion + word * kWarp + lane);
}

// The number of lanes before this one whose bit is set.
__device__ inline int lanes_before(uint32_t bits) {
  return __popc(bits & ((1u << threadIdx.x % kWarp) - 1));
}

// Replaces each count by the sum of those before it. One block per array of `size` counts.
static __global__ void sum_before(int64_t* counts, int64_t size) {
  int64_t* const own = counts + blockIdx.x * size;
  const int64_t share = (size + kThreads - 1) / kThreads;
  const int64_t begin = std::min(threadIdx.x * share, size), end = std::min(begin + share, size);
  int64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += own[i];
  sum = block_sums(sum).before;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t count = own[i];
    own[i] = sum;
    sum += count;
  }
}

__device__ inline bool is_set(const uint8_t* bitmap, int64_t numel, int64_t element) {
  return element < numel && (bitmap[element / 8] >> (element % 8) & 1);
}

static __global__ void count_bits(const uint8_t* bitmap, int64_t numel, int64_t* counts) {
  for_each_portion(numel, [&](int64_t portion) {
    int64_t count = 0;
    for_each_word(portion, [&](int, int64_t element) {
      count += __popc(__ballot_sync(kAllLanes, is_set(bitmap, numel, element)));
    });
    if (threadIdx.x % kWarp == 0) counts[portion] = count;
  });
}

// Calls visit(element, set, index) for each bit, with the number of those set before it, as `before` has
// them. Of more than `count` bits set the last ones count as not set.
template <class Visit>
__device__ inline void for_each_bit(const uint8_t* bitmap, int64_t numel, const int64_t* before,
                                    int64_t count, const Visit& visit) {
  for_each_portion(numel, [&](int64_t portion) {
    int64_t next = before[portion];
    for_each_word(portion, [&](int, int64_t element) {
      const bool set = is_set(bitmap, numel, element);
      const uint32_t bits = __ballot_sync(kAllLanes, set);
      const int64_t index = next + lanes_before(bits);
      if (element < numel) visit(element, set && index < count, index);
      next += __popc(bits);
    });
    assert((portion + 1) * kPortion < numel || next == count);
  });
}

// Writes to `before` the number of bits set before each portion.
inline void rank_portions(const uint8_t* bitmap, int64_t numel, int64_t* before, void* stream) {
  const int64_t portions = portions_of(numel);
  launch(count_bits, portions * kWarp, stream, bitmap, numel, before);
  launch(sum_before, portions > 0 ? kThreads : 0, stream, before, portions);
}

}  // namespace mesa_tune::cuda
