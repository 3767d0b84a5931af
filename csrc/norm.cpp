// Gives the CPU's kernel to `norm_backward` of mesa_tune/ops/fused.py.

#include "norm.h"

#include <tuple>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor data, Tensor ranges, Tensor grad, Tensor rstd,
                                                 Tensor weight, bool centered, int64_t bits, int64_t levels,
                                                 int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor given = to_contiguous(grad);
  const int64_t numel = given.numel(), rows = rstd.numel(), inner = weight.numel();
  check_on_cpu(given);
  check_settings(s, given);
  STD_TORCH_CHECK(rows * inner == numel, "expected ", rows, " rows of ", inner, " elements, but got ", numel);
  const Packed packed = read_packed(data, ranges, given, numel, s);
  Tensor dx = fresh_like(given);
  Tensor dw = fresh_like(weight), db = fresh_like(weight);
  const NormBackward task{floats(given, given, numel, "float32 gradient"),
                          floats(rstd, given, rows, "reciprocal deviations"),
                          floats(weight, given, inner, "weight"),
                          rows,
                          inner,
                          centered,
                          static_cast<float*>(dx.mutable_data_ptr()),
                          static_cast<float*>(dw.mutable_data_ptr()),
                          static_cast<float*>(db.mutable_data_ptr())};
  cpu::norm_backward(task, packed, s);
  return {dx, dw, db};
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("norm_backward", TORCH_BOX(&mesa_tune::norm_backward));
}
