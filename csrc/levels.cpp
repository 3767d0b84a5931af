// The implementations of operators `pack_levels` and `unpack_levels` (mesa_tune/ops/codecs.py): check the
// tensors and call the kernels.

#include "levels.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The boundaries between so many levels, or their values.
FewLevels few_levels(const std::vector<double>& numbers, size_t levels) {
  STD_TORCH_CHECK(levels >= 2 && levels <= kMostLevels, "expected 2 to ", kMostLevels, " levels, but got ",
                  levels);
  FewLevels few{{}, static_cast<int>(numbers.size()), 1};
  while (size_t{1} << few.planes < levels) ++few.planes;
  std::fill(std::copy(numbers.begin(), numbers.end(), few.numbers), few.numbers + kMostLevels,
            static_cast<float>(numbers.back()));
  return few;
}

std::tuple<Tensor, Tensor> pack_levels(Tensor x, std::vector<double> boundaries, int64_t map) {
  const FewLevels few = few_levels(boundaries, boundaries.size() + 1);
  STD_TORCH_CHECK(map == Map::kNone || (map >= Map::kGelu && map <= Map::kExp),
                  "expected a map without statistics, but got ", map);
  const Map mapping{static_cast<Map::Kind>(map)};
  const Dtype dtype = dtype_of(x.scalar_type());
  const int64_t numel = x.numel();
  const void* source = dense_data(x, x, x.scalar_type(), numel, "elements");
  Tensor data = empty_tensor(x, {few.planes * plane_bytes(numel)}, ScalarType::Byte);
  Tensor offset = empty_tensor(x, {1}, ScalarType::Float);
  auto* planes = static_cast<uint8_t*>(data.mutable_data_ptr());
  auto* shift = static_cast<float*>(offset.mutable_data_ptr());
  dispatch(
      x, [&] { *shift = cpu::pack_levels(source, dtype, numel, mapping, few, planes); },
      [&](auto stream) { cuda::pack_levels(source, dtype, numel, mapping, few, planes, shift, stream); });
  return {data, offset};
}

Tensor unpack_levels(Tensor data, Tensor offset, std::vector<double> values, std::vector<int64_t> shape,
                     ScalarType dtype) {
  const FewLevels few = few_levels(values, values.size());
  Tensor out = empty_tensor(data, shape, dtype);
  const int64_t numel = out.numel(), size = few.planes * plane_bytes(numel);
  const auto* planes = static_cast<const uint8_t*>(dense_data(data, out, ScalarType::Byte, size, "data"));
  const float* shift = float_data(offset, data, 1, "offset");
  void* target = out.mutable_data_ptr();
  const Dtype type = dtype_of(dtype);
  dispatch(
      out, [&] { cpu::unpack_levels(planes, *shift, numel, few, type, target); },
      [&](auto stream) { cuda::unpack_levels(planes, shift, numel, few, type, target, stream); });
  return out;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("pack_levels", TORCH_BOX(&mesa_tune::pack_levels));
  m.impl("unpack_levels", TORCH_BOX(&mesa_tune::unpack_levels));
}
#ifdef MESA_TUNE_CUDA
STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CUDA, m) {
  m.impl("pack_levels", TORCH_BOX(&mesa_tune::pack_levels));
  m.impl("unpack_levels", TORCH_BOX(&mesa_tune::unpack_levels));
}
#endif
