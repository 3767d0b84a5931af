// The backward of a batch norm from its packed normalized input. Where a channel's elements of a sample are
// neighbours, some channels at a time: first their sums, then dx, for which the gradient is in the cache
// still. Else by rows of all channels: sums in portions of fixed rows, then dx. Neither the vector path nor
// the number of threads changes a bit.

#include "batch_norm.h"

#include <algorithm>
#include <vector>

#include "decoded.h"
#include "lanes.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kFewest = 64;  // rows of a portion: for fewer, its sums would take too much memory

// dx = scale * grad + (slope * xhat + shift) in one channel.
struct Line {
  float scale, slope, shift;
};

MESA_TUNE_INLINE Line line_of(const BatchNormBackward& task, int64_t channel) {
  const float scale = task.rstd[channel] * (task.weight == nullptr ? 1.0f : task.weight[channel]);
  const float each = -scale / static_cast<float>(task.samples * task.positions);
  return {scale, each * task.dw[channel], each * task.db[channel]};
}

int64_t channels_at_once(const BatchNormBackward& task) {
  return std::min(task.channels, std::max<int64_t>(1, kTile / task.positions));
}

// Adds the sums over one channel's neighbours.
MESA_TUNE_INLINE void add_run(const float* __restrict grad, const float* __restrict x, int64_t n, float& dw,
                              float& db) {
  const int64_t even = n - n % kLanes;
  Lanes first, second;
  for (int64_t i = 0; i < even; i += kLanes) {
    Lanes g = Lanes::read(grad + i);
    first.add(g);
    g.multiply(Lanes::read(x + i));
    second.add(g);
  }
  float sum = 0, product = 0;
  for (int64_t i = even; i < n; ++i) {
    sum += grad[i];
    product += grad[i] * x[i];
  }
  db += first.total() + sum;
  dw += second.total() + product;
}

MESA_TUNE_INLINE void run_backward(const Line& line, const float* __restrict grad, const float* __restrict x,
                                   int64_t n, float* __restrict dx) {
  for (int64_t i = 0; i < n; ++i) dx[i] = line.scale * grad[i] + (line.slope * x[i] + line.shift);
}

// Channels `first` to `first + count`.
MESA_TUNE_INLINE void channels_backward(const BatchNormBackward& task, const Packed& packed,
                                        const Settings& s, const Split& parts, float* values, int64_t first,
                                        int64_t count) {
  const int64_t n = task.positions;
  for (int64_t sample = 0; sample < task.samples; ++sample) {
    const int64_t at = (sample * task.channels + first) * n;
    const float* x = decode_slice(packed, s, parts, at, count * n, values);
    for (int64_t i = 0; i < count; ++i)
      add_run(task.grad + at + i * n, x + i * n, n, task.dw[first + i], task.db[first + i]);
  }
  for (int64_t sample = 0; sample < task.samples; ++sample) {
    const int64_t at = (sample * task.channels + first) * n;
    const float* x = task.fixed ? nullptr : decode_slice(packed, s, parts, at, count * n, values);
    for (int64_t i = 0; i < count; ++i) {
      const Line line = line_of(task, first + i);
      const float* __restrict grad = task.grad + at + i * n;
      float* __restrict dx = task.dx + at + i * n;
      if (x != nullptr) {
        run_backward(line, grad, x + i * n, n, dx);
      } else {
        for (int64_t j = 0; j < n; ++j) dx[j] = line.scale * grad[j];
      }
    }
  }
}

MESA_TUNE_INLINE void some_channels(const BatchNormBackward& task, const Packed& packed, const Settings& s,
                                    float* values, int64_t from, int64_t to) {
  const Split parts = split(task.samples * task.channels * task.positions, s);
  const int64_t each = channels_at_once(task);
  for (int64_t first = from * each; first < std::min(task.channels, to * each); first += each)
    channels_backward(task, packed, s, parts, values, first, std::min(each, task.channels - first));
}
MESA_TUNE_PATHS(some_channels,
                (const BatchNormBackward& task, const Packed& packed, const Settings& s, float* values,
                 int64_t from, int64_t to),
                (task, packed, s, values, from, to))

void by_channels(const BatchNormBackward& task, const Packed& packed, const Settings& s) {
  const int64_t each = channels_at_once(task);
  parallel(ceil_div(task.channels, each), task.samples * each * task.positions, [&](int64_t from, int64_t to) {
    const auto values = decode_buffer(each * task.positions, s);
    some_channels_paths[path()](task, packed, s, values.get(), from, to);
  });
}

// Rows of one number a channel, and what is known of each channel.
struct Rows {
  const BatchNormBackward& task;
  int64_t portion;  // so many at a time have sums of their own
  float* sums;
  const float *scale, *slope, *shift;
};

MESA_TUNE_INLINE void sum_rows(const Rows& rows, const Packed& packed, const Settings& s, float* values,
                               int64_t from, int64_t to) {
  const BatchNormBackward& task = rows.task;
  const int64_t n = task.channels, each = rows_per_tile(n, s);
  const Split parts = split(task.samples * n, s);
  for (int64_t at = from; at < to; ++at) {
    float* __restrict dw = rows.sums + 2 * at * n, * __restrict db = dw + n;
    const int64_t end = std::min(task.samples, (at + 1) * rows.portion);
    for (int64_t row = at * rows.portion; row < end; row += each) {
      const int64_t count = std::min(each, end - row);
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

// Rows `from` to `to` of dx.
MESA_TUNE_INLINE void make_rows(const Rows& rows, const Packed& packed, const Settings& s, float* values,
                                int64_t from, int64_t to) {
  const BatchNormBackward& task = rows.task;
  const int64_t n = task.channels, each = rows_per_tile(n, s);
  const Split parts = split(task.samples * n, s);
  const float* __restrict scale = rows.scale, * __restrict slope = rows.slope, * __restrict shift = rows.shift;
  for (int64_t row = from; row < to; row += each) {
    const int64_t count = std::min(each, to - row);
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
MESA_TUNE_PATHS(make_rows,
                (const Rows& rows, const Packed& packed, const Settings& s, float* values, int64_t from,
                 int64_t to),
                (rows, packed, s, values, from, to))

void by_rows(const BatchNormBackward& task, const Packed& packed, const Settings& s) {
  const int64_t n = task.channels, each = rows_per_tile(n, s);
  const int64_t portion = rows_per_portion(task.samples, kFewest, n, s);
  const int64_t portions = ceil_div(task.samples, portion), space = std::min(each, task.samples) * n;
  std::vector<float> sums(static_cast<size_t>(2 * portions * n)), lines(static_cast<size_t>(3 * n));
  const Rows rows{task, portion, sums.data(), lines.data(), lines.data() + n, lines.data() + 2 * n};
  parallel(portions, portion * n, [&](int64_t from, int64_t to) {
    sum_rows_paths[path()](rows, packed, s, decode_buffer(space, s).get(), from, to);
  });
  add_portions(sums, n, task.dw, task.db);
  for (int64_t i = 0; i < n; ++i) {
    const Line line = line_of(task, i);
    lines[i] = line.scale, lines[n + i] = line.slope, lines[2 * n + i] = line.shift;
  }
  parallel(ceil_div(task.samples, each), each * n, [&](int64_t from, int64_t to) {
    make_rows_paths[path()](rows, packed, s, decode_buffer(space, s).get(), from * each,
                            std::min(task.samples, to * each));
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
