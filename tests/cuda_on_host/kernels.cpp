// csrc/cuda for Python's ctypes.

#include <cuda_runtime.h>

#include <vector>

#include "batch_norm.h"
#include "cross_entropy.h"
#include "gate.h"
#include "levels.h"
#include "norm.h"
#include "pack_windows.h"
#include "positions.h"
#include "quantize.h"
#include "softmax.h"
#include "sparsify.h"

namespace {

struct Problem {
  void* tensor;
  const int64_t *sizes, *strides;
  int64_t dims, numel;
  mesa_tune::Dtype dtype;
  mesa_tune::Settings settings;
  mesa_tune::Packed packed;
};

mesa_tune::Strided strided(const Problem& p) {
  return {p.tensor, p.dtype, mesa_tune::make_layout(p.sizes, p.strides, p.dims, p.settings), p.numel};
}

// Calls encode(packed) as the operators do: beside ends with memory for ranges only if they are needed.
template <class Encode>
void with_memory(const Problem& p, const Encode& encode) {
  const bool needed = !mesa_tune::cuda::in_one_pass(strided(p), p.settings, p.packed);
  const int64_t groups = mesa_tune::split(p.numel, p.settings).groups();
  std::vector<float> memory(static_cast<size_t>(needed ? 2 * groups : 0), 7.0f);
  mesa_tune::Packed packed = p.packed;
  if (packed.ranges == nullptr && needed) packed.ranges = memory.data();
  encode(packed);
}

}  // namespace

extern "C" {

int launch_count() {
  return launches;
}

void quantize(const Problem* p, bool stochastic, const int64_t* seed) {
  with_memory(*p, [&](const mesa_tune::Packed& packed) {
    mesa_tune::cuda::quantize(strided(*p), p->settings, {stochastic, 0, seed}, packed, {}, nullptr);
  });
}

void quantize_rows(const Problem* p, bool stochastic, const int64_t* seed,
                   const mesa_tune::ZeroRows* zero_rows) {
  with_memory(*p, [&](const mesa_tune::Packed& packed) {
    mesa_tune::cuda::quantize(strided(*p), p->settings, {stochastic, 0, seed}, packed, *zero_rows, nullptr);
  });
}

void quantize_map(const Problem* p, const mesa_tune::Map* map, bool stochastic, const int64_t* seed) {
  with_memory(*p, [&](const mesa_tune::Packed& packed) {
    mesa_tune::cuda::quantize_map(strided(*p), *map, p->settings, {stochastic, 0, seed}, packed, nullptr);
  });
}

void dequantize_mul(const Problem* p, const float* factor) {
  mesa_tune::cuda::dequantize_mul(p->packed, p->settings, strided(*p), factor, nullptr);
}

void dequantize(const Problem* p) {
  mesa_tune::cuda::dequantize(p->packed, p->settings, strided(*p), nullptr);
}

void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* data) {
  mesa_tune::cuda::pack_bits(mask, numel, data, nullptr);
}

void pack_zero_rows(const Problem* p, const mesa_tune::ZeroRows* zero_rows) {
  mesa_tune::cuda::pack_zero_rows(strided(*p), *zero_rows, nullptr);
}

void clear_rows(const uint8_t* bits, int64_t rows, int64_t bytes, void* out) {
  mesa_tune::cuda::clear_rows(bits, rows, bytes, out, nullptr);
}

void unpack_bits(const uint8_t* data, int64_t numel, uint8_t* mask) {
  mesa_tune::cuda::unpack_bits(data, numel, mask, nullptr);
}

void pack_windows(const int64_t* indices, int64_t numel, const mesa_tune::cuda::FewWindows* windows,
                  uint8_t* data) {
  mesa_tune::cuda::pack_windows(indices, numel, *windows, data, nullptr);
}

void unpack_windows(const uint8_t* data, int64_t numel, const mesa_tune::cuda::FewWindows* windows,
                    int64_t* indices) {
  mesa_tune::cuda::unpack_windows(data, numel, *windows, indices, nullptr);
}

void pack_levels(const Problem* p, const mesa_tune::FewLevels* boundaries, int map, float* offset) {
  mesa_tune::cuda::pack_levels(p->tensor, p->dtype, p->numel, {static_cast<mesa_tune::Map::Kind>(map)},
                               *boundaries, p->packed.data, offset, nullptr);
}

void unpack_levels(const Problem* p, const mesa_tune::FewLevels* values, const float* offset) {
  mesa_tune::cuda::unpack_levels(p->packed.data, offset, p->numel, *values, p->dtype, p->tensor, nullptr);
}

void extents(const Problem* p) {
  mesa_tune::cuda::extents(strided(*p), p->settings, p->packed.ranges, nullptr);
}

void quantize_within(const Problem* p, bool stochastic, const int64_t* seed) {
  mesa_tune::cuda::quantize_within(strided(*p), p->settings, {stochastic, 0, seed}, p->packed, nullptr);
}

void pack_at_most(const Problem* p, float limit) {
  mesa_tune::cuda::pack_at_most(strided(*p), limit, p->packed.data, nullptr);
}

void gate(const Problem* grad, const Problem* out, float slope, int64_t inner) {
  mesa_tune::cuda::gate({strided(*grad), grad->packed.data, slope, inner, strided(*out)}, nullptr);
}

// `others`: rstd, weight, dw and db, of the dtype of the gradient.
void norm_backward(const Problem* grad, const Problem* dx, void* const* others, int64_t rows, int64_t inner,
                   bool centered, float limit) {
  std::vector<float> sums(static_cast<size_t>(2 * mesa_tune::cuda::norm_portions(rows, inner) * inner));
  const auto numbers = [&](int i) { return mesa_tune::Numbers{others[i], grad->dtype}; };
  mesa_tune::cuda::norm_backward({strided(*grad), numbers(0), numbers(1), limit, rows, inner, centered,
                                  strided(*dx), numbers(2), numbers(3)},
                                 grad->packed, grad->settings, sums.data(), nullptr);
}

void softmax_backward(const Problem* grad, float* dx, int64_t rows, int64_t width) {
  mesa_tune::cuda::softmax_backward({static_cast<const float*>(grad->tensor), rows, width, dx}, grad->packed,
                                    grad->settings, nullptr);
}

void cross_entropy_backward(const Problem* p, const mesa_tune::CrossEntropyBackward* task) {
  float divisor = 7;
  mesa_tune::cuda::cross_entropy_backward(*task, p->packed, p->settings, &divisor, nullptr);
}

void batch_norm_backward(const Problem* p, const mesa_tune::BatchNormBackward* task) {
  const int64_t portions = mesa_tune::cuda::batch_norm_portions(*task);
  std::vector<float> memory(static_cast<size_t>(portions > 1 ? 2 * portions * task->channels : 0));
  mesa_tune::cuda::batch_norm_backward(*task, p->packed, p->settings, memory.data(), nullptr);
}

void pack_positions(const uint8_t* bitmap, const mesa_tune::Positions* positions, uint8_t* data) {
  std::vector<int64_t> memory(static_cast<size_t>(mesa_tune::cuda::positions_memory(*positions)), 7);
  mesa_tune::cuda::pack_positions(bitmap, *positions, data, memory.data(), nullptr);
}

void unpack_positions(const uint8_t* data, const mesa_tune::Positions* positions, uint8_t* bitmap) {
  std::vector<int64_t> memory(static_cast<size_t>(mesa_tune::cuda::positions_memory(*positions)), 7);
  mesa_tune::cuda::unpack_positions(data, *positions, bitmap, memory.data(), nullptr);
}

void sparsify(const void* x, int64_t width, int64_t numel, int64_t count, uint8_t* bitmap, void* survivors) {
  std::vector<int64_t> memory(static_cast<size_t>(mesa_tune::cuda::sparsify_memory(width, numel)), 7);
  mesa_tune::cuda::sparsify(x, width, numel, count, bitmap, survivors, memory.data(), nullptr);
}

void densify(const uint8_t* bitmap, const void* survivors, int64_t width, int64_t numel, int64_t count,
             void* out) {
  std::vector<int64_t> memory(static_cast<size_t>(mesa_tune::cuda::densify_memory(numel)), 7);
  mesa_tune::cuda::densify(bitmap, survivors, width, numel, count, out, memory.data(), nullptr);
}
}
