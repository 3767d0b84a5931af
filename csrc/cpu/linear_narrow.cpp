// A linear layer's gradients in 16 bits from its packed input. Matrix products are PyTorch's, on all threads.
// Some rows of x are decoded at a time. What is hard is that their sums for dw must not be rounded to 16 bits
// before they are added.

#include <algorithm>
#include <vector>

#include "decoded.h"
#include "linear.h"
#include "paths.h"
#include "products.h"

namespace mesa_tune::cpu {
namespace {

using Task = LinearBackward<uint16_t>;

constexpr int64_t kChunk = 1 << 19;  // elements of x that are decoded at a time
constexpr int64_t kColumns = 64;     // columns of the gradient that a thread adds at a time

template <class Visit>
MESA_TUNE_INLINE void with_type(Dtype dtype, const Visit& visit) {
  if (dtype == Dtype::kHalf) {
    visit(Half());
  } else {
    visit(BFloat16());
  }
}

MESA_TUNE_INLINE void narrow(Dtype dtype, const float* __restrict values, int64_t n,
                             uint16_t* __restrict out) {
  with_type(dtype, [&](auto type) MESA_TUNE_FLATTEN {
    for (int64_t i = 0; i < n; ++i) out[i] = decltype(type)::store(values[i]);
  });
}

// Rows [first, first + count) of x; `tile` of them are decoded at a time.
struct Chunk {
  int64_t first, count, tile;
  uint16_t* x;
};

// Tiles [from, to) of a chunk.
MESA_TUNE_INLINE void decode_tiles(const Task& task, const Packed& packed, const Settings& s,
                                   const Chunk& chunk, float* values, int64_t from, int64_t to) {
  const Split parts = split(task.rows * task.in, s);
  for (int64_t tile = from; tile < to; ++tile) {
    const int64_t begin = tile * chunk.tile, row = chunk.first + begin;
    const int64_t count = std::min(chunk.tile, chunk.count - begin), n = count * task.in;
    float* x = decode_slice(packed, s, parts, row * task.in, n, values);
    clear_rows(task.zero_rows, row, count, task.in * int64_t{sizeof(float)}, x);
    narrow(task.dtype, x, n, chunk.x + begin * task.in);
  }
}
MESA_TUNE_PATHS(decode_tiles,
                (const Task& task, const Packed& packed, const Settings& s, const Chunk& chunk, float* values,
                 int64_t from, int64_t to),
                (task, packed, s, chunk, values, from, to))

// Sums of columns [first, last) of the gradient.
MESA_TUNE_INLINE void add_columns(const Task& task, int64_t first, int64_t last) {
  float sums[kColumns] = {};
  with_type(task.dtype, [&](auto type) MESA_TUNE_FLATTEN {
    for (int64_t row = 0; row < task.rows; ++row) {
      const uint16_t* __restrict grad = task.grad + row * task.out + first;
      for (int64_t i = 0; i < last - first; ++i) sums[i] += decltype(type)::load(grad[i]);
    }
  });
  narrow(task.dtype, sums, last - first, task.db + first);
}
MESA_TUNE_PATHS(add_columns, (const Task& task, int64_t first, int64_t last), (task, first, last))

MESA_TUNE_INLINE void add(Dtype dtype, const uint16_t* __restrict part, int64_t from, int64_t to,
                          float* __restrict sums) {
  with_type(dtype, [&](auto type) MESA_TUNE_FLATTEN {
    for (int64_t i = from; i < to; ++i) sums[i] += decltype(type)::load(part[i]);
  });
}
MESA_TUNE_PATHS(add, (Dtype dtype, const uint16_t* part, int64_t from, int64_t to, float* sums),
                (dtype, part, from, to, sums))

// dw of some rows, in the layout of the weight.
void weight_gradient(const Task& task, const Chunk& chunk, uint16_t* dw) {
  const uint16_t* grad = task.grad + chunk.first * task.out;
  if (task.transposed) {
    product(matrix(dw, task.dtype, task.in, task.out, task.out),
            transposed(chunk.x, task.dtype, chunk.count, task.in, task.in),
            matrix(grad, task.dtype, chunk.count, task.out, task.out));
  } else {
    product(matrix(dw, task.dtype, task.out, task.in, task.in),
            transposed(grad, task.dtype, chunk.count, task.out, task.out),
            matrix(chunk.x, task.dtype, chunk.count, task.in, task.in));
  }
}

}  // namespace

void linear_backward(const Task& task, const Packed& packed, const Settings& s) {
  const int64_t rows = task.rows, numel = task.out * task.in;
  if (task.db != nullptr) {
    parallel(ceil_div(task.out, kColumns), kColumns * std::max<int64_t>(rows, 1),
             [&](int64_t from, int64_t to) {
               for (int64_t i = from; i < to; ++i)
                 add_columns_paths[path()](task, i * kColumns, std::min((i + 1) * kColumns, task.out));
             });
  }
  if (rows == 0) {
    std::fill_n(task.dw, numel, uint16_t{0});
    return;
  }
  const Matrix<const uint16_t>& w = task.weight;
  if (task.dx != nullptr) {
    product(matrix(task.dx, task.dtype, rows, task.in, task.in),
            matrix(task.grad, task.dtype, rows, task.out, task.out),
            matrix(w.data, task.dtype, task.out, task.in, w.row_stride, w.column_stride));
  }
  const int64_t tile = rows_per_tile(task.in, s);
  const int64_t most = std::min(rows, ceil_div(std::max<int64_t>(1, kChunk / task.in), tile) * tile);
  std::vector<uint16_t> x(static_cast<size_t>(most * task.in));
  std::vector<uint16_t> part(static_cast<size_t>(most < rows ? numel : 0));
  std::vector<float> sums(part.size());
  for (int64_t first = 0; first < rows; first += most) {
    const Chunk chunk{first, std::min(most, rows - first), tile, x.data()};
    parallel(ceil_div(chunk.count, tile), tile * task.in, [&](int64_t from, int64_t to) {
      const auto values = decode_buffer(tile * task.in, s);
      decode_tiles_paths[path()](task, packed, s, chunk, values.get(), from, to);
    });
    if (part.empty()) return weight_gradient(task, chunk, task.dw);
    weight_gradient(task, chunk, part.data());
    parallel(numel, 1, [&](int64_t from, int64_t to) {
      add_paths[path()](task.dtype, part.data(), from, to, sums.data());
    });
  }
  parallel(numel, 1, [&](int64_t from, int64_t to) {
    narrow(task.dtype, sums.data() + from, to - from, task.dw + from);
  });
}

}  // namespace mesa_tune::cpu
