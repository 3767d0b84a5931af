// csrc/cuda for Python's ctypes.

#include "pack_windows.h"
#include "quantize.h"

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

}  // namespace

extern "C" {

void quantize(const Problem* p, bool stochastic, const int64_t* seed) {
  mesa_tune::cuda::quantize(strided(*p), p->settings, {stochastic, 0, seed}, p->packed, nullptr);
}

void quantize_map(const Problem* p, const mesa_tune::Map* map, bool stochastic, const int64_t* seed) {
  mesa_tune::cuda::quantize_map(strided(*p), *map, p->settings, {stochastic, 0, seed}, p->packed, nullptr);
}

void dequantize_mul(const Problem* p, const float* factor) {
  mesa_tune::cuda::dequantize_mul(p->packed, p->settings, strided(*p), factor, nullptr);
}

void dequantize(const Problem* p) {
  mesa_tune::cuda::dequantize(p->packed, p->settings, strided(*p), nullptr);
}

void store_ends(const float* ranges, int64_t groups, int64_t levels, mesa_tune::Dtype dtype, uint16_t* ends) {
  mesa_tune::cuda::store_ends(ranges, groups, levels, dtype, ends, nullptr);
}

void read_ends(const uint16_t* ends, int64_t groups, int64_t levels, mesa_tune::Dtype dtype, float* ranges) {
  mesa_tune::cuda::read_ends(ends, groups, levels, dtype, ranges, nullptr);
}

void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* data) {
  mesa_tune::cuda::pack_bits(mask, numel, data, nullptr);
}

void pack_zero_rows(const Problem* p, int64_t rows, int64_t width) {
  mesa_tune::cuda::pack_zero_rows(strided(*p), rows, width, p->packed.data, nullptr);
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
}
