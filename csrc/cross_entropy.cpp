// The CPU implementation of operator `cross_entropy_backward` (mesa_tune/ops/fused.py): checks the tensors
// and calls the kernel.

#include "cross_entropy.h"

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The factor of each row of dx: weight times incoming gradient, divided by the sum of weights for a mean; 0
// where the target is ignored.
std::vector<float> scales(const int64_t* target, const float* weight, const float* grad, bool single_grad,
                          int64_t rows, int64_t classes, int64_t ignore, bool mean) {
  std::vector<float> scale(static_cast<size_t>(rows));
  double total = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (target[row] == ignore) continue;
    STD_TORCH_CHECK(target[row] >= 0 && target[row] < classes, "expected a target below ", classes,
                    ", but got ", target[row]);
    scale[row] = weight == nullptr ? 1.0f : weight[target[row]];
    total += scale[row];
  }
  const float divisor = mean ? static_cast<float>(total) : 1.0f;
  for (int64_t row = 0; row < rows; ++row)
    if (target[row] != ignore) scale[row] *= grad[single_grad ? 0 : row] / divisor;
  return scale;
}

Tensor cross_entropy_backward(Tensor data, Tensor ranges, Tensor target, Tensor surplus,
                              std::optional<Tensor> weight, Tensor grad, int64_t classes, int64_t ignore,
                              bool mean, int64_t bits, int64_t levels, int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor dense_grad = to_contiguous(grad), targets = to_contiguous(target);
  check_on_cpu(dense_grad);
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
  const std::vector<float> scale =
      scales(indices, weights, grads, dense_grad.numel() == 1, rows, classes, ignore, mean);
  cpu::cross_entropy_backward(
      {indices, surpluses, scale.data(), rows, classes, static_cast<float*>(dx.mutable_data_ptr())}, packed,
      s);
  return dx;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("cross_entropy_backward", TORCH_BOX(&mesa_tune::cross_entropy_backward));
}
