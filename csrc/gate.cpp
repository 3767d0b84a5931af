// The implementations of operators `pack_at_most` and `gate` (mesa_tune/ops/fused.py): check the tensors and
// call the kernels.

#include "gate.h"

#include <vector>

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr Settings kDense{1, 2, 1, 0};  // for the layout of a dense tensor

// A limit as PyTorch compares it: rounded to the dtype of the tensor.
float rounded_to(Dtype dtype, double limit) {
  const auto value = static_cast<float>(limit);
  if (dtype == Dtype::kFloat) return value;
  return dtype == Dtype::kHalf ? Half::load(Half::store(value)) : BFloat16::load(BFloat16::store(value));
}

Tensor pack_at_most(Tensor x, double limit) {
  const Tensor dense = to_contiguous(x);
  const Strided values = strided(dense, kDense);
  const float most = rounded_to(values.dtype, limit);
  Tensor data = empty_tensor(dense, {plane_bytes(values.numel)}, ScalarType::Byte);
  auto* bits = static_cast<uint8_t*>(data.mutable_data_ptr());
  dispatch(
      dense, [&] { cpu::pack_at_most(values, most, bits); },
      [&](auto stream) { cuda::pack_at_most(values, most, bits, stream); });
  return data;
}

Tensor gate(Tensor grad, Tensor data, double slope, int64_t inner) {
  const Tensor dense = to_contiguous(grad);
  const int64_t numel = dense.numel();
  STD_TORCH_CHECK(inner >= 1 && numel % inner == 0, "expected a number of neighbours that divides ", numel,
                  ", but got ", inner);
  const void* bits = dense_data(data, dense, ScalarType::Byte, plane_bytes(numel / inner), "bits");
  Tensor out = empty_tensor_like(dense);
  const Gate task{strided(dense, kDense), static_cast<const uint8_t*>(bits), static_cast<float>(slope), inner,
                  strided(out, out.mutable_data_ptr(), kDense)};
  dispatch(dense, [&] { cpu::gate(task); }, [&](auto stream) { cuda::gate(task, stream); });
  return out;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("pack_at_most", TORCH_BOX(&mesa_tune::pack_at_most));
  m.impl("gate", TORCH_BOX(&mesa_tune::gate));
}
#ifdef MESA_TUNE_CUDA
STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CUDA, m) {
  m.impl("pack_at_most", TORCH_BOX(&mesa_tune::pack_at_most));
  m.impl("gate", TORCH_BOX(&mesa_tune::gate));
}
#endif
