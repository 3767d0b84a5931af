// Gives the CPU's kernels to the operators that mesa_tune/ops.py defines. Checks what memory safety needs;
// what users may get wrong is checked, and explained, there.

#include "quantize.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>
#include <vector>

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Dtype dtype_of(ScalarType type) {
  if (type == ScalarType::Float) return Dtype::kFloat;
  if (type == ScalarType::Half) return Dtype::kHalf;
  STD_TORCH_CHECK(type == ScalarType::BFloat16, "expected float32, float16 or bfloat16");
  return Dtype::kBFloat16;
}

void check(const Settings& s, const Tensor& x) {
  STD_TORCH_CHECK(x.is_cpu(), "expected a tensor on the CPU");
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

Strided strided(const Tensor& x, void* data, const Settings& s) {
  return {data, dtype_of(x.scalar_type()), make_layout(x.sizes(), x.strides(), x.dim(), s), x.numel()};
}

void check_packed(const Tensor& data, const Tensor& ranges, const Split& parts, int64_t bits) {
  STD_TORCH_CHECK(data.is_cpu() && data.scalar_type() == ScalarType::Byte && data.is_contiguous() &&
                      data.numel() == parts.bytes(bits),
                  "expected contiguous data of ", parts.bytes(bits), " bytes (uint8), but got ",
                  data.numel());
  STD_TORCH_CHECK(ranges.is_cpu() && ranges.scalar_type() == ScalarType::Float && ranges.is_contiguous() &&
                      ranges.numel() == 2 * parts.groups(),
                  "expected contiguous float32 ranges of ", parts.groups(), " groups, but got ",
                  ranges.numel(), " numbers");
}

int64_t read_seed(const std::optional<Tensor>& seed, bool stochastic) {
  if (!stochastic) return 0;
  STD_TORCH_CHECK(
      seed.has_value() && seed->is_cpu() && seed->scalar_type() == ScalarType::Long && seed->numel() == 1,
      "stochastic rounding needs a seed: an int64 tensor of one element on the CPU");
  return *static_cast<const int64_t*>(seed->const_data_ptr());
}

void encode(const Tensor& x, const Settings& s, bool stochastic, const std::optional<Tensor>& seed,
            const Tensor& data, const Tensor& ranges) {
  const Packed packed{static_cast<uint8_t*>(data.mutable_data_ptr()),
                      static_cast<float*>(ranges.mutable_data_ptr())};
  const Noise noise{stochastic, read_seed(seed, stochastic)};
  cpu::quantize(strided(x, const_cast<void*>(x.const_data_ptr()), s), s, noise, packed);
}

void decode(const Tensor& data, const Tensor& ranges, const Settings& s, const Tensor& out) {
  check_packed(data, ranges, split(out.numel(), s), s.bits);
  const Packed packed{const_cast<uint8_t*>(static_cast<const uint8_t*>(data.const_data_ptr())),
                      const_cast<float*>(static_cast<const float*>(ranges.const_data_ptr()))};
  cpu::dequantize(packed, s, strided(out, out.mutable_data_ptr(), s));
}

std::tuple<Tensor, Tensor> quantize(Tensor x, int64_t bits, int64_t levels, int64_t group_size,
                                    int64_t quant_groups, bool stochastic, std::optional<Tensor> seed) {
  const Settings s{bits, levels, group_size, quant_groups};
  check(s, x);
  const Split parts = split(x.numel(), s);
  Tensor data = torch::stable::new_empty(x, std::vector<int64_t>{parts.bytes(bits)}, ScalarType::Byte);
  Tensor ranges = torch::stable::new_empty(x, std::vector<int64_t>{parts.groups(), 2}, ScalarType::Float);
  encode(x, s, stochastic, seed, data, ranges);
  return {data, ranges};
}

void quantize_out(Tensor x, int64_t bits, int64_t levels, int64_t group_size, int64_t quant_groups,
                  bool stochastic, std::optional<Tensor> seed, Tensor data, Tensor ranges) {
  const Settings s{bits, levels, group_size, quant_groups};
  check(s, x);
  check_packed(data, ranges, split(x.numel(), s), bits);
  encode(x, s, stochastic, seed, data, ranges);
}

Tensor dequantize(Tensor data, Tensor ranges, std::vector<int64_t> shape, ScalarType dtype, int64_t bits,
                  int64_t levels, int64_t group_size, int64_t quant_groups) {
  const Settings s{bits, levels, group_size, quant_groups};
  Tensor out = torch::stable::new_empty(ranges, shape, dtype);
  check(s, out);
  decode(data, ranges, s, out);
  return out;
}

void dequantize_out(Tensor data, Tensor ranges, int64_t bits, int64_t levels, int64_t group_size,
                    int64_t quant_groups, Tensor out) {
  const Settings s{bits, levels, group_size, quant_groups};
  check(s, out);
  for (int64_t d = 0; d < out.dim(); ++d)
    STD_TORCH_CHECK(out.size(d) <= 1 || out.stride(d) != 0,
                    "expected an out whose elements have their own memory");
  decode(data, ranges, s, out);
}

Tensor pack_bits(Tensor mask) {
  STD_TORCH_CHECK(mask.is_cpu() && mask.scalar_type() == ScalarType::Bool,
                  "expected a bool tensor on the CPU");
  const Tensor dense = torch::stable::contiguous(mask);
  const int64_t bytes = plane_bytes(dense.numel());
  Tensor data = torch::stable::new_empty(dense, std::vector<int64_t>{bytes}, ScalarType::Byte);
  cpu::pack_bits(static_cast<const uint8_t*>(dense.const_data_ptr()), dense.numel(),
                 static_cast<uint8_t*>(data.mutable_data_ptr()));
  return data;
}

Tensor unpack_bits(Tensor data, std::vector<int64_t> shape) {
  Tensor mask = torch::stable::new_empty(data, shape, ScalarType::Bool);
  STD_TORCH_CHECK(data.is_cpu() && data.scalar_type() == ScalarType::Byte && data.is_contiguous() &&
                      data.numel() == plane_bytes(mask.numel()),
                  "expected contiguous data of ", plane_bytes(mask.numel()), " bytes (uint8), but got ",
                  data.numel());
  cpu::unpack_bits(static_cast<const uint8_t*>(data.const_data_ptr()), mask.numel(),
                   static_cast<uint8_t*>(mask.mutable_data_ptr()));
  return mask;
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("quantize", TORCH_BOX(&mesa_tune::quantize));
  m.impl("quantize_out", TORCH_BOX(&mesa_tune::quantize_out));
  m.impl("dequantize", TORCH_BOX(&mesa_tune::dequantize));
  m.impl("dequantize_out", TORCH_BOX(&mesa_tune::dequantize_out));
  m.impl("pack_bits", TORCH_BOX(&mesa_tune::pack_bits));
  m.impl("unpack_bits", TORCH_BOX(&mesa_tune::unpack_bits));
}
