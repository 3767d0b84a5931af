// The CPU implementation of operator `linear_backward` (mesa_tune/ops/fused.py): checks the tensors and calls
// the kernel.

#include "linear.h"

#include <optional>
#include <tuple>
#include <vector>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tensor for a result; without elements if the result is not requested.
Tensor result(const Tensor& like, bool requested, std::vector<int64_t> sizes) {
  return empty_tensor(like, requested ? sizes : std::vector<int64_t>{0}, ScalarType::Float);
}

float* result_data(const Tensor& x, bool requested) {
  return requested ? static_cast<float*>(x.mutable_data_ptr()) : nullptr;
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(Tensor data, Tensor ranges, Tensor grad,
                                                   std::optional<Tensor> weight, int64_t width,
                                                   bool transposed, bool bias, int64_t bits, int64_t levels,
                                                   int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor dense_grad = to_contiguous(grad);
  check_on_cpu(dense_grad);
  check_settings(s, dense_grad);
  STD_TORCH_CHECK(dense_grad.dim() > 0 && width > 0, "expected a gradient of rows, and an input of a width");
  std::vector<int64_t> sizes = dense_grad.sizes().vec();
  const int64_t out = sizes.back();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  sizes.back() = width;
  const int64_t weight_rows = transposed ? width : out, weight_columns = transposed ? out : width;
  Matrix<const float> weights{nullptr, 0, 0};
  if (weight.has_value()) {
    STD_TORCH_CHECK(same_device(*weight, dense_grad) && weight->scalar_type() == ScalarType::Float &&
                        weight->dim() == 2 && weight->size(0) == weight_rows &&
                        weight->size(1) == weight_columns,
                    "expected a float32 weight of shape (", weight_rows, ", ", weight_columns, ")");
    weights = {static_cast<const float*>(weight->const_data_ptr()), weight->stride(transposed ? 1 : 0),
               weight->stride(transposed ? 0 : 1)};
  }
  const Packed packed = read_packed(data, ranges, dense_grad, rows * width, s);
  Tensor dx = result(dense_grad, weight.has_value(), sizes),
         dw = result(dense_grad, true, {weight_rows, weight_columns});
  Tensor db = result(dense_grad, bias, {out});
  const LinearBackward task{float_data(dense_grad, dense_grad, rows * out, "float32 gradient"),
                            weights,
                            result_data(dx, weight.has_value()),
                            {result_data(dw, true), transposed ? 1 : width, transposed ? out : 1},
                            result_data(db, bias),
                            rows,
                            out,
                            width};
  cpu::linear_backward(task, packed, s);
  return {dx, dw, db};
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("linear_backward", TORCH_BOX(&mesa_tune::linear_backward));
}
