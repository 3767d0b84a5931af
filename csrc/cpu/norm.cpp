// The backward of norms over rows, from their packed normalized input. A tile of rows is decoded into the
// first-level cache and used there. What is hard is that neither the instruction set nor the number of
// threads may change a bit: sums have a fixed number of lanes, and sums over rows are made in portions of
// fixed size.

#include "norm.h"

#include <algorithm>
#include <vector>

#include "decoded.h"
#include "lanes.h"
#include "tile.h"

namespace mesa_tune::cpu {
namespace {

// `grad` and `dx` are rows of the tensors, or buffers in float32.
MESA_TUNE_INLINE void row_backward(const NormBackward& task, int64_t row, const float* __restrict grad,
                                   const float* __restrict x, float* __restrict dx, float* __restrict dw,
                                   float* __restrict db) {
  const int64_t inner = task.inner, even = inner - inner % kLanes;
  const float* __restrict weight = task.weight.floats();
  Lanes sums_u, sums_ux;
  for (int64_t i = 0; i < even; i += kLanes) {
    Lanes u = Lanes::read(grad + i);
    u.multiply(Lanes::read(weight + i));
    sums_u.add(u);
    u.multiply(Lanes::read(x + i));
    sums_ux.add(u);
  }
  float sum = 0, product = 0;
  for (int64_t i = even; i < inner; ++i) {
    const float u = grad[i] * weight[i];
    sum += u;
    product += u * x[i];
  }
  const float count = static_cast<float>(inner), rstd = task.rstd.floats()[row];
  const float mean = task.centered ? (sums_u.total() + sum) / count : 0.0f;
  const float slope = (sums_ux.total() + product) / count;
  for (int64_t i = 0; i < inner; ++i) {
    const float g = grad[i], value = x[i];
    dx[i] = (g * weight[i] - mean - value * slope) * rstd;
    dw[i] += g * value;
    db[i] += g;
  }
}

// Three rows in float32: zeros, and a gradient and its result.
struct Rows {
  explicit Rows(int64_t inner) : values(static_cast<size_t>(3 * inner)), inner(inner) {}
  const float* zeros() const { return values.data(); }
  float* grad() { return values.data() + inner; }
  float* dx() { return values.data() + 2 * inner; }

  std::vector<float> values;
  int64_t inner;
};

MESA_TUNE_INLINE void any_row_backward(const NormBackward& task, int64_t row, const float* xhat, Rows& buffer,
                                       float* dw, float* db) {
  const int64_t first = row * task.inner;
  const float* x = task.rstd.floats()[row] >= task.limit ? buffer.zeros() : xhat;
  const float* grad = load(task.grad, 0, first, task.inner, buffer.grad());
  float* dx = direct(task.dx) ? address(task.dx, 0, first) : buffer.dx();
  row_backward(task, row, grad, x, dx, dw, db);
  if (dx == buffer.dx()) store(dx, 0, first, task.inner, task.dx);
}

// Portions [from, to) of the rows: their dx, and their sums for dw and db.
MESA_TUNE_INLINE void portions_backward(const NormBackward& task, const Packed& packed, const Settings& s,
                                        float* sums, float* values, Rows& buffer, int64_t from, int64_t to) {
  const Split parts = split(task.rows * task.inner, s);
  const int64_t rows = rows_per_portion(task.rows, 1, task.inner, s),
                tile_rows = rows_per_tile(task.inner, s);
  for (int64_t portion = from; portion < to; ++portion) {
    float *dw = sums + 2 * portion * task.inner, *db = dw + task.inner;
    const int64_t end = std::min(task.rows, (portion + 1) * rows);
    for (int64_t row = portion * rows; row < end; row += tile_rows) {
      const int64_t count = std::min(tile_rows, end - row);
      const float* x = decode_slice(packed, s, parts, row * task.inner, count * task.inner, values);
      for (int64_t i = 0; i < count; ++i) any_row_backward(task, row + i, x + i * task.inner, buffer, dw, db);
    }
  }
}
MESA_TUNE_PATHS(portions_backward,
                (const NormBackward& task, const Packed& packed, const Settings& s, float* sums,
                 float* values, Rows& buffer, int64_t from, int64_t to),
                (task, packed, s, sums, values, buffer, from, to))

}  // namespace

void norm_backward(const NormBackward& task, const Packed& packed, const Settings& settings) {
  std::fill_n(task.dw.floats(), task.inner, 0.0f);
  std::fill_n(task.db.floats(), task.inner, 0.0f);
  if (task.rows * task.inner == 0) return;
  const int64_t rows = rows_per_portion(task.rows, 1, task.inner, settings);
  const int64_t portions = ceil_div(task.rows, rows);
  std::vector<float> sums(static_cast<size_t>(2 * portions * task.inner));
  parallel(portions, rows * task.inner, [&](int64_t from, int64_t to) {
    const auto values =
        decode_buffer(std::min(task.rows, rows_per_tile(task.inner, settings)) * task.inner, settings);
    Rows buffer(task.inner);
    portions_backward_paths[path()](task, packed, settings, sums.data(), values.get(), buffer, from, to);
  });
  add_portions(sums, task.inner, task.dw.floats(), task.db.floats());
}

}  // namespace mesa_tune::cpu
