// The implementations of operators `sparsify` and `densify` (mesa_tune/ops/codecs.py): check the tensors and
// call the kernels.

#include "sparsify.h"

#include <tuple>
#include <vector>

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int64_t width_of(const Tensor& x) {
  const auto width = static_cast<int64_t>(x.element_size());
  STD_TORCH_CHECK(width == 2 || width == 4 || width == 8, "expected numbers of 2, 4 or 8 bytes");
  return width;
}

std::tuple<Tensor, Tensor> sparsify(Tensor x, int64_t count) {
  STD_TORCH_CHECK(count >= 0 && count <= x.numel(), "expected 0 to ", x.numel(), " survivors, but got ",
                  count);
  const Tensor flat = to_contiguous(x);
  const std::vector<int64_t> bytes{plane_bytes(x.numel())};
  Tensor bitmap = empty_tensor(flat, bytes, ScalarType::Byte);
  Tensor survivors = empty_tensor(flat, {count}, flat.scalar_type());
  const void* values = flat.const_data_ptr();
  const int64_t width = width_of(x), numel = x.numel();
  auto* bits = static_cast<uint8_t*>(bitmap.mutable_data_ptr());
  void* kept = survivors.mutable_data_ptr();
  dispatch(
      flat, [&] { cpu::sparsify(values, width, numel, count, bits, kept); },
      [&](auto stream) {
        const Tensor memory = memory_of(flat, cuda::sparsify_memory(width, numel));
        cuda::sparsify(values, width, numel, count, bits, kept,
                       static_cast<int64_t*>(memory.mutable_data_ptr()), stream);
      });
  return {bitmap, survivors};
}

Tensor densify(Tensor bitmap, Tensor survivors, std::vector<int64_t> shape) {
  Tensor out = empty_tensor(survivors, shape, survivors.scalar_type());
  const auto* bits = static_cast<const uint8_t*>(
      dense_data(bitmap, out, ScalarType::Byte, plane_bytes(out.numel()), "bitmap"));
  const void* values = dense_data(survivors, out, survivors.scalar_type(), survivors.numel(), "survivors");
  const int64_t width = width_of(survivors), numel = out.numel(), count = survivors.numel();
  const auto check_bits = [&](int64_t bits_set) {
    STD_TORCH_CHECK(bits_set == count, "expected a survivor for each of the bitmap's ", bits_set,
                    " bits, but got ", count);
  };
  void* written = out.mutable_data_ptr();
  dispatch(
      out, [&] { check_bits(cpu::densify(bits, values, width, numel, count, written)); },
      [&](auto stream) {
        if (count > numel) check_bits(numel);
        const Tensor memory = memory_of(out, cuda::densify_memory(numel));
        cuda::densify(bits, values, width, numel, count, written,
                      static_cast<int64_t*>(memory.mutable_data_ptr()), stream);
      });
  return out;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("sparsify", TORCH_BOX(&mesa_tune::sparsify));
  m.impl("densify", TORCH_BOX(&mesa_tune::densify));
}
#ifdef MESA_TUNE_CUDA
STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CUDA, m) {
  m.impl("sparsify", TORCH_BOX(&mesa_tune::sparsify));
  m.impl("densify", TORCH_BOX(&mesa_tune::densify));
}
#endif
