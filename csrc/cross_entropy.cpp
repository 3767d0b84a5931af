// Gives the CPU's kernel to `cross_entropy_backward` of mesa_tune/ops/fused.py.

#include "cross_entropy.h"

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What each row's gradient is multiplied by; 0 where its target is ignored.
std::vector<float> scales(const int64_t* target, const float* weight, const float* grad, bool one_grad,
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
    if (target[row] != ignore) scale[row] *= grad[one_grad ? 0 : row] / divisor;
  return scale;
}

Tensor cross_entropy_backward(Tensor data, Tensor ranges, Tensor target, Tensor surplus,
                              std::optional<Tensor> weight, Tensor grad, int64_t classes, int64_t ignore,
                              bool mean, int64_t bits, int64_t levels, int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor given = to_contiguous(grad), wanted = to_contiguous(target);
  check_on_cpu(given);
  check_settings(s, given);
  STD_TORCH_CHECK(classes >= 0, "expected no negative number of classes, but got ", classes);
  const int64_t rows = wanted.numel();
  const auto* indices =
      static_cast<const int64_t*>(dense(wanted, given, ScalarType::Long, rows, "int64 targets"));
  const float* incoming = floats(given, given, given.numel() == 1 ? 1 : rows, "float32 gradient");
  const float* at_target = floats(surplus, given, rows, "float32 surplus");
  const float* weights = weight.has_value() ? floats(*weight, given, classes, "class weights") : nullptr;
  const Packed packed = read_packed(data, ranges, given, rows * classes, s);
  std::vector<int64_t> sizes = wanted.sizes().vec();
  sizes.push_back(classes);
  Tensor dx = fresh(given, sizes, ScalarType::Float);
  const std::vector<float> scale =
      scales(indices, weights, incoming, given.numel() == 1, rows, classes, ignore, mean);
  cpu::cross_entropy_backward(
      {indices, at_target, scale.data(), rows, classes, static_cast<float*>(dx.mutable_data_ptr())}, packed,
      s);
  return dx;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("cross_entropy_backward", TORCH_BOX(&mesa_tune::cross_entropy_backward));
}
