// The CPU implementations of operators `extents` and `quantize_within` (mesa_tune/ops/codecs.py): check the
// tensors and call the kernels.

#include <optional>
#include <vector>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor extents(Tensor x, int64_t group_size, int64_t quant_groups) {
  const Settings s{1, 2, group_size, quant_groups};
  check_on_cpu(x);
  check_settings(s, x);
  const int64_t groups = split(x.numel(), s).groups();
  Tensor ends = empty_tensor(x, {groups, 2}, ScalarType::Float);
  cpu::extents(strided(x, s), s, static_cast<float*>(ends.mutable_data_ptr()));
  return ends;
}

Tensor quantize_within(Tensor x, Tensor ranges, int64_t bits, int64_t levels, int64_t group_size,
                       int64_t quant_groups, bool stochastic, std::optional<Tensor> seed) {
  const Settings s{bits, levels, group_size, quant_groups};
  check_on_cpu(x);
  check_settings(s, x);
  const Split parts = split(x.numel(), s);
  const auto* range_data =
      static_cast<const float*>(dense_data(ranges, x, ScalarType::Float, 2 * parts.groups(), "ranges"));
  Tensor data = empty_tensor(x, {parts.bytes(bits)}, ScalarType::Byte);
  const Packed packed{static_cast<uint8_t*>(data.mutable_data_ptr()), const_cast<float*>(range_data)};
  cpu::quantize_within(strided(x, s), s, read_noise(x, stochastic, seed), packed);
  return data;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("extents", TORCH_BOX(&mesa_tune::extents));
  m.impl("quantize_within", TORCH_BOX(&mesa_tune::quantize_within));
}
