// Decodes slices of a packed tensor for kernels that use them while they are in the cache. What is hard: a
// slice may begin and end inside a group, but groups are decoded whole.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "groups.h"
#include "planes.h"
#include "rounding.h"

namespace mesa_tune::cpu {

// A buffer for `n` decoded elements, plus the other elements of the first and the last group.
inline std::unique_ptr<float[]> decode_buffer(int64_t n, const Settings& s) {
  return std::unique_ptr<float[]>(new float[static_cast<size_t>(n + 2 * s.group_size)]);
}

// Number of rows of `width` elements from one that begins with a group to the next that does; 1 if this is
// more than `max_rows`.
inline int64_t rows_between_groups(int64_t max_rows, int64_t width, const Settings& s) {
  const int64_t step = s.group_size / std::gcd(s.group_size, width);
  return step <= max_rows ? step : 1;
}

// Largest number of rows, at most `max_rows`, after which the next row begins with a group, if that is
// possible.
inline int64_t rows_to_group(int64_t max_rows, int64_t width, const Settings& s) {
  const int64_t step = rows_between_groups(max_rows, width, s);
  return max_rows / step * step;
}

// Number of rows that are decoded at a time: about a tile, beginning with a group if that is possible.
inline int64_t rows_per_tile(int64_t width, const Settings& s) {
  return rows_to_group(std::max<int64_t>(1, kTile / std::max<int64_t>(1, width)), width, s);
}

// Number of rows, at least `min_rows`, in each portion of a sum over rows. It does not depend on the number
// of threads, so the order of additions does not, either.
inline int64_t rows_per_portion(int64_t rows, int64_t min_rows, int64_t width, const Settings& s) {
  constexpr int64_t kPortions = 64;
  const int64_t tile = rows_per_tile(width, s);
  return ceil_div(std::max(min_rows, ceil_div(rows, kPortions)), tile) * tile;
}

// Adds the portions' sums in their order. Each portion has `n` sums for `dw`, then `n` for `db`.
inline void add_portions(const std::vector<float>& sums, int64_t n, float* dw, float* db) {
  for (const float *portion = sums.data(), *end = portion + sums.size(); portion != end; portion += 2 * n) {
    for (int64_t i = 0; i < n; ++i) dw[i] += portion[i];
    for (int64_t i = 0; i < n; ++i) db[i] += portion[n + i];
  }
}

// Decodes the groups of elements [first, first + n) into `values`; returns the address of element `first`.
MESA_TUNE_INLINE float* decode_slice(const Packed& packed, const Settings& s, const Split& parts,
                                     int64_t first, int64_t n, float* values) {
  alignas(64) uint8_t codes[kMaxGroupSize + 8];
  const int64_t first_group = first / s.group_size, last_group = (first + n - 1) / s.group_size;
  for (int64_t group = first_group; group <= last_group; ++group) {
    const Span& span = group < parts.whole.count ? parts.whole : parts.rest;
    float* out = values + (group - first_group) * s.group_size;
    transpose_rows(planes_of(packed, s, span, group), span.plane(), s.bits, codes, span.plane(), 8,
                   span.plane());
    decode(range_of(packed, group, s.levels), s.levels, codes, span.size, out);
  }
  return values + (first - first_group * s.group_size);
}

}  // namespace mesa_tune::cpu
