// Gives the CPU's kernels to the operators that mesa_tune/ops.py defines. Checks what memory safety needs;
// what users may get wrong is checked, and explained, there.

#include <optional>
#include <tuple>
#include <vector>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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

void encode(const Tensor& x, const Settings& s, bool stochastic, const std::optional<Tensor>& seed,
            const Tensor& data, const Tensor& ranges) {
  const Packed packed{static_cast<uint8_t*>(data.mutable_data_ptr()),
                      static_cast<float*>(ranges.mutable_data_ptr())};
  const Noise noise = read_noise(stochastic, seed);
  cpu::quantize(strided(x, s), s, noise, packed);
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
  check_settings(s, x);
  const Split parts = split(x.numel(), s);
  Tensor data = torch::stable::new_empty(x, std::vector<int64_t>{parts.bytes(bits)}, ScalarType::Byte);
  Tensor ranges = torch::stable::new_empty(x, std::vector<int64_t>{parts.groups(), 2}, ScalarType::Float);
  encode(x, s, stochastic, seed, data, ranges);
  return {data, ranges};
}

void quantize_out(Tensor x, int64_t bits, int64_t levels, int64_t group_size, int64_t quant_groups,
                  bool stochastic, std::optional<Tensor> seed, Tensor data, Tensor ranges) {
  const Settings s{bits, levels, group_size, quant_groups};
  check_settings(s, x);
  check_packed(data, ranges, split(x.numel(), s), bits);
  encode(x, s, stochastic, seed, data, ranges);
}

Tensor dequantize(Tensor data, Tensor ranges, std::vector<int64_t> shape, ScalarType dtype, int64_t bits,
                  int64_t levels, int64_t group_size, int64_t quant_groups) {
  const Settings s{bits, levels, group_size, quant_groups};
  Tensor out = torch::stable::new_empty(ranges, shape, dtype);
  check_settings(s, out);
  decode(data, ranges, s, out);
  return out;
}

void dequantize_out(Tensor data, Tensor ranges, int64_t bits, int64_t levels, int64_t group_size,
                    int64_t quant_groups, Tensor out) {
  const Settings s{bits, levels, group_size, quant_groups};
  check_settings(s, out);
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
