// The largest magnitudes of a tensor, and a bitmap of their indices. A radix selection finds the threshold,
// the smallest magnitude that survives. What is hard are magnitudes equal to the threshold, of which the
// first in the tensor survive: a pass over all blocks counts them, so that each block knows how many of its
// own survive, and where its survivors begin.

#include "sparsify.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <vector>

#include "bits.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kBlock = 1 << 14;  // elements; a multiple of 64
constexpr int kDigit = 16;           // bits of a digit: the counts of all digits fit the second-level cache

constexpr int64_t blocks_of(int64_t numel) {
  return (numel + kBlock - 1) / kBlock;
}

template <class Work>
void for_blocks(int64_t numel, const Work& work) {
  torch::stable::parallel_for(0, blocks_of(numel), 2, [&](int64_t from, int64_t to) {
    for (int64_t block = from; block < to; ++block)
      work(block, block * kBlock, std::min(kBlock, numel - block * kBlock));
  });
}

// Calls work(pointer) with x as unsigned integers of `width` bytes.
template <class Work>
MESA_TUNE_INLINE void as_unsigned(const void* x, int64_t width, const Work& work) {
  if (width == 2) return work(static_cast<const uint16_t*>(x));
  if (width == 4) return work(static_cast<const uint32_t*>(x));
  work(static_cast<const uint64_t*>(x));
}

using Histogram = std::vector<int64_t>;

// Counts each digit, the `width` bits from `shift` on, of the magnitudes whose higher bits are `prefix`.
template <class U>
Histogram count_digits(const U* x, int64_t numel, uint64_t prefix, int shift, int width) {
  const size_t size = size_t{1} << width;
  Histogram total(size);
  std::mutex lock;
  torch::stable::parallel_for(0, numel, 2 * kBlock, [&](int64_t from, int64_t to) {
    Histogram local(size);
    for (int64_t i = from; i < to; ++i) {
      const uint64_t bits = static_cast<uint64_t>(magnitude(x[i])) >> shift;
      if (bits >> width == prefix) ++local[bits & (size - 1)];
    }
    const std::lock_guard<std::mutex> guard(lock);
    for (size_t digit = 0; digit < size; ++digit) total[digit] += local[digit];
  });
  return total;
}

// The magnitude of rank `count`, counted from the largest.
template <class U>
Threshold select(const U* x, int64_t numel, int64_t count) {
  uint64_t prefix = 0;
  for (int shift = 8 * sizeof(U) - 1; shift > 0;) {
    const int width = std::min(kDigit, shift);
    shift -= width;
    const Histogram counts = count_digits(x, numel, prefix, shift, width);
    size_t digit = (size_t{1} << width) - 1;
    while (counts[digit] < count) count -= counts[digit--];
    prefix = prefix << width | digit;
  }
  return {prefix, count};
}

// Counts the magnitudes of at least `threshold` among elements [first, first + n).
MESA_TUNE_INLINE void count_at_least(const void* x, int64_t width, int64_t first, int64_t n,
                                     uint64_t threshold, int64_t* count) {
  as_unsigned(x, width, [&](const auto* data) MESA_TUNE_FLATTEN {
    using U = std::decay_t<decltype(*data)>;
    int64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += magnitude(data[first + i]) >= static_cast<U>(threshold);
    *count = sum;
  });
}
MESA_TUNE_PATHS(count_at_least,
                (const void* x, int64_t width, int64_t first, int64_t n, uint64_t threshold, int64_t* count),
                (x, width, first, n, threshold, count))

// The bitmap of one block, with a bit for each magnitude of at least `threshold`.
MESA_TUNE_INLINE void mark(const void* x, int64_t width, int64_t first, int64_t n, uint64_t threshold,
                           uint8_t* bitmap) {
  alignas(64) uint8_t mask[kBlock];
  as_unsigned(x, width, [&](const auto* data) MESA_TUNE_FLATTEN {
    using U = std::decay_t<decltype(*data)>;
    for (int64_t i = 0; i < n; ++i) mask[i] = magnitude(data[first + i]) >= static_cast<U>(threshold);
  });
  const int64_t bytes = (n + 7) / 8;
  std::memset(mask + n, 0, static_cast<size_t>(8 * bytes - n));
  for (int64_t i = 0; i < bytes; ++i) bitmap[i] = gather_bits(mask + 8 * i);
}
MESA_TUNE_PATHS(mark,
                (const void* x, int64_t width, int64_t first, int64_t n, uint64_t threshold, uint8_t* bitmap),
                (x, width, first, n, threshold, bitmap))

// Clears the bits of one block's magnitudes equal to the threshold, except for the first `equal` of them.
template <class U>
void clear_surplus(const U* x, int64_t n, const Threshold& threshold, int64_t equal, uint8_t* bitmap) {
  for (int64_t i = 0; i < n; ++i) {
    if (magnitude(x[i]) == threshold.value && equal-- <= 0)
      bitmap[i / 8] = static_cast<uint8_t>(bitmap[i / 8] & ~(1 << i % 8));
  }
}

// The survivors of one block: how many are above the threshold, how many equal to it, and the index of the
// first one among all survivors.
struct BlockSurvivors {
  int64_t above, equal, begin;
};

std::vector<BlockSurvivors> count_survivors(const void* x, int64_t width, int64_t numel,
                                            const Threshold& threshold) {
  std::vector<BlockSurvivors> blocks(static_cast<size_t>(blocks_of(numel)));
  for_blocks(numel, [&](int64_t block, int64_t first, int64_t n) {
    int64_t at_least, above;
    count_at_least_paths[path()](x, width, first, n, threshold.value, &at_least);
    count_at_least_paths[path()](x, width, first, n, threshold.value + 1, &above);
    blocks[block] = {above, at_least - above, 0};
  });
  int64_t begin = 0, equal = threshold.equal;
  for (BlockSurvivors& block : blocks) {
    block.equal = std::min(block.equal, equal);
    block.begin = begin;
    equal -= block.equal;
    begin += block.above + block.equal;
  }
  return blocks;
}

// Writes the bitmap and the survivors.
template <class U>
void write_survivors(const U* x, int64_t numel, const Threshold& threshold, uint8_t* bitmap, U* survivors) {
  const std::vector<BlockSurvivors> blocks = count_survivors(x, sizeof(U), numel, threshold);
  for_blocks(numel, [&](int64_t block, int64_t first, int64_t n) {
    const int64_t equal = blocks[block].equal;
    uint8_t* bits = bitmap + first / 8;
    mark_paths[path()](x, sizeof(U), first, n, threshold.value + (equal == 0), bits);
    if (equal > 0) clear_surplus(x + first, n, threshold, equal, bits);
    U* out = survivors + blocks[block].begin;
    for_each_bit(bits, (n + 7) / 8, [&](int64_t i) { *out++ = x[first + i]; });
  });
}

// Mask of the bits of one byte that belong to elements.
uint8_t valid_bits(int64_t byte, int64_t numel) {
  return static_cast<uint8_t>(8 * byte + 8 <= numel ? 0xFF : (1 << (numel - 8 * byte)) - 1);
}

// Writes zeros and the survivors; `begins` has the index of each block's first survivor.
template <class U>
void fill(const uint8_t* bitmap, const U* survivors, int64_t numel, const std::vector<int64_t>& begins,
          U* out) {
  for_blocks(numel, [&](int64_t block, int64_t first, int64_t n) {
    const U* next = survivors + begins[block];
    std::memset(out + first, 0, static_cast<size_t>(n) * sizeof(U));
    const int64_t whole = n / 8;
    for_each_bit(bitmap + first / 8, whole, [&](int64_t i) { out[first + i] = *next++; });
    for (int64_t i = 8 * whole; i < n; ++i)
      if (bitmap[(first + i) / 8] >> i % 8 & 1) out[first + i] = *next++;
  });
}

}  // namespace

void sparsify(const void* x, int64_t width, int64_t numel, int64_t count, uint8_t* bitmap, void* survivors) {
  if (count == 0) return void(std::fill_n(bitmap, (numel + 7) / 8, uint8_t{0}));
  as_unsigned(x, width, [&](const auto* data) {
    using U = std::decay_t<decltype(*data)>;
    write_survivors(data, numel, select(data, numel, count), bitmap, static_cast<U*>(survivors));
  });
}

int64_t densify(const uint8_t* bitmap, const void* survivors, int64_t width, int64_t numel, int64_t count,
                void* out) {
  std::vector<int64_t> begins(static_cast<size_t>(blocks_of(numel)));
  for_blocks(numel, [&](int64_t block, int64_t first, int64_t n) {
    int64_t bits_set = 0;
    for (int64_t byte = first / 8; 8 * byte < first + n; ++byte)
      bits_set += std::popcount(static_cast<uint8_t>(bitmap[byte] & valid_bits(byte, numel)));
    begins[block] = bits_set;
  });
  int64_t total = 0;
  for (int64_t& begin : begins) total += std::exchange(begin, total);  // counts become cumulative sums
  if (total != count) return total;
  as_unsigned(survivors, width, [&](const auto* values) {
    fill(bitmap, values, numel, begins, static_cast<std::decay_t<decltype(*values)>*>(out));
  });
  return total;
}

}  // namespace mesa_tune::cpu
