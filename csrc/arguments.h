// Checks tensors and turns them into what kernels take: pointers, sizes and strides. What is hard: only the
// stable ABI of PyTorch may be used, so that one build works with every later version.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "convert.h"
#include "quantize.h"

namespace mesa_tune {

inline Dtype dtype_of(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  if (type == ScalarType::Float) return Dtype::kFloat;
  if (type == ScalarType::Half) return Dtype::kHalf;
  STD_TORCH_CHECK(type == ScalarType::BFloat16, "expected float32, float16 or bfloat16");
  return Dtype::kBFloat16;
}

inline Strided strided(const torch::stable::Tensor& x, void* data, const Settings& s) {
  return {data, dtype_of(x.scalar_type()), make_layout(x.sizes(), x.strides(), x.dim(), s), x.numel()};
}

// For a tensor that is only read.
inline Strided strided(const torch::stable::Tensor& x, const Settings& s) {
  return strided(x, const_cast<void*>(x.const_data_ptr()), s);
}

inline void check_on_cpu(const torch::stable::Tensor& x) {
  STD_TORCH_CHECK(x.is_cpu(), "expected a tensor on the CPU");
}

inline void check_settings(const Settings& s, const torch::stable::Tensor& x) {
  STD_TORCH_CHECK(s.bits >= 1 && s.bits <= 8, "expected 1 to 8 bits, but got ", s.bits);
  STD_TORCH_CHECK(s.levels >= 2 && s.levels <= int64_t{1} << s.bits, "expected 2 to 2**bits levels, but got ",
                  s.levels);
  STD_TORCH_CHECK(s.quant_groups >= 0, "expected no negative quant_groups, but got ", s.quant_groups);
  if (s.quant_groups == 0) {
    STD_TORCH_CHECK(s.group_size >= 1, "expected a positive group_size, but got ", s.group_size);
    return;
  }
  const int64_t dims = x.dim();
  const int64_t extent = dims == 0 ? 1 : x.size(dims == 4 || dims == 5 ? 1 : dims - 1);
  STD_TORCH_CHECK(extent % s.quant_groups == 0, "quant_groups ", s.quant_groups, " does not divide ", extent);
}

// A new contiguous tensor on the device of `like`. Calls PyTorch's C shim directly, which is faster than a
// call of the operator by name.
inline torch::stable::Tensor empty_tensor(const torch::stable::Tensor& like,
                                          const std::vector<int64_t>& sizes,
                                          torch::headeronly::ScalarType type) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype, device, like.get_device_index(),
                                                  &handle));
  return torch::stable::Tensor(handle);
}

// A new contiguous tensor of the shape, dtype and device of `like`.
inline torch::stable::Tensor empty_tensor_like(const torch::stable::Tensor& like) {
  return empty_tensor(like, like.sizes().vec(), like.scalar_type());
}

// Memory for a kernel on CUDA: so many numbers of 64 bits.
inline torch::stable::Tensor memory_of(const torch::stable::Tensor& like, int64_t numbers) {
  return empty_tensor(like, {numbers}, torch::headeronly::ScalarType::Long);
}

// `x` if it is contiguous, else a contiguous copy.
inline torch::stable::Tensor to_contiguous(const torch::stable::Tensor& x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

inline bool same_device(const torch::stable::Tensor& a, const torch::stable::Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
}

// The memory of `data`, which must be contiguous, on the device of `like`, with `count` elements of this
// type.
inline const void* dense_data(const torch::stable::Tensor& data, const torch::stable::Tensor& like,
                              torch::headeronly::ScalarType type, int64_t count, const char* name) {
  STD_TORCH_CHECK(
      same_device(data, like) && data.scalar_type() == type && data.is_contiguous() && data.numel() == count,
      "expected contiguous ", name, " of ", count, " elements on the tensor's device, but got ",
      data.numel());
  return data.const_data_ptr();
}

inline const float* float_data(const torch::stable::Tensor& x, const torch::stable::Tensor& like,
                               int64_t count, const char* name) {
  return static_cast<const float*>(dense_data(x, like, torch::headeronly::ScalarType::Float, count, name));
}

// A contiguous copy, on the CPU, in float32 of a few numbers of 16 bits; float32 as it is, if contiguous.
inline torch::stable::Tensor widened(const torch::stable::Tensor& x) {
  const Dtype dtype = dtype_of(x.scalar_type());
  const torch::stable::Tensor dense = to_contiguous(x);
  if (dtype == Dtype::kFloat) return dense;
  torch::stable::Tensor wide = empty_tensor(x, x.sizes().vec(), torch::headeronly::ScalarType::Float);
  const auto* from = static_cast<const uint16_t*>(dense.const_data_ptr());
  auto* to = static_cast<float*>(wide.mutable_data_ptr());
  for (int64_t i = 0; i < wide.numel(); ++i)
    to[i] = dtype == Dtype::kHalf ? Half::load(from[i]) : BFloat16::load(from[i]);
  return wide;
}

// The other way: a few numbers of contiguous float32, in the dtype and shape of `like`.
inline torch::stable::Tensor narrowed(const torch::stable::Tensor& wide, const torch::stable::Tensor& like) {
  const Dtype dtype = dtype_of(like.scalar_type());
  if (dtype == Dtype::kFloat) return wide;
  torch::stable::Tensor x = empty_tensor_like(like);
  const auto* from = static_cast<const float*>(wide.const_data_ptr());
  auto* to = static_cast<uint16_t*>(x.mutable_data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i)
    to[i] = dtype == Dtype::kHalf ? Half::store(from[i]) : BFloat16::store(from[i]);
  return x;
}

// The packed form in this memory; ranges of 16 bits are ends.
inline Packed packed_in(void* data, void* ranges, Dtype dtype) {
  auto* const codes = static_cast<uint8_t*>(data);
  if (dtype == Dtype::kFloat) return {codes, static_cast<float*>(ranges)};
  return {codes, nullptr, static_cast<uint16_t*>(ranges), dtype};
}

inline void check_packed(const torch::stable::Tensor& data, const torch::stable::Tensor& ranges,
                         const torch::stable::Tensor& like, int64_t numel, const Settings& s) {
  const Split parts = split(numel, s);
  dense_data(data, like, torch::headeronly::ScalarType::Byte, parts.bytes(s.bits), "data");
  dense_data(ranges, like, ranges.scalar_type(), 2 * parts.groups(), "ranges");
}

// The packed form of `numel` elements, on the device of `like`; only read.
inline Packed packed_of(const torch::stable::Tensor& data, const torch::stable::Tensor& ranges,
                        const torch::stable::Tensor& like, int64_t numel, const Settings& s) {
  check_packed(data, ranges, like, numel, s);
  return packed_in(const_cast<void*>(data.const_data_ptr()), const_cast<void*>(ranges.const_data_ptr()),
                   dtype_of(ranges.scalar_type()));
}

// The same for kernels that decode some rows at a time.
inline Packed read_packed(const torch::stable::Tensor& data, const torch::stable::Tensor& ranges,
                          const torch::stable::Tensor& like, int64_t numel, const Settings& s) {
  STD_TORCH_CHECK(s.group_size <= cpu::kMaxGroupSize, "expected groups of at most ", cpu::kMaxGroupSize,
                  " elements, but got ", s.group_size);
  return packed_of(data, ranges, like, numel, s);
}

// The noise for encoding `x`. A seed on a device is not read on the host: the kernel gets a pointer.
inline Noise read_noise(const torch::stable::Tensor& x, bool stochastic,
                        const std::optional<torch::stable::Tensor>& seed) {
  if (!stochastic) return {false, 0};
  STD_TORCH_CHECK(seed.has_value(), "stochastic rounding needs a seed");
  const auto* value = static_cast<const int64_t*>(
      dense_data(*seed, seed->is_cpu() ? *seed : x, torch::headeronly::ScalarType::Long, 1, "seed"));
  return seed->is_cpu() ? Noise{true, *value} : Noise{true, 0, value};
}

}  // namespace mesa_tune
