// quantize, dequantize and dequantize_mul on CUDA devices. Groups of consecutive elements that can be
// accessed in units of 16 bytes take one pass (dense.cuh). All others, and a partial last group, use general
// kernels (strided.cuh).

#include "encode.cuh"

namespace mesa_tune::cuda {
namespace {

template <class Type, class Factor>
void decode_whole(const Packed& packed, const Dense& d, const Strided& out, const float* factor,
                  void* stream) {
  with_planes(d.bits, [&](auto planes) {
    launch(decode_dense<Type, decltype(planes)::value, Factor>, d.groups << d.shift, stream, packed, d,
           reinterpret_cast<const uint4*>(factor), static_cast<uint4*>(out.data));
  });
}

template <class Type>
void decode_strided(const Packed& packed, const Settings& s, const Span& span, const Strided& out,
                    const float* factor, void* stream) {
  launch(decode_columns<Type>, span.count * span.plane(), stream, packed, Groups{out.layout, s, span}, factor,
         static_cast<typename Type::Storage*>(out.data));
}

template <class Type, class Factor = Ones>
void decode(const Packed& packed, const Settings& s, const Strided& out, void* stream,
            const float* factor = nullptr) {
  const Split parts = split(out.numel, s);
  const int shift = aligned(factor, 16) ? dense_shift<Type>(out, s, packed) : -1;
  if (shift < 0) {
    decode_strided<Type>(packed, s, parts.whole, out, factor, stream);
  } else {
    const Dense d{parts.whole.count, shift, static_cast<int>(s.bits), static_cast<int>(s.levels)};
    decode_whole<Type, Factor>(packed, d, out, factor, stream);
  }
  decode_strided<Type>(packed, s, parts.rest, out, factor, stream);
}

// Writes zeros as the ranges, or as the ends, of groups without elements.
template <class Number>
void clear(Number* numbers, int64_t groups, void* stream) {
  if (groups == 0 || numbers == nullptr) return;
  const size_t bytes = sizeof(Number) * 2 * static_cast<size_t>(groups);
  check(cudaMemsetAsync(numbers, 0, bytes, static_cast<cudaStream_t>(stream)));
}

}  // namespace

bool in_one_pass(const Strided& x, const Settings& settings, const Packed& packed) {
  bool dense = false;
  with_type(x.dtype, [&](auto type) { dense = dense_shift<decltype(type)>(x, settings, packed) >= 0; });
  return dense && split(x.numel, settings).rest.count == 0;
}

void quantize(const Strided& x, const Settings& settings, const Noise& noise, const Packed& packed,
              const ZeroRows& zero_rows, void* stream) {
  const bool together = x.numel > 0 && in_one_pass(x, settings, packed);
  if (!together) pack_zero_rows(x, zero_rows, stream);
  if (x.numel == 0) {
    const int64_t groups = split(0, settings).groups();
    clear(packed.ranges, groups, stream);
    clear(packed.ends, groups, stream);
    return;
  }
  with_type(x.dtype, [&](auto type) {
    encode<decltype(type), Map::kNone>(x, Map{}, settings, noise, packed, together ? zero_rows : ZeroRows{},
                                       stream);
  });
}

void dequantize(const Packed& packed, const Settings& settings, const Strided& out, void* stream) {
  if (out.numel == 0) return;
  with_type(out.dtype, [&](auto type) { decode<decltype(type)>(packed, settings, out, stream); });
}

void dequantize_mul(const Packed& packed, const Settings& settings, const Strided& out, const float* factor,
                    void* stream) {
  if (out.numel > 0) decode<Float, Raw<Float>>(packed, settings, out, stream, factor);
}

}  // namespace mesa_tune::cuda
