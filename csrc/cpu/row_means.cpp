// The means of rows on the CPU, of what PyTorch rounded to 16 bits: sums in float64, which nearly always are
// exact, so that every order gives the same bits.

#include "groups.h"
#include "lanes.h"
#include "paths.h"
#include "quantize.h"
#include "tile.h"

namespace mesa_tune::cpu {
namespace {

MESA_TUNE_INLINE void means_of(const Strided& x, int64_t inner, float* means, int64_t from, int64_t to) {
  alignas(64) float buffer[kTile];
  for (int64_t row = from; row < to; ++row) {
    double sums[kLanes] = {};
    for (int64_t begin = 0; begin < inner; begin += kTile) {
      const int64_t n = std::min(kTile, inner - begin), even = n - n % kLanes;
      const float* values = load(x, 0, row * inner + begin, n, buffer);
      for (int64_t i = 0; i < even; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += values[i + lane];
      for (int64_t i = even; i < n; ++i) sums[i - even] += values[i];
    }
    double total = 0;
    for (const double sum : sums) total += sum;
    means[row] = static_cast<float>(total / static_cast<double>(inner));
  }
}
MESA_TUNE_PATHS(means_of, (const Strided& x, int64_t inner, float* means, int64_t from, int64_t to),
                (x, inner, means, from, to))

}  // namespace

void row_means(const Strided& x, int64_t inner, float* means) {
  parallel(x.numel / inner, inner,
           [&](int64_t from, int64_t to) { means_of_paths[path()](x, inner, means, from, to); });
}

}  // namespace mesa_tune::cpu
