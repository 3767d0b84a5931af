// The implementation of operator `softmax_backward` (mesa_tune/ops/fused.py): checks the tensors and
// calls the kernel.

#include "softmax.h"

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::stable::Tensor;

Tensor softmax_backward(Tensor data, Tensor ranges, Tensor grad, int64_t bits, int64_t levels,
                        int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor dense_grad = to_contiguous(grad);
  check_settings(s, dense_grad);
  const int64_t numel = dense_grad.numel(), dims = dense_grad.dim(),
                width = dims == 0 ? 1 : dense_grad.size(dims - 1);
  const Packed packed = read_packed(data, ranges, dense_grad, numel, s);
  Tensor dx = empty_tensor_like(dense_grad);
  const SoftmaxBackward task{float_data(dense_grad, dense_grad, numel, "float32 gradient"),
                             numel / std::max<int64_t>(1, width), width,
                             static_cast<float*>(dx.mutable_data_ptr())};
  dispatch(
      dense_grad, [&] { cpu::softmax_backward(task, packed, s); },
      [&](auto stream) { cuda::softmax_backward(task, packed, s, stream); });
  return dx;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("softmax_backward", TORCH_BOX(&mesa_tune::softmax_backward));
}
#ifdef MESA_TUNE_CUDA
STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CUDA, m) {
  m.impl("softmax_backward", TORCH_BOX(&mesa_tune::softmax_backward));
}
#endif
