// A linear layer's gradients from its packed input. Chunks of rows are decoded into the cache, and used there
// with the same rows of the gradient for all three results. Matrix products are PyTorch's. What is hard is
// the division of work: threads that split the rows need a dw of their own, threads that split the columns
// decode the same rows.

#include "linear.h"

#include <algorithm>
#include <vector>

#include "decoded.h"
#include "paths.h"
#include "products.h"

namespace mesa_tune::cpu {
namespace {

using Task = LinearBackward<float>;

constexpr int64_t kChunk = 1 << 17;               // elements of x and of the gradient together in one chunk
constexpr int64_t kMinRows = 64, kMaxRows = 256;  // rows of one chunk
constexpr int64_t kGrain = 1 << 18;               // fewest multiplications per thread

int64_t rows_per_chunk(const Task& task, const Settings& s) {
  return rows_to_group(std::clamp(kChunk / (task.in + task.out), kMinRows, kMaxRows), task.in, s);
}

// The numbers of parts into which rows and columns are divided; rows * columns is the number of threads. Rows
// are divided as far as the parts' copies of dw together are no larger than x, then columns.
struct Division {
  int64_t rows;
  int64_t columns;
};

Division divide(const Task& task) {
  const int64_t threads =
      std::clamp<int64_t>(task.rows * task.in * task.out / kGrain, 1, torch::stable::get_num_threads());
  int64_t rows = threads;
  while (threads % rows != 0 || (rows - 1) * std::max(task.out, kMinRows) > task.rows) --rows;
  return {rows, threads / rows};
}

// Part `index` of `parts` equal parts of `count` items; sizes are multiples of `step`, but for the end.
struct Part {
  Part(int64_t count, int64_t index, int64_t parts, int64_t step = 1) {
    const int64_t full = ceil_div(ceil_div(count, parts), step) * step;
    first = std::min(index * full, count);
    size = std::min(full, count - first);
  }
  int64_t first;
  int64_t size;
};

// Rows [first, first + count) of x, and the sums of the gradient's elements in these rows and some columns.
struct Chunk {
  int64_t first;
  int64_t count;
  float* values;  // buffer for x
  const Part& columns;
  float* sums;
  const float* x = nullptr;  // in `values`
};

// Decodes the chunk's x and computes its sums.
MESA_TUNE_INLINE void load_chunk(const Task& task, const Packed& packed, const Settings& s,
                                 const Split& parts, Chunk& chunk) {
  float* x = decode_slice(packed, s, parts, chunk.first * task.in, chunk.count * task.in, chunk.values);
  clear_rows(task.zero_rows, chunk.first, chunk.count, task.in * int64_t{sizeof(float)}, x);
  chunk.x = x;
  float* __restrict sums = chunk.sums;
  const int64_t n = chunk.columns.size;
  std::fill_n(sums, task.db == nullptr ? 0 : n, 0.0f);
  for (int64_t i = 0; task.db != nullptr && i < chunk.count; ++i) {
    const float* __restrict grad = task.grad + (chunk.first + i) * task.out + chunk.columns.first;
    for (int64_t j = 0; j < n; ++j) sums[j] += grad[j];
  }
}
MESA_TUNE_PATHS(load_chunk,
                (const Task& task, const Packed& packed, const Settings& s, const Split& parts, Chunk& chunk),
                (task, packed, s, parts, chunk))

// The rows and columns of one thread: their part of dx, and their sums in the dw and db of `task`.
void backward(const Task& task, const Packed& packed, const Settings& s, const Part& rows, const Part& outs,
              const Part& ins) {
  const Split parts = split(task.rows * task.in, s);
  const int64_t chunk_rows = rows_per_chunk(task, s);
  const auto values = decode_buffer(std::min(chunk_rows, rows.size) * task.in, s);
  std::vector<float> sums(static_cast<size_t>(outs.size));
  const int64_t row_stride = task.transposed ? 1 : task.in, column_stride = task.transposed ? task.out : 1;
  const auto dw = matrix(task.dw + outs.first * row_stride, outs.size, task.in, row_stride, column_stride);
  for (int64_t first = rows.first; first < rows.first + rows.size; first += chunk_rows) {
    const int64_t count = std::min(chunk_rows, rows.first + rows.size - first);
    Chunk chunk{first, count, values.get(), outs, sums.data()};
    load_chunk_paths[path()](task, packed, s, parts, chunk);
    const auto x = matrix(chunk.x, count, task.in, task.in);
    const float* grads = task.grad + first * task.out;
    const auto grad = transposed(grads + outs.first, count, outs.size, task.out);
    if (first == rows.first) {
      product(dw, grad, x);
    } else {
      add_product(dw, grad, x);
    }
    if (task.dx != nullptr) {
      const Matrix<const float>& w = task.weight;
      product(
          matrix(task.dx + first * task.in + ins.first, count, ins.size, task.in),
          matrix(grads, count, task.out, task.out),
          matrix(w.data + ins.first * w.column_stride, task.out, ins.size, w.row_stride, w.column_stride));
    }
    for (int64_t j = 0; task.db != nullptr && j < outs.size; ++j) task.db[outs.first + j] += sums[j];
  }
}

}  // namespace

void linear_backward(const Task& task, const Packed& packed, const Settings& s) {
  const int64_t numel = task.out * task.in;
  if (task.db != nullptr) std::fill_n(task.db, task.out, 0.0f);
  if (task.rows == 0) {
    std::fill_n(task.dw, numel, 0.0f);
    return;
  }
  const Division parts = divide(task);
  const int64_t step = rows_between_groups(kMinRows, task.in, s);
  const int64_t copies = parts.rows - 1;  // of dw and db: the first part of the rows writes to the result
  std::vector<float> dw(static_cast<size_t>(copies * numel)), db(static_cast<size_t>(copies * task.out));
  torch::stable::parallel_for(0, parts.rows * parts.columns, 1, [&](int64_t from, int64_t to) {
    for (int64_t part = from; part < to; ++part) {
      const int64_t row = part / parts.columns, column = part % parts.columns;
      Task part_task = task;
      if (row > 0) {
        part_task.dw = dw.data() + (row - 1) * numel;
        part_task.db = task.db == nullptr ? nullptr : db.data() + (row - 1) * task.out;
      }
      backward(part_task, packed, s, Part(task.rows, row, parts.rows, step),
               Part(task.out, column, parts.columns), Part(task.in, column, parts.columns));
    }
  });
  parallel(numel, 1, [&](int64_t from, int64_t to) {
    for (int64_t row = 0; row < copies; ++row)
      for (int64_t i = from; i < to; ++i) task.dw[i] += dw[row * numel + i];
  });
  for (int64_t row = 0; task.db != nullptr && row < copies; ++row)
    for (int64_t i = 0; i < task.out; ++i) task.db[i] += db[row * task.out + i];
}

}  // namespace mesa_tune::cpu
