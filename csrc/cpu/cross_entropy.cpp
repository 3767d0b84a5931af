// The backward of a cross-entropy, from its packed probabilities. They are decoded in tiles of whole groups.
// Tiles do not follow rows: one row may be larger than the cache.

#include "cross_entropy.h"

#include <algorithm>

#include "decoded.h"

namespace mesa_tune::cpu {
namespace {

int64_t tile_size(const Settings& s) {
  return std::max<int64_t>(1, kTile / s.group_size) * s.group_size;
}

// Elements [first, first + n), whose probabilities are `p`.
MESA_TUNE_INLINE void slice_backward(const CrossEntropyBackward& task, const float* scales,
                                     const float* __restrict p, int64_t first, int64_t n) {
  for (int64_t done = 0; done < n;) {
    const int64_t row = (first + done) / task.classes, column = first + done - row * task.classes;
    const int64_t count = std::min(n - done, task.classes - column);
    const float scale = scales[row];
    float* __restrict dx = task.dx + first + done;
    for (int64_t i = 0; i < count; ++i) dx[i] = scale * p[done + i];
    const int64_t target = scale == 0.0f ? -1 : task.target[row] - column;
    if (target >= 0 && target < count) dx[target] = scale * task.surplus[row];
    done += count;
  }
}

// Tiles [from, to).
MESA_TUNE_INLINE void tiles_backward(const CrossEntropyBackward& task, const float* scales,
                                     const Packed& packed, const Settings& s, float* values, int64_t from,
                                     int64_t to) {
  const int64_t numel = task.rows * task.classes, tile = tile_size(s);
  const Split parts = split(numel, s);
  for (int64_t first = from * tile; first < std::min(numel, to * tile); first += tile) {
    const int64_t n = std::min(tile, numel - first);
    slice_backward(task, scales, decode_slice(packed, s, parts, first, n, values), first, n);
  }
}
MESA_TUNE_PATHS(tiles_backward,
                (const CrossEntropyBackward& task, const float* scales, const Packed& packed,
                 const Settings& s, float* values, int64_t from, int64_t to),
                (task, scales, packed, s, values, from, to))

}  // namespace

void cross_entropy_backward(const CrossEntropyBackward& task, const float* scale, const Packed& packed,
                            const Settings& settings) {
  const int64_t tile = tile_size(settings);
  parallel(ceil_div(task.rows * task.classes, tile), tile, [&](int64_t from, int64_t to) {
    tiles_backward_paths[path()](task, scale, packed, settings, decode_buffer(tile, settings).get(), from,
                                 to);
  });
}

}  // namespace mesa_tune::cpu
