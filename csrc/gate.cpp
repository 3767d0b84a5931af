// The CPU implementations of operators `pack_at_most` and `gate` (mesa_tune/ops/fused.py): check the tensors
// and call the kernels.

#include "gate.h"

#include <vector>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor pack_at_most(Tensor x, double limit) {
  const Tensor flat = to_contiguous(x);
  check_on_cpu(flat);
  const int64_t numel = flat.numel();
  const auto* values =
      static_cast<const float*>(dense_data(flat, flat, ScalarType::Float, numel, "float32 tensor"));
  Tensor data = empty_tensor(flat, {plane_bytes(numel)}, ScalarType::Byte);
  cpu::pack_at_most(values, numel, static_cast<float>(limit), static_cast<uint8_t*>(data.mutable_data_ptr()));
  return data;
}

Tensor gate(Tensor grad, Tensor data, double slope) {
  const Tensor flat = to_contiguous(grad);
  check_on_cpu(flat);
  const int64_t numel = flat.numel();
  const auto* values =
      static_cast<const float*>(dense_data(flat, flat, ScalarType::Float, numel, "float32 gradient"));
  const void* bits = dense_data(data, flat, ScalarType::Byte, plane_bytes(numel), "bits");
  Tensor out = empty_tensor_like(flat);
  cpu::gate(values, static_cast<const uint8_t*>(bits), numel, static_cast<float>(slope),
            static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("pack_at_most", TORCH_BOX(&mesa_tune::pack_at_most));
  m.impl("gate", TORCH_BOX(&mesa_tune::gate));
}
