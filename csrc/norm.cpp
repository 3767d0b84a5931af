// The CPU implementation of operator `norm_backward` (mesa_tune/ops/fused.py): checks the tensors and calls
// the kernel.

#include "norm.h"

#include <tuple>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor data, Tensor ranges, Tensor grad, Tensor rstd,
                                                 Tensor weight, bool centered, double limit, int64_t bits,
                                                 int64_t levels, int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor dense_grad = to_contiguous(grad);
  const int64_t numel = dense_grad.numel(), rows = rstd.numel(), inner = weight.numel();
  check_on_cpu(dense_grad);
  check_settings(s, dense_grad);
  STD_TORCH_CHECK(rows * inner == numel, "expected ", rows, " rows of ", inner, " elements, but got ", numel);
  const Tensor wide_ranges = ranges_of(ranges, s, dense_grad);
  const Packed packed = read_packed(data, wide_ranges, dense_grad, numel, s);
  const Tensor deviations = widened(rstd), scale = widened(weight);
  Tensor dx = empty_tensor_like(dense_grad);
  Tensor dw = empty_tensor_like(scale), db = empty_tensor_like(scale);
  const NormBackward task{strided(dense_grad, s),
                          float_data(deviations, dense_grad, rows, "reciprocal deviations"),
                          float_data(scale, dense_grad, inner, "weight"),
                          static_cast<float>(limit),
                          rows,
                          inner,
                          centered,
                          strided(dx, dx.mutable_data_ptr(), s),
                          static_cast<float*>(dw.mutable_data_ptr()),
                          static_cast<float*>(db.mutable_data_ptr())};
  cpu::norm_backward(task, packed, s);
  return {dx, narrowed(dw, weight), narrowed(db, weight)};
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("norm_backward", TORCH_BOX(&mesa_tune::norm_backward));
}
