// The backward of a softmax over rows, from its packed output. A tile of rows is decoded into the first-level
// cache and used there. Sums have a fixed number of lanes, so that every instruction set gives the same bits.

#include "softmax.h"

#include <algorithm>

#include "decoded.h"
#include "lanes.h"

namespace mesa_tune::cpu {
namespace {

MESA_TUNE_INLINE void row_backward(const float* __restrict grad, const float* __restrict y, int64_t n,
                                   float* __restrict dx) {
  const int64_t even = n - n % kLanes;
  Lanes lanes;
  for (int64_t i = 0; i < even; i += kLanes) {
    Lanes product = Lanes::read(grad + i);
    product.multiply(Lanes::read(y + i));
    lanes.add(product);
  }
  float sum = 0;
  for (int64_t i = even; i < n; ++i) sum += grad[i] * y[i];
  sum += lanes.total();
  for (int64_t i = 0; i < n; ++i) dx[i] = y[i] * (grad[i] - sum);
}

// Tiles [from, to), of `tile_rows` rows each.
MESA_TUNE_INLINE void tiles_backward(const SoftmaxBackward& task, const Packed& packed, const Settings& s,
                                     float* values, int64_t tile_rows, int64_t from, int64_t to) {
  const Split parts = split(task.rows * task.width, s);
  for (int64_t row = from * tile_rows; row < std::min(task.rows, to * tile_rows); row += tile_rows) {
    const int64_t count = std::min(tile_rows, task.rows - row), first = row * task.width;
    const float* y = decode_slice(packed, s, parts, first, count * task.width, values);
    for (int64_t i = 0; i < count * task.width; i += task.width)
      row_backward(task.grad + first + i, y + i, task.width, task.dx + first + i);
  }
}
MESA_TUNE_PATHS(tiles_backward,
                (const SoftmaxBackward& task, const Packed& packed, const Settings& s, float* values,
                 int64_t tile_rows, int64_t from, int64_t to),
                (task, packed, s, values, tile_rows, from, to))

}  // namespace

void softmax_backward(const SoftmaxBackward& task, const Packed& packed, const Settings& settings) {
  if (task.rows * task.width == 0) return;
  const int64_t tile_rows = rows_per_tile(task.width, settings);
  parallel(ceil_div(task.rows, tile_rows), tile_rows * task.width, [&](int64_t from, int64_t to) {
    const auto values = decode_buffer(std::min(tile_rows, task.rows) * task.width, settings);
    tiles_backward_paths[path()](task, packed, settings, values.get(), tile_rows, from, to);
  });
}

}  // namespace mesa_tune::cpu
