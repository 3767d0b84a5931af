// The backward of a batch norm from its packed normalized input. Where a channel has several consecutive
// elements per sample, it processes some channels at a time: first their sums, then dx, while the gradient is
// still in the cache. Else it processes rows of all channels: first sums in portions of fixed size, then dx.
// What is hard is that neither the instruction set nor the number of threads may change a bit.

#include "batch_norm.h"

#include <algorithm>
#include <vector>

#include "decoded.h"
#include "lanes.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kMinRows =
    64;  // per portion: with fewer rows, the portions' sums would need too much memory

int64_t channels_per_tile(const BatchNormBackward& task) {
  return std::min(task.channels, std::max<int64_t>(1, kTile / task.positions));
}

// Adds the sums over consecutive elements of one channel.
MESA_TUNE_INLINE void add_run(const float* __restrict grad, const float* __restrict x, int64_t n, float& dw,
                              float& db) {
  const int64_t even = n - n % kLanes;
  Lanes grads, products;
  for (int64_t i = 0; i < even; i += kLanes) {
    Lanes g = Lanes::read(grad + i);
    grads.add(g);
    g.multiply(Lanes::read(x + i));
    products.add(g);
  }
  float sum = 0, product = 0;
  for (int64_t i = even; i < n; ++i) {
    sum += grad[i];
    product += grad[i] * x[i];
  }
  db += grads.total() + sum;
  dw += products.total() + product;
}

MESA_TUNE_INLINE void run_backward(const Coefficients& c, const float* __restrict grad,
                                   const float* __restrict x, int64_t n, float* __restrict dx) {
  for (int64_t i = 0; i < n; ++i) dx[i] = c.dx(grad[i], x[i]);
}

// Channels [first, first + count).
MESA_TUNE_INLINE void channels_backward(const BatchNormBackward& task, const Packed& packed,
                                        const Settings& s, const Split& parts, float* values, int64_t first,
                                        int64_t count) {
  const int64_t n = task.positions;
  for (int64_t sample = 0; sample < task.samples; ++sample) {
    const int64_t offset = (sample * task.channels + first) * n;
    const float* x = decode_slice(packed, s, parts, offset, count * n, values);
    for (int64_t i = 0; i < count; ++i)
      add_run(task.grad + offset + i * n, x + i * n, n, task.dw[first + i], task.db[first + i]);
  }
  for (int64_t sample = 0; sample < task.samples; ++sample) {
    const int64_t offset = (sample * task.channels + first) * n;
    const float* x = task.fixed ? nullptr : decode_slice(packed, s, parts, offset, count * n, values);
    for (int64_t i = 0; i < count; ++i) {
      const Coefficients c = task.coefficients(first + i);
      const float* __restrict grad = task.grad + offset + i * n;
      float* __restrict dx = task.dx + offset + i * n;
      if (x != nullptr) {
        run_backward(c, grad, x + i * n, n, dx);
      } else {
        for (int64_t j = 0; j < n; ++j) dx[j] = c.scale * grad[j];
      }
    }
  }
}

// Tiles [from, to) of channels.
MESA_TUNE_INLINE void channel_tiles(const BatchNormBackward& task, const Packed& packed, const Settings& s,
                                    float* values, int64_t from, int64_t to) {
  const Split parts = split(task.samples * task.channels * task.positions, s);
  const int64_t tile = channels_per_tile(task);
  for (int64_t first = from * tile; first < std::min(task.channels, to * tile); first += tile)
    channels_backward(task, packed, s, parts, values, first, std::min(tile, task.channels - first));
}
MESA_TUNE_PATHS(channel_tiles,
                (const BatchNormBackward& task, const Packed& packed, const Settings& s, float* values,
                 int64_t from, int64_t to),
                (task, packed, s, values, from, to))

void by_channels(const BatchNormBackward& task, const Packed& packed, const Settings& s) {
  const int64_t tile = channels_per_tile(task);
  parallel(ceil_div(task.channels, tile), task.samples * tile * task.positions,
           [&](int64_t from, int64_t to) {
             const auto values = decode_buffer(tile * task.positions, s);
             channel_tiles_paths[path()](task, packed, s, values.get(), from, to);
           });
}

// The backward over rows, which have one number per channel.
struct Rows {
  const BatchNormBackward& task;
  int64_t portion_rows;                // rows in each portion of the sums
  float* sums;                         // per portion, the sums for dw and db
  const float *scale, *slope, *shift;  // the channels' coefficients
};

// The sums of portions [from, to).

MESA_TUNE_INLINE void sum_rows(const Rows& rows, const Packed& packed, const Settings& s, float* values,
                               int64_t from, int64_t to) {
  const BatchNormBackward& task = rows.task;
  const int64_t n = task.channels, tile_rows = rows_per_tile(n, s);
  const Split parts = split(task.samples * n, s);
  for (int64_t portion = from; portion < to; ++portion) {
    float* __restrict dw = rows.sums + 2 * portion * n, * __restrict db = dw + n;
    const int64_t end = std::min(task.samples, (portion + 1) * rows.portion_rows);
    for (int64_t row = portion * rows.portion_rows; row < end; row += tile_rows) {
      const int64_t count = std::min(tile_rows, end - row);
      const float* x = decode_slice(packed, s, parts, row * n, count * n, values);
      for (int64_t i = 0; i < count; ++i) {
        const float* __restrict grad = task.grad + (row + i) * n, * __restrict value = x + i * n;
        for (int64_t j = 0; j < n; ++j) {
          dw[j] += grad[j] * value[j];
          db[j] += grad[j];
        }
      }
    }
  }
}
MESA_TUNE_PATHS(sum_rows,
                (const Rows& rows, const Packed& packed, const Settings& s, float* values, int64_t from,
                 int64_t to),
                (rows, packed, s, values, from, to))

// Rows [from, to) of dx.
MESA_TUNE_INLINE void rows_backward(const Rows& rows, const Packed& packed, const Settings& s, float* values,
                                    int64_t from, int64_t to) {
  const BatchNormBackward& task = rows.task;
  const int64_t n = task.channels, tile_rows = rows_per_tile(n, s);
  const Split parts = split(task.samples * n, s);
  const float* __restrict scale = rows.scale, * __restrict slope = rows.slope, * __restrict shift = rows.shift;
  for (int64_t row = from; row < to; row += tile_rows) {
    const int64_t count = std::min(tile_rows, to - row);
    const float* x = task.fixed ? nullptr : decode_slice(packed, s, parts, row * n, count * n, values);
    for (int64_t i = 0; i < count; ++i) {
      const float* __restrict grad = task.grad + (row + i) * n;
      float* __restrict dx = task.dx + (row + i) * n;
      if (x == nullptr) {
        for (int64_t j = 0; j < n; ++j) dx[j] = scale[j] * grad[j];
        continue;
      }
      const float* __restrict value = x + i * n;
      for (int64_t j = 0; j < n; ++j) dx[j] = scale[j] * grad[j] + (slope[j] * value[j] + shift[j]);
    }
  }
}
MESA_TUNE_PATHS(rows_backward,
                (const Rows& rows, const Packed& packed, const Settings& s, float* values, int64_t from,
                 int64_t to),
                (rows, packed, s, values, from, to))

void by_rows(const BatchNormBackward& task, const Packed& packed, const Settings& s) {
  const int64_t n = task.channels, tile_rows = rows_per_tile(n, s);
  const int64_t portion_rows = rows_per_portion(task.samples, kMinRows, n, s);
  const int64_t portions = ceil_div(task.samples, portion_rows), size = std::min(tile_rows, task.samples) * n;
  std::vector<float> sums(static_cast<size_t>(2 * portions * n)), coefficients(static_cast<size_t>(3 * n));
  float *scale = coefficients.data(), *slope = scale + n, *shift = slope + n;
  const Rows rows{task, portion_rows, sums.data(), scale, slope, shift};
  parallel(portions, portion_rows * n, [&](int64_t from, int64_t to) {
    sum_rows_paths[path()](rows, packed, s, decode_buffer(size, s).get(), from, to);
  });
  add_portions(sums, n, task.dw, task.db);
  for (int64_t i = 0; i < n; ++i) {
    const Coefficients c = task.coefficients(i);
    scale[i] = c.scale, slope[i] = c.slope, shift[i] = c.shift;
  }
  parallel(ceil_div(task.samples, tile_rows), tile_rows * n, [&](int64_t from, int64_t to) {
    rows_backward_paths[path()](rows, packed, s, decode_buffer(size, s).get(), from * tile_rows,
                                std::min(task.samples, to * tile_rows));
  });
}

}  // namespace

void batch_norm_backward(const BatchNormBackward& task, const Packed& packed, const Settings& settings) {
  std::fill_n(task.dw, task.channels, 0.0f);
  std::fill_n(task.db, task.channels, 0.0f);
  if (task.samples * task.channels * task.positions == 0) return;
  if (task.positions == 1) return by_rows(task, packed, settings);
  by_channels(task, packed, settings);
}

}  // namespace mesa_tune::cpu
