// The backward of a cross-entropy, from its packed probabilities: decoded by the tile, wherever rows begin,
// as a row may be longer than the cache.

#include "cross_entropy.h"

#include <algorithm>

#include "decoded.h"

namespace mesa_tune::cpu {
namespace {

int64_t tile_of(const Settings& s) {
  return std::max<int64_t>(1, kTile / s.group_size) * s.group_size;
}

// Elements [first, first + n), which `p` are.
MESA_TUNE_INLINE void some(const CrossEntropyBackward& task, const float* __restrict p, int64_t first,
                           int64_t n) {
  for (int64_t done = 0; done < n;) {
    const int64_t row = (first + done) / task.classes, begin = first + done - row * task.classes;
    const int64_t count = std::min(n - done, task.classes - begin);
    const float scale = task.scale[row];
    float* __restrict dx = task.dx + first + done;
    for (int64_t i = 0; i < count; ++i) dx[i] = scale * p[done + i];
    const int64_t target = scale == 0.0f ? -1 : task.target[row] - begin;
    if (target >= 0 && target < count) dx[target] = scale * task.surplus[row];
    done += count;
  }
}

MESA_TUNE_INLINE void tiles(const CrossEntropyBackward& task, const Packed& packed, const Settings& s,
                            float* values, int64_t from, int64_t to) {
  const int64_t numel = task.rows * task.classes, each = tile_of(s);
  const Split parts = split(numel, s);
  for (int64_t first = from * each; first < std::min(numel, to * each); first += each) {
    const int64_t n = std::min(each, numel - first);
    some(task, decode_slice(packed, s, parts, first, n, values), first, n);
  }
}
MESA_TUNE_PATHS(tiles,
                (const CrossEntropyBackward& task, const Packed& packed, const Settings& s, float* values,
                 int64_t from, int64_t to),
                (task, packed, s, values, from, to))

}  // namespace

void cross_entropy_backward(const CrossEntropyBackward& task, const Packed& packed,
                            const Settings& settings) {
  const int64_t each = tile_of(settings);
  parallel(ceil_div(task.rows * task.classes, each), each, [&](int64_t from, int64_t to) {
    tiles_paths[path()](task, packed, settings, decode_buffer(each, settings).get(), from, to);
  });
}

}  // namespace mesa_tune::cpu
