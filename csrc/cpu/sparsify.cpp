// The largest magnitudes of a tensor, and a bitmap of where they were. A selection by digits finds the
// smallest magnitude that survives; blocks are then counted, so that each knows where its survivors begin and
// how many of the magnitudes equal to the smallest are its own: of all of them, the first ones survive.

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
constexpr int kDigit = 16;  // bits that are selected at a time: counts that fit the second-level cache

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

// Calls work(pointer) with x as unsigned numbers of its width.
template <class Work>
MESA_TUNE_INLINE void as_unsigned(const void* x, int64_t width, const Work& work) {
  if (width == 2) return work(static_cast<const uint16_t*>(x));
  if (width == 4) return work(static_cast<const uint32_t*>(x));
  work(static_cast<const uint64_t*>(x));
}

template <class U>
MESA_TUNE_INLINE U magnitude(U bits) {
  return static_cast<U>(bits & (static_cast<U>(~U{0}) >> 1));
}

struct Threshold {
  uint64_t value;
  int64_t equal;  // how many of this very magnitude survive
};

using Histogram = std::vector<int64_t>;

// How often each digit at `shift` occurs, among magnitudes whose higher bits are `prefix`.
template <class U>
Histogram digits(const U* x, int64_t numel, uint64_t prefix, int shift, int width) {
  const size_t size = size_t{1} << width;
  Histogram all(size);
  std::mutex lock;
  torch::stable::parallel_for(0, numel, 2 * kBlock, [&](int64_t from, int64_t to) {
    Histogram own(size);
    for (int64_t i = from; i < to; ++i) {
      const uint64_t bits = static_cast<uint64_t>(magnitude(x[i])) >> shift;
      if (bits >> width == prefix) ++own[bits & (size - 1)];
    }
    const std::lock_guard<std::mutex> guard(lock);
    for (size_t digit = 0; digit < size; ++digit) all[digit] += own[digit];
  });
  return all;
}

// The magnitude of rank `count`, the largest first.
template <class U>
Threshold select(const U* x, int64_t numel, int64_t count) {
  uint64_t prefix = 0;
  for (int shift = 8 * sizeof(U) - 1; shift > 0;) {
    const int width = std::min(kDigit, shift);
    shift -= width;
    const Histogram found = digits(x, numel, prefix, shift, width);
    size_t digit = (size_t{1} << width) - 1;
    while (found[digit] < count) count -= found[digit--];
    prefix = prefix << width | digit;
  }
  return {prefix, count};
}

// How many of n magnitudes are at least `least`.
MESA_TUNE_INLINE void count_from(const void* x, int64_t width, int64_t first, int64_t n, uint64_t least,
                                 int64_t* count) {
  as_unsigned(x, width, [&](const auto* data) MESA_TUNE_FLATTEN {
    using U = std::decay_t<decltype(*data)>;
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) found += magnitude(data[first + i]) >= static_cast<U>(least);
    *count = found;
  });
}
MESA_TUNE_PATHS(count_from,
                (const void* x, int64_t width, int64_t first, int64_t n, uint64_t least, int64_t* count),
                (x, width, first, n, least, count))

// A block's bitmap: magnitudes of at least `least` survive.
MESA_TUNE_INLINE void mark(const void* x, int64_t width, int64_t first, int64_t n, uint64_t least,
                           uint8_t* bitmap) {
  alignas(64) uint8_t keep[kBlock];
  as_unsigned(x, width, [&](const auto* data) MESA_TUNE_FLATTEN {
    using U = std::decay_t<decltype(*data)>;
    for (int64_t i = 0; i < n; ++i) keep[i] = magnitude(data[first + i]) >= static_cast<U>(least);
  });
  const int64_t bytes = (n + 7) / 8;
  std::memset(keep + n, 0, static_cast<size_t>(8 * bytes - n));
  for (int64_t i = 0; i < bytes; ++i) bitmap[i] = gather_bits(keep + 8 * i);
}
MESA_TUNE_PATHS(mark,
                (const void* x, int64_t width, int64_t first, int64_t n, uint64_t least, uint8_t* bitmap),
                (x, width, first, n, least, bitmap))

// Of a block in which only some of the magnitudes equal to the threshold survive: takes the others' bits
// away.
template <class U>
void drop_last(const U* x, int64_t n, const Threshold& threshold, int64_t own, uint8_t* bitmap) {
  for (int64_t i = 0; i < n; ++i) {
    if (magnitude(x[i]) == threshold.value && own-- <= 0)
      bitmap[i / 8] = static_cast<uint8_t>(bitmap[i / 8] & ~(1 << i % 8));
  }
}

// Calls visit(i) for each bit i that is set, in order.
template <class Visit>
MESA_TUNE_INLINE void for_each_bit(const uint8_t* bitmap, int64_t bytes, const Visit& visit) {
  for (int64_t byte = 0; byte < bytes; ++byte)
    for (unsigned bits = bitmap[byte]; bits != 0; bits &= bits - 1) visit(8 * byte + std::countr_zero(bits));
}

// What a block keeps: where its survivors begin, and how many of the magnitudes equal to the threshold.
struct Share {
  int64_t above, equal, begin;
};

std::vector<Share> shares(const void* x, int64_t width, int64_t numel, const Threshold& threshold) {
  std::vector<Share> all(static_cast<size_t>(blocks_of(numel)));
  for_blocks(numel, [&](int64_t block, int64_t first, int64_t n) {
    int64_t from, above;
    count_from_paths[path()](x, width, first, n, threshold.value, &from);
    count_from_paths[path()](x, width, first, n, threshold.value + 1, &above);
    all[block] = {above, from - above, 0};
  });
  int64_t begin = 0, equal = threshold.equal;
  for (Share& share : all) {
    share.equal = std::min(share.equal, equal);
    share.begin = begin;
    equal -= share.equal;
    begin += share.above + share.equal;
  }
  return all;
}

template <class U>
void emit(const U* x, int64_t numel, const Threshold& threshold, uint8_t* bitmap, U* survivors) {
  const std::vector<Share> all = shares(x, sizeof(U), numel, threshold);
  for_blocks(numel, [&](int64_t block, int64_t first, int64_t n) {
    const Share& share = all[block];
    uint8_t* own = bitmap + first / 8;
    mark_paths[path()](x, sizeof(U), first, n, threshold.value + (share.equal == 0), own);
    if (share.equal > 0) drop_last(x + first, n, threshold, share.equal, own);
    U* to = survivors + share.begin;
    for_each_bit(own, (n + 7) / 8, [&](int64_t i) { *to++ = x[first + i]; });
  });
}

uint8_t valid_bits(int64_t byte, int64_t numel) {
  return static_cast<uint8_t>(8 * byte + 8 <= numel ? 0xFF : (1 << (numel - 8 * byte)) - 1);
}

template <class U>
void fill(const uint8_t* bitmap, const U* survivors, int64_t numel, const std::vector<int64_t>& begins,
          U* out) {
  for_blocks(numel, [&](int64_t block, int64_t first, int64_t n) {
    const U* from = survivors + begins[block];
    std::memset(out + first, 0, static_cast<size_t>(n) * sizeof(U));
    const int64_t whole = n / 8;
    for_each_bit(bitmap + first / 8, whole, [&](int64_t i) { out[first + i] = *from++; });
    for (int64_t i = 8 * whole; i < n; ++i)
      if (bitmap[(first + i) / 8] >> i % 8 & 1) out[first + i] = *from++;
  });
}

}  // namespace

void sparsify(const void* x, int64_t width, int64_t numel, int64_t count, uint8_t* bitmap, void* survivors) {
  if (count == 0) return void(std::fill_n(bitmap, (numel + 7) / 8, uint8_t{0}));
  as_unsigned(x, width, [&](const auto* data) {
    using U = std::decay_t<decltype(*data)>;
    emit(data, numel, select(data, numel, count), bitmap, static_cast<U*>(survivors));
  });
}

int64_t densify(const uint8_t* bitmap, const void* survivors, int64_t width, int64_t numel, int64_t count,
                void* out) {
  std::vector<int64_t> begins(static_cast<size_t>(blocks_of(numel)));
  for_blocks(numel, [&](int64_t block, int64_t first, int64_t n) {
    int64_t set = 0;
    for (int64_t byte = first / 8; 8 * byte < first + n; ++byte)
      set += std::popcount(static_cast<uint8_t>(bitmap[byte] & valid_bits(byte, numel)));
    begins[block] = set;
  });
  int64_t total = 0;
  for (int64_t& begin : begins) total += std::exchange(begin, total);
  if (total != count) return total;
  as_unsigned(survivors, width, [&](const auto* values) {
    fill(bitmap, values, numel, begins, static_cast<std::decay_t<decltype(*values)>*>(out));
  });
  return total;
}

}  // namespace mesa_tune::cpu
