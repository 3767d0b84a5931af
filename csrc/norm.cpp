// The implementation of operator `norm_backward` (mesa_tune/ops/fused.py): checks the tensors and calls
// the kernel.

#include "norm.h"

#include <tuple>

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Numbers numbers(const Tensor& x) {
  return {const_cast<void*>(x.const_data_ptr()), dtype_of(x.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor data, Tensor ranges, Tensor grad, Tensor rstd,
                                                 Tensor weight, bool centered, double limit, int64_t bits,
                                                 int64_t levels, int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor dense_grad = to_contiguous(grad);
  const int64_t numel = dense_grad.numel(), rows = rstd.numel(), inner = weight.numel();
  check_settings(s, dense_grad);
  STD_TORCH_CHECK(rows * inner == numel, "expected ", rows, " rows of ", inner, " elements, but got ", numel);
  STD_TORCH_CHECK(same_device(rstd, grad) && same_device(weight, grad),
                  "expected reciprocal deviations and weight on the device of the gradient");
  const Packed packed = read_packed(data, ranges, dense_grad, numel, s);
  const bool on_cpu = grad.is_cpu();
  const Tensor deviations = on_cpu ? widened(rstd) : to_contiguous(rstd);
  const Tensor scale = on_cpu ? widened(weight) : to_contiguous(weight);
  const Tensor dx = empty_tensor_like(dense_grad), dw = empty_tensor_like(scale),
               db = empty_tensor_like(scale);
  const NormBackward task{strided(dense_grad, s),
                          numbers(deviations),
                          numbers(scale),
                          static_cast<float>(limit),
                          rows,
                          inner,
                          centered,
                          strided(dx, s),
                          numbers(dw),
                          numbers(db)};
  dispatch(
      dense_grad, [&] { cpu::norm_backward(task, packed, s); },
      [&](auto stream) {
        const int64_t size = 2 * cuda::norm_portions(rows, inner) * inner;
        const Tensor sums = empty_tensor(dense_grad, {size}, ScalarType::Float);
        cuda::norm_backward(task, packed, s, numbers(sums).floats(), stream);
      });
  return {dx, on_cpu ? narrowed(dw, weight) : dw, on_cpu ? narrowed(db, weight) : db};
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("norm_backward", TORCH_BOX(&mesa_tune::norm_backward));
}
#ifdef MESA_TUNE_CUDA
STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CUDA, m) {
  m.impl("norm_backward", TORCH_BOX(&mesa_tune::norm_backward));
}
#endif
