// The backward of a softmax over rows, from its packed output: some rows are decoded into the first-level
// cache, and used there. Sums run in a fixed number of lanes, so that every vector path gives the same bits.

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

// Pieces of `each` rows.
MESA_TUNE_INLINE void rows_backward(const SoftmaxBackward& task, const Packed& packed, const Settings& s,
                                    float* values, int64_t each, int64_t from, int64_t to) {
  const Split parts = split(task.rows * task.width, s);
  for (int64_t row = from * each; row < std::min(task.rows, to * each); row += each) {
    const int64_t count = std::min(each, task.rows - row), at = row * task.width;
    const float* y = decode_slice(packed, s, parts, at, count * task.width, values);
    for (int64_t i = 0; i < count * task.width; i += task.width)
      row_backward(task.grad + at + i, y + i, task.width, task.dx + at + i);
  }
}
MESA_TUNE_PATHS(rows_backward,
                (const SoftmaxBackward& task, const Packed& packed, const Settings& s, float* values,
                 int64_t each, int64_t from, int64_t to),
                (task, packed, s, values, each, from, to))

}  // namespace

void softmax_backward(const SoftmaxBackward& task, const Packed& packed, const Settings& settings) {
  if (task.rows * task.width == 0) return;
  const int64_t each = rows_per_tile(task.width, settings);
  parallel(ceil_div(task.rows, each), each * task.width, [&](int64_t from, int64_t to) {
    const auto values = decode_buffer(std::min(each, task.rows) * task.width, settings);
    rows_backward_paths[path()](task, packed, settings, values.get(), each, from, to);
  });
}

}  // namespace mesa_tune::cpu
