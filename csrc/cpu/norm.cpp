// The backward of norms over rows, from their packed normalized input: some rows are decoded into the first-
// level cache, used there, and forgotten. Sums run in lanes of a fixed number and portions of fixed rows, so
// that neither the vector path nor the number of threads changes a bit.

#include "norm.h"

#include <algorithm>
#include <vector>

#include "decoded.h"
#include "lanes.h"

namespace mesa_tune::cpu {
namespace {

MESA_TUNE_INLINE void row_backward(const NormBackward& task, int64_t row, const float* __restrict x,
                                   float* __restrict dw, float* __restrict db) {
  const int64_t inner = task.inner, even = inner - inner % kLanes;
  const float* __restrict grad = task.grad + row * inner;
  const float* __restrict weight = task.weight;
  float* __restrict dx = task.dx + row * inner;
  Lanes first, second;
  for (int64_t i = 0; i < even; i += kLanes) {
    Lanes u = Lanes::read(grad + i);
    u.multiply(Lanes::read(weight + i));
    first.add(u);
    u.multiply(Lanes::read(x + i));
    second.add(u);
  }
  float sum = 0, product = 0;
  for (int64_t i = even; i < inner; ++i) {
    const float u = grad[i] * weight[i];
    sum += u;
    product += u * x[i];
  }
  const float count = static_cast<float>(inner), rstd = task.rstd[row];
  const float mean = task.centered ? (first.total() + sum) / count : 0.0f;
  const float slope = (second.total() + product) / count;
  for (int64_t i = 0; i < inner; ++i) {
    const float g = grad[i], value = x[i];
    dx[i] = (g * weight[i] - mean - value * slope) * rstd;
    dw[i] += g * value;
    db[i] += g;
  }
}

MESA_TUNE_INLINE void rows_backward(const NormBackward& task, const Packed& packed, const Settings& s,
                                    float* sums, float* values, int64_t from, int64_t to) {
  const Split parts = split(task.rows * task.inner, s);
  const int64_t portion = rows_per_portion(task.rows, 1, task.inner, s), each = rows_per_tile(task.inner, s);
  for (int64_t at = from; at < to; ++at) {
    float *dw = sums + 2 * at * task.inner, *db = dw + task.inner;
    const int64_t end = std::min(task.rows, (at + 1) * portion);
    for (int64_t row = at * portion; row < end; row += each) {
      const int64_t count = std::min(each, end - row);
      const float* x = decode_slice(packed, s, parts, row * task.inner, count * task.inner, values);
      for (int64_t i = 0; i < count; ++i) row_backward(task, row + i, x + i * task.inner, dw, db);
    }
  }
}
MESA_TUNE_PATHS(rows_backward,
                (const NormBackward& task, const Packed& packed, const Settings& s, float* sums,
                 float* values, int64_t from, int64_t to),
                (task, packed, s, sums, values, from, to))

}  // namespace

void norm_backward(const NormBackward& task, const Packed& packed, const Settings& settings) {
  std::fill_n(task.dw, task.inner, 0.0f);
  std::fill_n(task.db, task.inner, 0.0f);
  if (task.rows * task.inner == 0) return;
  const int64_t each = rows_per_portion(task.rows, 1, task.inner, settings), count = ceil_div(task.rows, each);
  std::vector<float> sums(static_cast<size_t>(2 * count * task.inner));
  parallel(count, each * task.inner, [&](int64_t from, int64_t to) {
    const auto values = decode_buffer(std::min(task.rows, rows_per_tile(task.inner, settings)) * task.inner, settings);
    rows_backward_paths[path()](task, packed, settings, sums.data(), values.get(), from, to);
  });
  add_portions(sums, task.inner, task.dw, task.db);
}

}  // namespace mesa_tune::cpu
