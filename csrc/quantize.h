// Interface between the quantizer's operators (quantize.cpp, quantize_within.cpp) and the kernels of each
// device.
#pragma once

#include <cstdint>

#include "geometry.h"
#include "layout.h"

namespace mesa_tune {

enum class Dtype { kFloat, kHalf, kBFloat16 };

// A tensor of any strides, to read or to write.
struct Strided {
  void* data;
  Dtype dtype;
  Layout layout;
  int64_t numel;
};

// An elementwise function that is applied while a tensor is encoded (mesa_tune/ops/maps.py). Only kNormalize
// has more fields: element i uses statistic i / inner % count.
struct Map {
  enum Kind { kNone, kNormalize, kGelu, kGeluTanh, kSilu, kExp, kDefinite };
  Kind kind = kNone;
  const float* mean = nullptr;  // null: 0
  const float* rstd = nullptr;
  int64_t inner = 1;
  int64_t count = 1;
};

// A packed tensor. Of its groups are stored either ranges or ends (ranges.h). A kernel that encodes may have
// memory for ranges beside the ends; one that decodes has one of them.
struct Packed {
  uint8_t* data;             // bit planes of the codes, group after group
  float* ranges;             // two numbers per group; or null
  uint16_t* ends = nullptr;  // two numbers of 16 bits per group; or null
  Dtype ends_dtype = Dtype::kFloat;
};

// Where one bit per row of `width` consecutive elements goes: whether all are zero.
struct ZeroRows {
  uint8_t* data = nullptr;  // null: nowhere
  int64_t rows = 0;
  int64_t width = 1;
};

struct Noise {
  bool stochastic;
  int64_t seed;
  const int64_t* seed_on_device = nullptr;  // used instead of `seed` unless null
};

namespace cpu {

// Largest group size for kernels that decode some rows at a time.
constexpr int64_t kMaxGroupSize = 4096;

// Where `packed` has ends, it has memory for ranges, too.
void quantize(const Strided& x, const Map& map, const Settings& settings, const Noise& noise,
              const Packed& packed);
// Quantizes in the ranges that `packed` already has; values outside take the nearest end.
void quantize_within(const Strided& x, const Settings& settings, const Noise& noise, const Packed& packed);
// Writes minimum and maximum of every group to `ends`.
void extents(const Strided& x, const Settings& settings, float* ends);
// Multiplies the decoded elements by `factor` unless null; then `out` and `factor` are dense float32.
void dequantize(const Packed& packed, const Settings& settings, const Strided& out,
                const float* factor = nullptr);
// Writes the mean of each row of `inner` consecutive elements in the layout.
void row_means(const Strided& x, int64_t inner, float* means);
void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* data);
void unpack_bits(const uint8_t* data, int64_t numel, uint8_t* mask);
void pack_zero_rows(const Strided& x, const ZeroRows& zero_rows);
// Writes zeros to those of rows [first, first + count), of `bytes` bytes each, whose bit is set; without bits
// to none. `out`: the first of these rows.
void clear_rows(const uint8_t* bits, int64_t first, int64_t count, int64_t bytes, void* out);

}  // namespace cpu

// These run on the current device; `stream` is a cudaStream_t.
namespace cuda {

// Whether one kernel encodes all groups of x, each as soon as it is measured. If not, and `packed`
// has ends, quantize and quantize_map need memory for ranges, too: one kernel measures them, and the next one
// rounds in them as they were measured.
bool in_one_pass(const Strided& x, const Settings& settings, const Packed& packed);
// Packs rows of zeros, too: in the same kernel if that encodes all groups.
void quantize(const Strided& x, const Settings& settings, const Noise& noise, const Packed& packed,
              const ZeroRows& zero_rows, void* stream);
// Quantizes `map` of x, in groups of consecutive elements.
void quantize_map(const Strided& x, const Map& map, const Settings& settings, const Noise& noise,
                  const Packed& packed, void* stream);
void quantize_within(const Strided& x, const Settings& settings, const Noise& noise, const Packed& packed,
                     void* stream);
void extents(const Strided& x, const Settings& settings, float* ends, void* stream);
void dequantize(const Packed& packed, const Settings& settings, const Strided& out, void* stream);
// Multiplies the decoded elements by `factor`; `out` and `factor` are dense float32.
void dequantize_mul(const Packed& packed, const Settings& settings, const Strided& out, const float* factor,
                    void* stream);
void pack_bits(const uint8_t* mask, int64_t numel, uint8_t* data, void* stream);
void unpack_bits(const uint8_t* data, int64_t numel, uint8_t* mask, void* stream);
void pack_zero_rows(const Strided& x, const ZeroRows& zero_rows, void* stream);
// Writes zeros to those dense rows of `bytes` bytes, a multiple of 2, whose bit is set.
void clear_rows(const uint8_t* bits, int64_t rows, int64_t bytes, void* out, void* stream);

}  // namespace cuda
}  // namespace mesa_tune
