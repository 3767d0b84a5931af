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

}  // namespace

void quantize(const Strided& x, const Settings& settings, const Noise& noise, const Packed& packed,
              void* stream) {
  const int64_t groups = split(x.numel, settings).groups();
  if (x.numel > 0) {
    with_type(x.dtype, [&](auto type) {
      encode<decltype(type), Map::kNone>(x, Map{}, settings, noise, packed, stream);
    });
  } else if (groups > 0) {
    check(cudaMemsetAsync(packed.ranges, 0, sizeof(float) * 2 * static_cast<size_t>(groups),
                          static_cast<cudaStream_t>(stream)));
  }
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
