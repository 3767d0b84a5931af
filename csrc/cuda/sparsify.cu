// The largest magnitudes of a tensor, and a bitmap of their indices, on CUDA devices. As on the CPU, a radix
// selection finds the threshold, and of the magnitudes equal to it the first in the tensor survive. A launch
// per digit counts the digits; its blocks first find the digit before, all the same one. Then three launches
// count the survivors of each portion, sum these counts, and write. Only integers are added by atomics, so
// chance changes nothing.

#include "bits.cuh"
#include "ranks.cuh"
#include "sparsify.h"
#include "sums.cuh"

namespace mesa_tune::cuda {
namespace {

constexpr int kDigit = 11;                  // bits of a digit: the counts of all digits fit shared memory
constexpr int kDigits = 1 << kDigit;        // values of a digit
constexpr int64_t kFewest = 32 * kThreads;  // elements that a block counts at least
constexpr int64_t kMostBlocks = 1 << 10;    // that count digits

using Count = unsigned long long;

template <class U>
constexpr int kBits = 8 * sizeof(U) - 1;
template <class U>
constexpr int kPasses = (kBits<U> + kDigit - 1) / kDigit;

// The bits of the digit of this pass, from the highest on; the last digit may have fewer.
template <class U>
constexpr int digit_width(int pass) {
  const int rest = kBits<U> - kDigit * pass;
  return rest < kDigit ? rest : kDigit;
}

struct Memory {
  Count* digits;          // per pass, how often each digit occurs
  Threshold* thresholds;  // per pass, the threshold's digits before it
  int64_t* before;        // per portion, survivors above the threshold, then those equal to it
};

// Adds the next digit to the threshold, of which `equal` is the rank among what begins with its digits. The
// first thread of the block has the largest digits.
__device__ inline Threshold with_digit(const Threshold& threshold, const Count* counts, int width) {
  __shared__ Threshold found;
  constexpr int share = kDigits / kThreads;
  int digit = kDigits - 1 - share * static_cast<int>(threadIdx.x);
  Count sum = 0;
  for (int i = 0; i < share; ++i) sum += counts[digit - i];
  const int64_t own = static_cast<int64_t>(sum), before = block_sums(own).before;
  int64_t rank = threshold.equal - before;
  if (rank > 0 && rank <= own) {
    while (static_cast<int64_t>(counts[digit]) < rank) rank -= static_cast<int64_t>(counts[digit--]);
    found = {threshold.value << width | static_cast<uint64_t>(digit), rank};
  }
  __syncthreads();
  return found;
}

// The digits before this pass of the threshold of rank `count`, counted from the largest magnitude.
template <class U>
__device__ inline Threshold threshold_before(int pass, const Memory& memory, int64_t count) {
  Threshold threshold{0, count};
  if (pass == 0) return threshold;
  if (pass > 1) threshold = memory.thresholds[pass - 1];
  threshold = with_digit(threshold, memory.digits + kDigits * (pass - 1), digit_width<U>(pass - 1));
  if (thread_number() == 0) memory.thresholds[pass] = threshold;
  return threshold;
}

template <class U>
__global__ void count_digits(int pass, const U* x, int64_t numel, int64_t count, const Memory memory) {
  __shared__ unsigned counts[kDigits];
  for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads) counts[digit] = 0;
  const uint64_t prefix = threshold_before<U>(pass, memory, count).value;
  const int width = digit_width<U>(pass), shift = kBits<U> - kDigit * pass - width;
  __syncthreads();
  for (int64_t i = thread_number(); i < numel; i += thread_count()) {
    const uint64_t bits = static_cast<uint64_t>(magnitude(x[i])) >> shift;
    if (bits >> width == prefix) atomicAdd(&counts[bits & ((1u << width) - 1)], 1u);
  }
  __syncthreads();
  for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads)
    if (counts[digit] > 0) atomicAdd(&memory.digits[kDigits * pass + digit], Count{counts[digit]});
}

template <class U>
__global__ void count_survivors(const U* x, int64_t numel, int64_t count, const Memory memory,
                                int64_t portions) {
  const U threshold = static_cast<U>(threshold_before<U>(kPasses<U>, memory, count).value);
  for_each_portion(numel, [&](int64_t portion) {
    int64_t above = 0, equal = 0;
    for_each_word(portion, [&](int, int64_t element) {
      const bool is_element = element < numel;
      const U size = is_element ? magnitude(x[element]) : U{0};
      above += __popc(__ballot_sync(kAllLanes, size > threshold));
      equal += __popc(__ballot_sync(kAllLanes, is_element && size == threshold));
    });
    if (threadIdx.x % kWarp > 0) return;
    memory.before[portion] = above;
    memory.before[portions + portion] = equal;
  });
}

template <class U>
__global__ void write_survivors(const U* x, int64_t numel, const Memory memory, int64_t portions,
                                uint8_t* bitmap, U* survivors) {
  const Threshold threshold = memory.thresholds[kPasses<U>];
  for_each_portion(numel, [&](int64_t portion) {
    const int64_t equal_before = memory.before[portions + portion];
    int64_t next = memory.before[portion] + std::min(equal_before, threshold.equal);
    int64_t missing = threshold.equal - equal_before;
    uint32_t lane_bits = 0;
    for_each_word(portion, [&](int word, int64_t element) {
      const bool is_element = element < numel;
      const U value = is_element ? x[element] : U{0};
      const uint64_t size = magnitude(value);
      const bool is_equal = is_element && size == threshold.value;
      const uint32_t equal = __ballot_sync(kAllLanes, is_equal);
      const bool survives = size > threshold.value || (is_equal && lanes_before(equal) < missing);
      const uint32_t bits = __ballot_sync(kAllLanes, survives);
      if (survives) survivors[next + lanes_before(bits)] = value;
      next += __popc(bits);
      missing -= __popc(equal);
      if (word == static_cast<int>(threadIdx.x) % kWarp) lane_bits = bits;
    });
    store_bits(lane_bits, portion * kWarp + threadIdx.x % kWarp, plane_bytes(numel), bitmap);
  });
}

template <class U>
__global__ void fill(const uint8_t* bitmap, const U* survivors, int64_t numel, int64_t count,
                     const int64_t* before, U* out) {
  for_each_bit(bitmap, numel, before, count, [&](int64_t element, bool survives, int64_t index) {
    out[element] = survives ? survivors[index] : U{0};
  });
}

// Calls visit with an unsigned integer of `width` bytes.
template <class Visit>
void with_width(int64_t width, const Visit& visit) {
  if (width == 2) return visit(uint16_t());
  if (width == 4) return visit(uint32_t());
  visit(uint64_t());
}

template <class U>
void sparsify(const U* x, int64_t numel, int64_t count, uint8_t* bitmap, U* survivors, int64_t* numbers,
              void* stream) {
  constexpr int passes = kPasses<U>;
  const int64_t portions = portions_of(numel);
  auto* const digits = reinterpret_cast<Count*>(numbers);
  auto* const thresholds = reinterpret_cast<Threshold*>(digits + kDigits * passes);
  const Memory memory{digits, thresholds, reinterpret_cast<int64_t*>(thresholds + passes + 1)};
  check(cudaMemsetAsync(digits, 0, sizeof(Count) * kDigits * passes, static_cast<cudaStream_t>(stream)));
  const int64_t blocks = std::clamp<int64_t>(numel / kFewest, 1, kMostBlocks);
  for (int pass = 0; pass < passes; ++pass)
    launch(count_digits<U>, blocks * kThreads, stream, pass, x, numel, count, memory);
  launch(count_survivors<U>, portions * kWarp, stream, x, numel, count, memory, portions);
  launch(sum_before, 2 * kThreads, stream, memory.before, portions);
  launch(write_survivors<U>, portions * kWarp, stream, x, numel, memory, portions, bitmap, survivors);
}

}  // namespace

int64_t sparsify_memory(int64_t width, int64_t numel) {
  int64_t numbers = 2 * portions_of(numel);
  with_width(width, [&](auto u) {
    constexpr int passes = kPasses<decltype(u)>;
    numbers += kDigits * passes + 2 * (passes + 1);
  });
  return numbers;
}

void sparsify(const void* x, int64_t width, int64_t numel, int64_t count, uint8_t* bitmap, void* survivors,
              int64_t* memory, void* stream) {
  if (numel == 0) return;
  if (count == 0) {
    const auto bytes = static_cast<size_t>(plane_bytes(numel));
    return check(cudaMemsetAsync(bitmap, 0, bytes, static_cast<cudaStream_t>(stream)));
  }
  with_width(width, [&](auto u) {
    using U = decltype(u);
    sparsify(static_cast<const U*>(x), numel, count, bitmap, static_cast<U*>(survivors), memory, stream);
  });
}

int64_t densify_memory(int64_t numel) {
  return portions_of(numel);
}

void densify(const uint8_t* bitmap, const void* survivors, int64_t width, int64_t numel, int64_t count,
             void* out, int64_t* memory, void* stream) {
  const int64_t portions = portions_of(numel);
  rank_portions(bitmap, numel, memory, stream);
  with_width(width, [&](auto u) {
    using U = decltype(u);
    launch(fill<U>, portions * kWarp, stream, bitmap, static_cast<const U*>(survivors), numel, count, memory,
           static_cast<U*>(out));
  });
}

}  // namespace mesa_tune::cuda
