// What the dispatcher's side (quantize.cpp) asks of a device's kernels.
#pragma once

#include <cstdint>

#include "geometry.h"
#include "layout.h"

namespace mesa_tune {

enum class Dtype { kFloat, kHalf, kBFloat16 };

// A tensor of any strides, or memory that a kernel may write in that order.
struct Strided {
  void* data;
  Dtype dtype;
  Layout layout;
  int64_t numel;
};

// What is encoded in place of the elements: a function of each (mesa_tune/ops/maps.py).
struct Map {
  enum Kind { kNone, kNormalize, kGelu, kGeluTanh, kSilu, kExp, kDefinite };
  Kind kind = kNone;
  const float* mean = nullptr;  // 0 if there is none
  const float* rstd = nullptr;
  int64_t inner = 1;
  int64_t count = 1;
};

struct Packed {
  uint8_t* data;
  float* ranges;  // two a group
};

struct Noise {
  bool stochastic;
  int64_t seed;
  const int64_t* seed_on_device = nullptr;  // where it lies if the host cannot read it
};

namespace cpu {

// Groups of at most so many elements are decoded some rows at a time.
constexpr int64_t kMostInGroup = 4096;

void quantize(const Strided& x, const Map& map, const Settings& settings, const Noise& noise,
              const Packed& packed);
// The same for ranges that are given; values outside take the nearest end.
void quantize_within(const Strided& x, const Settings& settings, const Noise& noise, const Packed& packed);
// Minimum and maximum of every group.
void extents(const Strided& x, const Settings& settings, float* ends);
// Times `factor`, if there is one: dense float32, as `out` then is.
void dequantize(const Packed& packed, const Settings& settings, const Strided& out,
                const float* factor = nullptr);
void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* data);
void unpack_bits(const uint8_t* data, int64_t numel, uint8_t* mask);

}  // namespace cpu

// On the current device; `stream` is a cudaStream_t.
namespace cuda {

void quantize(const Strided& x, const Settings& settings, const Noise& noise, const Packed& packed,
              void* stream);
// For groups of consecutive elements; `map` makes something of them.
void quantize_map(const Strided& x, const Map& map, const Settings& settings, const Noise& noise,
                  const Packed& packed, void* stream);
void dequantize(const Packed& packed, const Settings& settings, const Strided& out, void* stream);
// Times `factor`: dense float32, as `out` then is.
void dequantize_mul(const Packed& packed, const Settings& settings, const Strided& out, const float* factor,
                    void* stream);
void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* data, void* stream);
void unpack_bits(const uint8_t* data, int64_t numel, uint8_t* mask, void* stream);

}  // namespace cuda
}  // namespace mesa_tune
