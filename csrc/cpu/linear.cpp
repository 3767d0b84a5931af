// A linear layer's gradients from its packed input, some rows at a time: they are decoded into the cache,
// where the gradient's rows are read once for all three results. Products are PyTorch's.

#include "linear.h"

#include <algorithm>
#include <vector>

#include "decoded.h"
#include "paths.h"
#include "products.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kAtOnce = 1 << 17;          // elements of x and of the gradient together, in
constexpr int64_t kFewest = 64, kMost = 256;  // so many rows
constexpr int64_t kWork = 1 << 18;            // multiplications that are worth a thread

int64_t rows_per_chunk(const LinearBackward& task, const Settings& s) {
  return rows_to_group(std::clamp(kAtOnce / (task.in + task.out), kFewest, kMost), task.in, s);
}

// How threads share the work: by rows, where each part sums up a dw of its own, as long as these take no
// more than x decoded as a whole; beyond that by columns, whose threads all decode the same rows.
struct Shares {
  int64_t rows;
  int64_t columns;
};

Shares shares(const LinearBackward& task) {
  const int64_t threads =
      std::clamp<int64_t>(task.rows * task.in * task.out / kWork, 1, torch::stable::get_num_threads());
  int64_t rows = threads;
  while (threads % rows != 0 || (rows - 1) * std::max(task.out, kFewest) > task.rows) --rows;
  return {rows, threads / rows};
}

// Part `number` of `of` of a count.
struct Part {
  Part(int64_t count, int64_t number, int64_t of, int64_t step = 1) {
    const int64_t each = ceil_div(ceil_div(count, of), step) * step;
    first = std::min(number * each, count);
    size = std::min(each, count - first);
  }
  int64_t first;
  int64_t size;
};

// Rows of x, and the sums of what the gradient has there in some columns.
struct Chunk {
  int64_t first;
  int64_t count;
  float* values;
  const Part& columns;
  float* sums;
  const float* x = nullptr;
};

MESA_TUNE_INLINE void take(const LinearBackward& task, const Packed& packed, const Settings& s,
                           const Split& parts, Chunk& chunk) {
  chunk.x = decode_slice(packed, s, parts, chunk.first * task.in, chunk.count * task.in, chunk.values);
  float* __restrict sums = chunk.sums;
  const int64_t n = chunk.columns.size;
  std::fill_n(sums, task.db == nullptr ? 0 : n, 0.0f);
  for (int64_t i = 0; task.db != nullptr && i < chunk.count; ++i) {
    const float* __restrict grad = task.grad + (chunk.first + i) * task.out + chunk.columns.first;
    for (int64_t j = 0; j < n; ++j) sums[j] += grad[j];
  }
}
MESA_TUNE_PATHS(take,
                (const LinearBackward& task, const Packed& packed, const Settings& s, const Split& parts,
                 Chunk& chunk),
                (task, packed, s, parts, chunk))

// The rows and columns of one thread, into its own dw and db.
void backward(const LinearBackward& task, const Packed& packed, const Settings& s, const Part& rows,
              const Part& outs, const Part& ins) {
  const Split parts = split(task.rows * task.in, s);
  const int64_t each = rows_per_chunk(task, s);
  const auto values = decode_buffer(std::min(each, rows.size) * task.in, s);
  std::vector<float> sums(static_cast<size_t>(outs.size));
  const auto dw =
      matrix(task.dw.data + outs.first * task.dw.row_stride, outs.size, task.in, task.dw.row_stride, task.dw.column_stride);
  for (int64_t first = rows.first; first < rows.first + rows.size; first += each) {
    const int64_t count = std::min(each, rows.first + rows.size - first);
    Chunk chunk{first, count, values.get(), outs, sums.data()};
    take_paths[path()](task, packed, s, parts, chunk);
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
      product(matrix(task.dx + first * task.in + ins.first, count, ins.size, task.in),
              matrix(grads, count, task.out, task.out),
              matrix(w.data + ins.first * w.column_stride, task.out, ins.size, w.row_stride, w.column_stride));
    }
    for (int64_t j = 0; task.db != nullptr && j < outs.size; ++j) task.db[outs.first + j] += sums[j];
  }
}

}  // namespace

void linear_backward(const LinearBackward& task, const Packed& packed, const Settings& s) {
  const int64_t numel = task.out * task.in;
  if (task.db != nullptr) std::fill_n(task.db, task.out, 0.0f);
  if (task.rows == 0) {
    std::fill_n(task.dw.data, numel, 0.0f);
    return;
  }
  const Shares share = shares(task);
  const int64_t step = rows_between_groups(kFewest, task.in, s), more = share.rows - 1;
  std::vector<float> dw(static_cast<size_t>(more * numel)), db(static_cast<size_t>(more * task.out));
  torch::stable::parallel_for(0, share.rows * share.columns, 1, [&](int64_t from, int64_t to) {
    for (int64_t job = from; job < to; ++job) {
      const int64_t row = job / share.columns, column = job % share.columns;
      LinearBackward own = task;
      if (row > 0) {
        own.dw.data = dw.data() + (row - 1) * numel;
        own.db = task.db == nullptr ? nullptr : db.data() + (row - 1) * task.out;
      }
      backward(own, packed, s, Part(task.rows, row, share.rows, step), Part(task.out, column, share.columns),
               Part(task.in, column, share.columns));
    }
  });
  parallel(numel, 1, [&](int64_t from, int64_t to) {
    for (int64_t row = 0; row < more; ++row)
      for (int64_t i = from; i < to; ++i) task.dw.data[i] += dw[row * numel + i];
  });
  for (int64_t row = 0; task.db != nullptr && row < more; ++row)
    for (int64_t i = 0; i < task.out; ++i) task.db[i] += db[row * task.out + i];
}

}  // namespace mesa_tune::cpu
