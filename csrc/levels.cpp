// The CPU implementations of operators `pack_levels` and `unpack_levels` (mesa_tune/ops/codecs.py): check the
// tensors and call the kernels.

#include "levels.h"

#include <tuple>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::vector<float> in_single(const std::vector<double>& numbers) {
  return {numbers.begin(), numbers.end()};
}

void check_levels(size_t levels) {
  STD_TORCH_CHECK(levels >= 2 && levels <= kMostLevels, "expected 2 to ", kMostLevels, " levels, but got ",
                  levels);
}

std::tuple<Tensor, Tensor> pack_levels(Tensor x, std::vector<double> boundaries, int64_t map) {
  check_on_cpu(x);
  check_levels(boundaries.size() + 1);
  STD_TORCH_CHECK(map == Map::kNone || (map >= Map::kGelu && map <= Map::kExp),
                  "expected a map without statistics, but got ", map);
  const Dtype dtype = dtype_of(x.scalar_type());
  const void* source = dense_data(x, x, x.scalar_type(), x.numel(), "elements");
  const int64_t bits = level_bits(boundaries.size() + 1);
  Tensor data = empty_tensor(x, {bits * plane_bytes(x.numel())}, ScalarType::Byte);
  Tensor offset = empty_tensor(x, {1}, ScalarType::Float);
  *static_cast<float*>(offset.mutable_data_ptr()) =
      cpu::pack_levels(source, dtype, x.numel(), {static_cast<Map::Kind>(map)}, in_single(boundaries),
                       static_cast<uint8_t*>(data.mutable_data_ptr()));
  return {data, offset};
}

Tensor unpack_levels(Tensor data, Tensor offset, std::vector<double> values, std::vector<int64_t> shape,
                     ScalarType dtype) {
  check_on_cpu(data);
  check_levels(values.size());
  Tensor out = empty_tensor(data, shape, dtype);
  const int64_t size = level_bits(values.size()) * plane_bytes(out.numel());
  const auto* source = static_cast<const uint8_t*>(dense_data(data, out, ScalarType::Byte, size, "data"));
  const float shift = *float_data(offset, data, 1, "offset");
  std::vector<float> table = in_single(values);
  for (float& value : table) value += shift;
  cpu::unpack_levels(source, out.numel(), table, dtype_of(dtype), out.mutable_data_ptr());
  return out;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("pack_levels", TORCH_BOX(&mesa_tune::pack_levels));
  m.impl("unpack_levels", TORCH_BOX(&mesa_tune::unpack_levels));
}
