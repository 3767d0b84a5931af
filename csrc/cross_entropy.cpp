// The implementation of operator `cross_entropy_backward` (mesa_tune/ops/fused.py): checks the tensors and
// calls the kernel.

#include "cross_entropy.h"

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The factor of each row of dx, on the CPU.
std::vector<float> scales(const CrossEntropyBackward& task) {
  double total = 0;
  for (int64_t row = 0; row < task.rows; ++row) {
    if (!task.counts(row)) continue;
    STD_TORCH_CHECK(task.target[row] >= 0 && task.target[row] < task.classes, "expected a target below ",
                    task.classes, ", but got ", task.target[row]);
    total += task.weight_of(row);
  }
  const float divisor = task.mean ? static_cast<float>(total) : 1.0f;
  std::vector<float> scale(static_cast<size_t>(task.rows));
  for (int64_t row = 0; row < task.rows; ++row) scale[row] = task.scale_of(row, divisor);
  return scale;
}

Tensor cross_entropy_backward(Tensor data, Tensor ranges, Tensor target, Tensor surplus,
                              std::optional<Tensor> weight, Tensor grad, int64_t classes, int64_t ignore,
                              bool mean, int64_t bits, int64_t levels, int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor dense_grad = to_contiguous(grad), targets = to_contiguous(target);
  check_settings(s, dense_grad);
  STD_TORCH_CHECK(classes >= 0, "expected a non-negative number of classes, but got ", classes);
  const int64_t rows = targets.numel();
  const auto* indices =
      static_cast<const int64_t*>(dense_data(targets, dense_grad, ScalarType::Long, rows, "int64 targets"));
  const float* grads =
      float_data(dense_grad, dense_grad, dense_grad.numel() == 1 ? 1 : rows, "float32 gradient");
  const float* surpluses = float_data(surplus, dense_grad, rows, "float32 surplus");
  const float* weights =
      weight.has_value() ? float_data(*weight, dense_grad, classes, "class weights") : nullptr;
  const Packed packed = read_packed(data, ranges, dense_grad, rows * classes, s);
  std::vector<int64_t> sizes = targets.sizes().vec();
  sizes.push_back(classes);
  Tensor dx = empty_tensor(dense_grad, sizes, ScalarType::Float);
  const CrossEntropyBackward task{
      indices, surpluses, weights, grads,   dense_grad.numel() == 1,
      mean,    ignore,    rows,    classes, static_cast<float*>(dx.mutable_data_ptr())};
  dispatch(
      dense_grad, [&] { cpu::cross_entropy_backward(task, scales(task).data(), packed, s); },
      [&](auto stream) {
        const Tensor divisor = empty_tensor(dense_grad, {mean ? 1 : 0}, ScalarType::Float);
        cuda::cross_entropy_backward(task, packed, s, static_cast<float*>(divisor.mutable_data_ptr()),
                                     stream);
      });
  return dx;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("cross_entropy_backward", TORCH_BOX(&mesa_tune::cross_entropy_backward));
}
#ifdef MESA_TUNE_CUDA
STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CUDA, m) {
  m.impl("cross_entropy_backward", TORCH_BOX(&mesa_tune::cross_entropy_backward));
}
#endif
