// Gives the CPU's kernel to `batch_norm_backward` of mesa_tune/ops/fused.py.

#include "batch_norm.h"

#include <optional>
#include <tuple>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(Tensor data, Tensor ranges, Tensor grad, Tensor rstd,
                                                       std::optional<Tensor> weight, bool last, bool fixed,
                                                       int64_t bits, int64_t levels, int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor given = to_contiguous(grad);
  check_on_cpu(given);
  check_settings(s, given);
  const int64_t dims = given.dim(), numel = given.numel();
  STD_TORCH_CHECK(dims > 1, "expected a gradient of samples and channels");
  const int64_t channels = given.size(last ? dims - 1 : 1), all = numel / std::max<int64_t>(1, channels);
  const int64_t samples = last ? all : given.size(0), places = last ? 1 : all / std::max<int64_t>(1, samples);
  const Packed packed = read_packed(data, ranges, given, numel, s);
  Tensor dx = fresh_like(given), dw = fresh(given, {channels}, given.scalar_type());
  Tensor db = fresh_like(dw);
  const BatchNormBackward task{floats(given, given, numel, "float32 gradient"),
                               floats(rstd, given, channels, "reciprocal deviations"),
                               weight.has_value() ? floats(*weight, given, channels, "weight") : nullptr,
                               samples,
                               channels,
                               places,
                               fixed,
                               static_cast<float*>(dx.mutable_data_ptr()),
                               static_cast<float*>(dw.mutable_data_ptr()),
                               static_cast<float*>(db.mutable_data_ptr())};
  cpu::batch_norm_backward(task, packed, s);
  return {dx, dw, db};
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("batch_norm_backward", TORCH_BOX(&mesa_tune::batch_norm_backward));
}
