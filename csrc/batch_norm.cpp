// The implementation of operator `batch_norm_backward` (mesa_tune/ops/fused.py): checks the tensors and calls
// the kernel.

#include "batch_norm.h"

#include <optional>
#include <tuple>

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(Tensor data, Tensor ranges, Tensor grad, Tensor rstd,
                                                       std::optional<Tensor> weight, bool last, bool fixed,
                                                       int64_t bits, int64_t levels, int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor dense_grad = to_contiguous(grad);
  check_settings(s, dense_grad);
  const int64_t dims = dense_grad.dim(), numel = dense_grad.numel();
  STD_TORCH_CHECK(dims > 1, "expected a gradient of samples and channels");
  const int64_t channels = dense_grad.size(last ? dims - 1 : 1), all = numel / std::max<int64_t>(1, channels);
  const int64_t samples = last ? all : dense_grad.size(0),
                positions = last ? 1 : all / std::max<int64_t>(1, samples);
  const Packed packed = read_packed(data, ranges, dense_grad, numel, s);
  Tensor dx = empty_tensor_like(dense_grad),
         dw = empty_tensor(dense_grad, {channels}, dense_grad.scalar_type());
  Tensor db = empty_tensor_like(dw);
  const BatchNormBackward task{
      float_data(dense_grad, dense_grad, numel, "float32 gradient"),
      float_data(rstd, dense_grad, channels, "reciprocal deviations"),
      weight.has_value() ? float_data(*weight, dense_grad, channels, "weight") : nullptr,
      samples,
      channels,
      positions,
      fixed,
      static_cast<float*>(dx.mutable_data_ptr()),
      static_cast<float*>(dw.mutable_data_ptr()),
      static_cast<float*>(db.mutable_data_ptr())};
  dispatch(
      dense_grad, [&] { cpu::batch_norm_backward(task, packed, s); },
      [&](auto stream) {
        const int64_t portions = cuda::batch_norm_portions(task);
        const Tensor memory =
            empty_tensor(dense_grad, {portions > 1 ? 2 * portions * channels : 0}, ScalarType::Float);
        cuda::batch_norm_backward(task, packed, s, static_cast<float*>(memory.mutable_data_ptr()), stream);
      });
  return {dx, dw, db};
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("batch_norm_backward", TORCH_BOX(&mesa_tune::batch_norm_backward));
}
#ifdef MESA_TUNE_CUDA
STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CUDA, m) {
  m.impl("batch_norm_backward", TORCH_BOX(&mesa_tune::batch_norm_backward));
}
#endif
