// The implementations, for the CPU and for CUDA if it was built, of operators `pack_windows` and
// `unpack_windows` (mesa_tune/ops/codecs.py): check the tensors and call the kernels.

#include "pack_windows.h"

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The windows from flattened numbers, checked against `like`, which has one element per window.
std::vector<Windows> parse(const std::vector<int64_t>& numbers, const Tensor& like) {
  constexpr size_t fields = 6;
  std::vector<Windows> windows;
  for (size_t i = 0; i + fields <= numbers.size(); i += fields)
    windows.push_back(
        {numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3], numbers[i + 4], numbers[i + 5]});
  const auto dims = static_cast<int64_t>(windows.size());
  STD_TORCH_CHECK(dims > 0 && dims <= like.dim() && numbers.size() % fields == 0,
                  "expected six numbers for each of at most ", like.dim(), " dimensions");
  for (int64_t d = 0; d < dims; ++d) {
    const Windows& window = windows[d];
    STD_TORCH_CHECK(window.number == like.size(like.dim() - dims + d) && window.size > 0 &&
                        window.extent > 0 && window.step > 0,
                    "expected as many windows as outputs, and positive sizes, extents and steps");
  }
  STD_TORCH_CHECK(offset_bits(windows) <= 32, "expected windows of at most 2**32 positions");
  return windows;
}

// The windows as CUDA kernels take them.
cuda::FewWindows few(const std::vector<Windows>& windows) {
  const auto dims = static_cast<int64_t>(windows.size());
  STD_TORCH_CHECK(dims <= cuda::kMostDims, "expected at most ", cuda::kMostDims,
                  " dimensions on CUDA, but got ", dims);
  cuda::FewWindows made{{}, dims, offset_bits(windows)};
  std::copy(windows.begin(), windows.end(), made.axes);
  return made;
}

Tensor pack_windows(Tensor indices, std::vector<int64_t> windows) {
  const std::vector<Windows> parsed = parse(windows, indices);
  const Tensor flat = to_contiguous(indices);
  const auto* source =
      static_cast<const int64_t*>(dense_data(flat, flat, ScalarType::Long, indices.numel(), "indices"));
  const std::vector<int64_t> size{offset_bits(parsed) * plane_bytes(indices.numel())};
  Tensor data = empty_tensor(flat, size, ScalarType::Byte);
  auto* target = static_cast<uint8_t*>(data.mutable_data_ptr());
  const int64_t numel = indices.numel();
  dispatch(
      indices, [&] { cpu::pack_windows(source, numel, parsed, target); },
      [&](auto stream) { cuda::pack_windows(source, numel, few(parsed), target, stream); });
  return data;
}

Tensor unpack_windows(Tensor data, std::vector<int64_t> windows, std::vector<int64_t> shape) {
  Tensor indices = empty_tensor(data, shape, ScalarType::Long);
  const std::vector<Windows> parsed = parse(windows, indices);
  const int64_t size = offset_bits(parsed) * plane_bytes(indices.numel());
  const auto* source = static_cast<const uint8_t*>(dense_data(data, indices, ScalarType::Byte, size, "data"));
  auto* target = static_cast<int64_t*>(indices.mutable_data_ptr());
  const int64_t numel = indices.numel();
  dispatch(
      data, [&] { cpu::unpack_windows(source, numel, parsed, target); },
      [&](auto stream) { cuda::unpack_windows(source, numel, few(parsed), target, stream); });
  return indices;
}

template <class Library>
void add_kernels(Library& m) {
  m.impl("pack_windows", TORCH_BOX(&pack_windows));
  m.impl("unpack_windows", TORCH_BOX(&unpack_windows));
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  mesa_tune::add_kernels(m);
}

#ifdef MESA_TUNE_CUDA
STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CUDA, m) {
  mesa_tune::add_kernels(m);
}
#endif
