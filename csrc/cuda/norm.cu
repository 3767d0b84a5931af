// The backward of norms over rows on CUDA devices, from their packed normalized input. A warp makes dx of a
// row; then each thread adds one column of a portion of the rows, and warps add the portions.

#include "encode.cuh"
#include "norm.h"
#include "portions.cuh"

namespace mesa_tune::cuda {
namespace {

// The task for a kernel, without the layouts of dense tensors.
struct Rows {
  Elements elements;
  const void* grad;
  void* dx;
  Numbers rstd, weight;
  float limit;
  int64_t rows, inner;
  bool centered;

  // Whether the xhat of this row counts as 0.
  __device__ bool constant(int64_t row) const { return rstd.load(row) >= limit; }
};

// One warp per row.
template <class Type>
__global__ void rows_backward(const __grid_constant__ Rows t) {
  const auto* const grads = static_cast<const typename Type::Storage*>(t.grad);
  auto* const out = static_cast<typename Type::Storage*>(t.dx);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t turn = thread_number(); turn / kWarp < t.rows; turn += thread_count()) {
    const int64_t row = turn / kWarp, first = row * t.inner;
    const bool constant = t.constant(row);
    float sum = 0, product = 0;
    Reader values(t.elements, first + lane, kWarp);
    for (int64_t i = lane; i < t.inner; i += kWarp, values.advance()) {
      const float u = Type::load(grads[first + i]) * t.weight.load(i);
      sum += u;
      product += u * (constant ? 0.0f : values.value());
    }
    const float count = static_cast<float>(t.inner);
    const float mean = t.centered ? warp_sum(sum) / count : 0.0f, slope = warp_sum(product) / count;
    Reader again(t.elements, first + lane, kWarp);
    for (int64_t i = lane; i < t.inner; i += kWarp, again.advance()) {
      const float u = Type::load(grads[first + i]) * t.weight.load(i);
      const float x = constant ? 0.0f : again.value();
      out[first + i] = Type::store((u - mean - x * slope) * t.rstd.load(row));
    }
  }
}

// One thread per column of a portion of the rows.
template <class Type>
__global__ void columns_backward(const __grid_constant__ Rows t, int64_t portions, float* sums) {
  const auto* const grads = static_cast<const typename Type::Storage*>(t.grad);
  const int64_t height = quotient(t.rows + portions - 1, portions);
  for (int64_t turn = thread_number(); turn < portions * t.inner; turn += thread_count()) {
    const int64_t portion = quotient(turn, t.inner), column = turn - portion * t.inner;
    const int64_t begin = portion * height, end = std::min(begin + height, t.rows);
    float dw = 0, db = 0;
    Reader values(t.elements, begin * t.inner + column, t.inner);
    for (int64_t row = begin; row < end; ++row, values.advance()) {
      const float grad = Type::load(grads[row * t.inner + column]);
      dw += grad * (t.constant(row) ? 0.0f : values.value());
      db += grad;
    }
    sums[2 * portion * t.inner + column] = dw;
    sums[(2 * portion + 1) * t.inner + column] = db;
  }
}

}  // namespace

int64_t norm_portions(int64_t rows, int64_t inner) {
  return portions_of(rows, inner);
}

void norm_backward(const NormBackward& task, const Packed& packed, const Settings& settings, float* sums,
                   void* stream) {
  const int64_t rows = task.rows, inner = task.inner, portions = norm_portions(rows, inner);
  const Elements elements{packed, settings, split(rows * inner, settings)};
  const Rows t{elements,   task.grad.data, task.dx.data, task.rstd,    task.weight,
               task.limit, rows,           inner,        task.centered};
  with_type(task.grad.dtype, [&](auto type) {
    using Type = decltype(type);
    launch(rows_backward<Type>, inner > 0 ? rows * kWarp : 0, stream, t);
    launch(columns_backward<Type>, portions * inner, stream, t, portions, sums);
  });
  launch(add_portions, inner * kWarp, stream, sums, portions, inner, task.dw, task.db);
}

}  // namespace mesa_tune::cuda
