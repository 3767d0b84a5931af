// Some elements out of packed groups, wherever they begin: for kernels that use them while they are in the
// cache.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "groups.h"
#include "planes.h"
#include "rounding.h"

namespace mesa_tune::cpu {

// Room for `n` elements and what lies about them in their groups.
inline std::unique_ptr<float[]> decode_buffer(int64_t n, const Settings& s) {
  return std::unique_ptr<float[]>(new float[static_cast<size_t>(n + 2 * s.group_size)]);
}

// Each so many rows of `width` elements begin with a group; 1 where these are more than `most`.
inline int64_t rows_between_groups(int64_t most, int64_t width, const Settings& s) {
  const int64_t step = s.group_size / std::gcd(s.group_size, width);
  return step <= most ? step : 1;
}

// Up to `most` rows, after which the next ones begin with a group where that is possible.
inline int64_t rows_to_group(int64_t most, int64_t width, const Settings& s) {
  const int64_t step = rows_between_groups(most, width, s);
  return most / step * step;
}

// Rows that are decoded at a time: about a tile, and beginning with a group where that is possible.
inline int64_t rows_per_tile(int64_t width, const Settings& s) {
  return rows_to_group(std::max<int64_t>(1, kTile / std::max<int64_t>(1, width)), width, s);
}

// Sums over rows are made in portions, of so many rows each, whatever the number of threads: `fewest` at
// least.
inline int64_t rows_per_portion(int64_t rows, int64_t fewest, int64_t width, const Settings& s) {
  constexpr int64_t kPortions = 64;
  const int64_t each = rows_per_tile(width, s);
  return ceil_div(std::max(fewest, ceil_div(rows, kPortions)), each) * each;
}

// Adds up the portions' sums in their order: of each, `n` numbers that belong to `dw`, then those of `db`.
inline void add_portions(const std::vector<float>& sums, int64_t n, float* dw, float* db) {
  for (const float *own = sums.data(), *end = own + sums.size(); own != end; own += 2 * n) {
    for (int64_t i = 0; i < n; ++i) dw[i] += own[i];
    for (int64_t i = 0; i < n; ++i) db[i] += own[n + i];
  }
}

// Elements [first, first + n) into `values`; returns where they begin.
MESA_TUNE_INLINE const float* decode_slice(const Packed& packed, const Settings& s, const Split& parts,
                                      int64_t first, int64_t n, float* values) {
  alignas(64) uint8_t codes[kMaxGroupSize + 8];
  const int64_t from = first / s.group_size, to = (first + n - 1) / s.group_size;
  for (int64_t group = from; group <= to; ++group) {
    const Span& span = group < parts.whole.count ? parts.whole : parts.rest;
    float* out = values + (group - from) * s.group_size;
    transpose_rows(planes_of(packed, s, span, group), span.plane(), s.bits, codes, span.plane(), 8,
                   span.plane());
    decode(range_of(packed, group), s.levels, codes, span.size, out);
  }
  return values + (first - from * s.group_size);
}

}  // namespace mesa_tune::cpu
