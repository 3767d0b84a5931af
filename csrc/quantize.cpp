// The implementations, for the CPU and for CUDA if it was built, of the operators of
// mesa_tune/ops/__init__.py, and of `quantize_map` and `dequantize_mul` of mesa_tune/ops/fused.py. They check
// what memory safety needs. Errors of users are checked in Python, with better messages.

#include <optional>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "dispatch.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// New tensors for the data of `x`, and for its ranges in float32 or its ends in 16 bits.
std::tuple<Tensor, Tensor> new_parts(const Tensor& x, const Settings& s,
                                     ScalarType type = ScalarType::Float) {
  const Split parts = split(x.numel(), s);
  return {empty_tensor(x, {parts.bytes(s.bits)}, ScalarType::Byte),
          empty_tensor(x, {parts.groups(), 2}, type)};
}

// Encodes `map` of x, and packs which of its rows are zero.
void encode(const Tensor& x, const Settings& s, bool stochastic, const std::optional<Tensor>& seed,
            const Tensor& data, const Tensor& ranges, const Map& map = {}, const ZeroRows& zero_rows = {}) {
  check_packed(data, ranges, x, x.numel(), s);
  Packed packed =
      packed_in(data.mutable_data_ptr(), ranges.mutable_data_ptr(), dtype_of(ranges.scalar_type()));
  const Noise noise = read_noise(x, stochastic, seed);
  const Strided source = strided(x, s);
  std::optional<Tensor> memory;
  const auto add_ranges = [&] {
    if (packed.ranges != nullptr) return;
    memory = empty_tensor(x, {ranges.size(0), 2}, ScalarType::Float);
    packed.ranges = static_cast<float*>(memory->mutable_data_ptr());
  };
  dispatch(
      x,
      [&] {
        add_ranges();
        cpu::quantize(source, map, s, noise, packed);
        cpu::pack_zero_rows(source, zero_rows);
      },
      [&](auto stream) {
        if (!cuda::in_one_pass(source, s, packed)) add_ranges();
        if (map.kind == Map::kNone) return cuda::quantize(source, s, noise, packed, zero_rows, stream);
        cuda::quantize_map(source, map, s, noise, packed, stream);
      });
}

void decode(const Tensor& data, const Tensor& ranges, const Settings& s, const Tensor& out) {
  const Packed packed = packed_of(data, ranges, out, out.numel(), s);
  const Strided target = strided(out, out.mutable_data_ptr(), s);
  dispatch(
      out, [&] { cpu::dequantize(packed, s, target); },
      [&](auto stream) { cuda::dequantize(packed, s, target, stream); });
}

std::tuple<Tensor, Tensor> quantize(Tensor x, int64_t bits, int64_t levels, int64_t group_size,
                                    int64_t quant_groups, bool stochastic, std::optional<Tensor> seed) {
  const Settings s{bits, levels, group_size, quant_groups};
  check_settings(s, x);
  const auto [data, ranges] = new_parts(x, s);
  encode(x, s, stochastic, seed, data, ranges);
  return {data, ranges};
}

std::tuple<Tensor, Tensor> quantize_ends(Tensor x, int64_t bits, int64_t levels, int64_t group_size,
                                         int64_t quant_groups, bool stochastic, std::optional<Tensor> seed) {
  const Settings s{bits, levels, group_size, quant_groups};
  check_settings(s, x);
  STD_TORCH_CHECK(dtype_of(x.scalar_type()) != Dtype::kFloat, "expected a tensor of 16 bits");
  const auto [data, ends] = new_parts(x, s, x.scalar_type());
  encode(x, s, stochastic, seed, data, ends);
  return {data, ends};
}

// Makes the statistics of x float32. Those of 16 bits, which PyTorch's kernels for the CPU give, are rounded:
// a mean then is off by up to 2^-9 of itself, which may be many deviations. So means are made again.
void widen(const Tensor& x, std::optional<Tensor>& mean, Tensor& rstd, int64_t inner) {
  if (rstd.scalar_type() == ScalarType::Float || !x.is_cpu()) return;
  rstd = widened(rstd);
  if (!mean.has_value()) return;
  STD_TORCH_CHECK(rstd.numel() * inner == x.numel(), "expected statistics of rows of ", inner, " elements");
  mean = empty_tensor(x, {rstd.numel()}, ScalarType::Float);
  cpu::row_means(strided(x, Settings{1, 2, 1, 0}), inner, static_cast<float*>(mean->mutable_data_ptr()));
}

// The map reads the statistics, which become float32, where they are.
Map map_of(const Tensor& x, int64_t kind, std::optional<Tensor>& mean, std::optional<Tensor>& rstd,
           int64_t inner) {
  STD_TORCH_CHECK(kind >= Map::kNormalize && kind <= Map::kDefinite, "expected a map from 1 to 6, but got ",
                  kind);
  if (kind != Map::kNormalize) return {static_cast<Map::Kind>(kind)};
  STD_TORCH_CHECK(rstd.has_value() && rstd->numel() > 0 && inner > 0,
                  "expected reciprocal deviations and a positive inner for the map `normalize`");
  widen(x, mean, *rstd, inner);
  const int64_t count = rstd->numel();
  return {Map::kNormalize, mean.has_value() ? float_data(*mean, x, count, "means") : nullptr,
          float_data(*rstd, x, count, "reciprocal deviations"), inner, count};
}

std::tuple<Tensor, Tensor> quantize_map(Tensor x, int64_t map, std::optional<Tensor> mean,
                                        std::optional<Tensor> rstd, int64_t inner, int64_t bits,
                                        int64_t levels, int64_t group_size, bool stochastic,
                                        std::optional<Tensor> seed) {
  const Settings s{bits, levels, group_size, 0};
  check_settings(s, x);
  const Map mapping = map_of(x, map, mean, rstd, inner);
  const auto [data, ranges] = new_parts(x, s, x.scalar_type());
  encode(x, s, stochastic, seed, data, ranges, mapping);
  return {data, ranges};
}

void quantize_out(Tensor x, int64_t bits, int64_t levels, int64_t group_size, int64_t quant_groups,
                  bool stochastic, std::optional<Tensor> seed, Tensor data, Tensor ranges) {
  const Settings s{bits, levels, group_size, quant_groups};
  check_settings(s, x);
  STD_TORCH_CHECK(ranges.scalar_type() == ScalarType::Float, "expected ranges of float32");
  encode(x, s, stochastic, seed, data, ranges);
}

// The number of rows of `x`, along its last dimension.
int64_t rows_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() > 0, "expected a tensor with rows");
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}

Tensor dequantize(Tensor data, Tensor ranges, std::vector<int64_t> shape, ScalarType dtype, int64_t bits,
                  int64_t levels, int64_t group_size, int64_t quant_groups, std::optional<Tensor> zero_rows) {
  const Settings s{bits, levels, group_size, quant_groups};
  Tensor out = empty_tensor(ranges, shape, dtype);
  check_settings(s, out);
  decode(data, ranges, s, out);
  if (!zero_rows.has_value()) return out;
  const int64_t rows = rows_of(out), size = dtype == ScalarType::Float ? 4 : 2;
  const int64_t bytes = out.size(out.dim() - 1) * size;
  const auto* bits_of_rows = static_cast<const uint8_t*>(
      dense_data(*zero_rows, out, ScalarType::Byte, plane_bytes(rows), "bits of zero rows"));
  dispatch(
      out, [&] { cpu::clear_rows(bits_of_rows, 0, rows, bytes, out.mutable_data_ptr()); },
      [&](auto stream) { cuda::clear_rows(bits_of_rows, rows, bytes, out.mutable_data_ptr(), stream); });
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

Tensor dequantize_mul(Tensor data, Tensor ranges, Tensor factor, int64_t bits, int64_t levels,
                      int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor dense_factor = to_contiguous(factor);
  Tensor out = empty_tensor_like(dense_factor);
  check_settings(s, out);
  const auto* factors = static_cast<const float*>(
      dense_data(dense_factor, out, ScalarType::Float, out.numel(), "float32 factor"));
  const Packed packed = packed_of(data, ranges, out, out.numel(), s);
  const Strided target = strided(out, out.mutable_data_ptr(), s);
  dispatch(
      out, [&] { cpu::dequantize(packed, s, target, factors); },
      [&](auto stream) { cuda::dequantize_mul(packed, s, target, factors, stream); });
  return out;
}

Tensor pack_bits(Tensor mask) {
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool, "expected a bool tensor");
  const Tensor dense = to_contiguous(mask);
  const int64_t bytes = plane_bytes(dense.numel());
  Tensor data = empty_tensor(dense, {bytes}, ScalarType::Byte);
  const auto* source = static_cast<const uint8_t*>(dense.const_data_ptr());
  auto* target = static_cast<uint8_t*>(data.mutable_data_ptr());
  dispatch(
      mask, [&] { cpu::pack_bits(source, dense.numel(), target); },
      [&](auto stream) { cuda::pack_bits(source, dense.numel(), target, stream); });
  return data;
}

Tensor unpack_bits(Tensor data, std::vector<int64_t> shape) {
  Tensor mask = empty_tensor(data, shape, ScalarType::Bool);
  STD_TORCH_CHECK(data.scalar_type() == ScalarType::Byte && data.is_contiguous() &&
                      data.numel() == plane_bytes(mask.numel()),
                  "expected contiguous data of ", plane_bytes(mask.numel()), " bytes (uint8), but got ",
                  data.numel());
  const auto* source = static_cast<const uint8_t*>(data.const_data_ptr());
  auto* target = static_cast<uint8_t*>(mask.mutable_data_ptr());
  dispatch(
      data, [&] { cpu::unpack_bits(source, mask.numel(), target); },
      [&](auto stream) { cuda::unpack_bits(source, mask.numel(), target, stream); });
  return mask;
}

// A tensor for the bits of the rows of `x`, along its last dimension, and what kernels write there.
std::tuple<Tensor, ZeroRows> new_zero_rows(const Tensor& x) {
  const int64_t rows = rows_of(x);
  Tensor data = empty_tensor(x, {plane_bytes(rows)}, ScalarType::Byte);
  return {data, ZeroRows{static_cast<uint8_t*>(data.mutable_data_ptr()), rows, x.size(x.dim() - 1)}};
}

Tensor pack_zero_rows(Tensor x) {
  const auto [data, zero_rows] = new_zero_rows(x);
  const Strided source = strided(x, Settings{1, 2, 1, 0});
  dispatch(
      x, [&, &to = zero_rows] { cpu::pack_zero_rows(source, to); },
      [&, &to = zero_rows](auto stream) { cuda::pack_zero_rows(source, to, stream); });
  return data;
}

std::tuple<Tensor, Tensor, Tensor> quantize_rows(Tensor x, int64_t bits, int64_t levels, int64_t group_size,
                                                 bool stochastic, std::optional<Tensor> seed) {
  const Settings s{bits, levels, group_size, 0};
  check_settings(s, x);
  const auto [data, ranges] = new_parts(x, s, x.scalar_type());
  const auto [rows, zero_rows] = new_zero_rows(x);
  encode(x, s, stochastic, seed, data, ranges, {}, zero_rows);
  return {data, ranges, rows};
}

template <class Library>
void add_kernels(Library& m) {
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("quantize_ends", TORCH_BOX(&quantize_ends));
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows));
  m.impl("quantize_out", TORCH_BOX(&quantize_out));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("dequantize_out", TORCH_BOX(&dequantize_out));
  m.impl("pack_bits", TORCH_BOX(&pack_bits));
  m.impl("unpack_bits", TORCH_BOX(&unpack_bits));
  m.impl("pack_zero_rows", TORCH_BOX(&pack_zero_rows));
  m.impl("quantize_map", TORCH_BOX(&quantize_map));
  m.impl("dequantize_mul", TORCH_BOX(&dequantize_mul));
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
