// Sums over rows, one for each column. Rows are added in portions, and then the portions: without atomics, so
// the order of additions does not depend on chance.
#pragma once

#include "elements.cuh"
#include "numbers.h"

namespace mesa_tune::cuda {

constexpr int64_t kColumnThreads = 1 << 16;  // about so many threads add columns
constexpr int64_t kFewestRows = 16;          // of a portion

// The number of portions.
inline int64_t portions_of(int64_t rows, int64_t columns) {
  const int64_t most = std::max<int64_t>(1, rows / kFewestRows);
  return std::clamp<int64_t>(kColumnThreads / std::max<int64_t>(1, columns), 1, most);
}

// One warp per column. Each portion has `columns` sums for dw, then as many for db.
static __global__ void add_portions(const float* sums, int64_t portions, int64_t columns, const Numbers dw,
                                    const Numbers db) {
  for (int64_t turn = thread_number(); turn / kWarp < columns; turn += thread_count()) {
    const int64_t column = turn / kWarp, lane = turn % kWarp;
    float of_dw = 0, of_db = 0;
    for (int64_t portion = lane; portion < portions; portion += kWarp) {
      of_dw += sums[2 * portion * columns + column];
      of_db += sums[(2 * portion + 1) * columns + column];
    }
    of_dw = warp_sum(of_dw);
    of_db = warp_sum(of_db);
    if (lane > 0) continue;
    dw.store(column, of_dw);
    db.store(column, of_db);
  }
}

}  // namespace mesa_tune::cuda
