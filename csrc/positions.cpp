// The implementations of operators `pack_positions` and `unpack_positions` (mesa_tune/ops/codecs.py): check
// the tensors and call the kernels.

#include "positions.h"

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Positions checked(int64_t numel, int64_t count, int64_t low) {
  STD_TORCH_CHECK(count >= 0 && count <= numel, "expected 0 to ", numel, " positions, but got ", count);
  STD_TORCH_CHECK(low >= 0 && low < 32, "expected 0 to 31 low bits, but got ", low);
  return {numel, count, low};
}

Tensor pack_positions(Tensor bitmap, int64_t numel, int64_t count, int64_t low) {
  const Positions positions = checked(numel, count, low);
  const auto* source =
      static_cast<const uint8_t*>(dense_data(bitmap, bitmap, ScalarType::Byte, plane_bytes(numel), "bitmap"));
  Tensor data = empty_tensor(bitmap, {positions.bytes()}, ScalarType::Byte);
  auto* target = static_cast<uint8_t*>(data.mutable_data_ptr());
  dispatch(
      bitmap,
      [&] {
        const int64_t found = cpu::pack_positions(source, positions, target);
        STD_TORCH_CHECK(found == count, "expected a bitmap with ", count, " bits set, but got ", found);
      },
      [&](auto stream) {
        const Tensor memory = memory_of(bitmap, cuda::positions_memory(positions));
        cuda::pack_positions(source, positions, target, static_cast<int64_t*>(memory.mutable_data_ptr()),
                             stream);
      });
  return data;
}

Tensor unpack_positions(Tensor data, int64_t numel, int64_t count, int64_t low) {
  const Positions positions = checked(numel, count, low);
  const auto* source =
      static_cast<const uint8_t*>(dense_data(data, data, ScalarType::Byte, positions.bytes(), "data"));
  Tensor bitmap = empty_tensor(data, {plane_bytes(numel)}, ScalarType::Byte);
  auto* target = static_cast<uint8_t*>(bitmap.mutable_data_ptr());
  dispatch(
      data,
      [&] {
        const int64_t found = cpu::unpack_positions(source, positions, target);
        STD_TORCH_CHECK(found == count, "expected the code of ", count, " positions, but got ", found);
      },
      [&](auto stream) {
        const Tensor memory = memory_of(data, cuda::positions_memory(positions));
        cuda::unpack_positions(source, positions, target, static_cast<int64_t*>(memory.mutable_data_ptr()),
                               stream);
      });
  return bitmap;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("pack_positions", TORCH_BOX(&mesa_tune::pack_positions));
  m.impl("unpack_positions", TORCH_BOX(&mesa_tune::unpack_positions));
}
#ifdef MESA_TUNE_CUDA
STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CUDA, m) {
  m.impl("pack_positions", TORCH_BOX(&mesa_tune::pack_positions));
  m.impl("unpack_positions", TORCH_BOX(&mesa_tune::unpack_positions));
}
#endif
