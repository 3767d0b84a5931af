// The implementations of operators `extents` and `quantize_within` (mesa_tune/ops/codecs.py): check the
// tensors and call the kernels.

#include <optional>
#include <vector>

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor extents(Tensor x, int64_t group_size, int64_t quant_groups) {
  const Settings s{1, 2, group_size, quant_groups};
  check_settings(s, x);
  const int64_t groups = split(x.numel(), s).groups();
  Tensor ends = empty_tensor(x, {groups, 2}, ScalarType::Float);
  const Strided source = strided(x, s);
  auto* target = static_cast<float*>(ends.mutable_data_ptr());
  dispatch(
      x, [&] { cpu::extents(source, s, target); },
      [&](auto stream) { cuda::extents(source, s, target, stream); });
  return ends;
}

Tensor quantize_within(Tensor x, Tensor ranges, int64_t bits, int64_t levels, int64_t group_size,
                       int64_t quant_groups, bool stochastic, std::optional<Tensor> seed) {
  const Settings s{bits, levels, group_size, quant_groups};
  check_settings(s, x);
  const Split parts = split(x.numel(), s);
  const auto* range_data =
      static_cast<const float*>(dense_data(ranges, x, ScalarType::Float, 2 * parts.groups(), "ranges"));
  Tensor data = empty_tensor(x, {parts.bytes(bits)}, ScalarType::Byte);
  const Packed packed{static_cast<uint8_t*>(data.mutable_data_ptr()), const_cast<float*>(range_data)};
  const Strided source = strided(x, s);
  const Noise noise = read_noise(x, stochastic, seed);
  dispatch(
      x, [&] { cpu::quantize_within(source, s, noise, packed); },
      [&](auto stream) { cuda::quantize_within(source, s, noise, packed, stream); });
  return data;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("extents", TORCH_BOX(&mesa_tune::extents));
  m.impl("quantize_within", TORCH_BOX(&mesa_tune::quantize_within));
}
#ifdef MESA_TUNE_CUDA
STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CUDA, m) {
  m.impl("extents", TORCH_BOX(&mesa_tune::extents));
  m.impl("quantize_within", TORCH_BOX(&mesa_tune::quantize_within));
}
#endif
