// quantize and dequantize on CUDA devices. Consecutive elements in groups that suit 16-byte accesses take one
// pass (dense.cuh); all others, and a partial last group, the general way (strided.cuh).

#include "dense.cuh"
#include "quantize.h"
#include "strided.cuh"

namespace mesa_tune::cuda {
namespace {

bool aligned(const void* address, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// log2 of the lanes that share a group, or -1 where the group does not suit them.
template <class Type>
int dense_shift(const Strided& x, const Settings& s, const Packed& packed) {
  if (s.quant_groups > 0 || !x.layout.contiguous()) return -1;
  if (!aligned(x.data, 16) || !aligned(packed.data, kColumns<Type>)) return -1;
  for (int shift = 0; 1 << shift <= kWarp; ++shift)
    if (s.group_size == int64_t{8 * kColumns<Type>} << shift) return shift;
  return -1;
}

template <class Type, int kPlanes>
void encode_planes(const Strided& x, const Dense& d, const Noise& noise, const Packed& packed, void* stream) {
  const auto kernel =
      noise.stochastic ? encode_dense<Type, kPlanes, true> : encode_dense<Type, kPlanes, false>;
  launch(kernel, d.groups << d.shift, stream, static_cast<const uint4*>(x.data), d, noise, packed);
}

template <class Type, int kPlanes>
void decode_planes(const Packed& packed, const Dense& d, const Strided& out, void* stream) {
  launch(decode_dense<Type, kPlanes>, d.groups << d.shift, stream, packed, d, static_cast<uint4*>(out.data));
}

// Calls visit with the number of planes, 1, 2, 4 or 8, as a type.
template <class Visit>
void with_planes(int bits, const Visit& visit) {
  if (bits == 1) return visit(std::integral_constant<int, 1>());
  if (bits == 2) return visit(std::integral_constant<int, 2>());
  if (bits <= 4) return visit(std::integral_constant<int, 4>());
  return visit(std::integral_constant<int, 8>());
}

template <class Type>
void encode_strided(const Strided& x, const Settings& s, const Span& span, const Noise& noise,
                    const Packed& packed, void* stream) {
  const auto* data = static_cast<const typename Type::Storage*>(x.data);
  const Groups groups{x.layout, s, span};
  const int64_t pieces = span.count * ((span.size + kPiece - 1) / kPiece);
  launch(clear_extremes, span.count, stream, span, packed);
  launch(measure_pieces<Type>, pieces * kWarp, stream, data, groups, packed);
  launch(keep_ranges, span.count, stream, span, s.levels, packed);
  launch(encode_columns<Type>, span.count * span.plane(), stream, data, groups, noise, packed);
}

template <class Type>
void decode_strided(const Packed& packed, const Settings& s, const Span& span, const Strided& out,
                    void* stream) {
  launch(decode_columns<Type>, span.count * span.plane(), stream, packed, Groups{out.layout, s, span},
         static_cast<typename Type::Storage*>(out.data));
}

template <class Type>
void encode(const Strided& x, const Settings& s, const Noise& noise, const Packed& packed, void* stream) {
  const Split parts = split(x.numel, s);
  const int shift = dense_shift<Type>(x, s, packed);
  if (shift < 0) {
    encode_strided<Type>(x, s, parts.whole, noise, packed, stream);
  } else {
    const Dense d{parts.whole.count, shift, static_cast<int>(s.bits), s.levels};
    with_planes(d.bits, [&](auto planes) {
      encode_planes<Type, decltype(planes)::value>(x, d, noise, packed, stream);
    });
  }
  encode_strided<Type>(x, s, parts.rest, noise, packed, stream);
}

template <class Type>
void decode(const Packed& packed, const Settings& s, const Strided& out, void* stream) {
  const Split parts = split(out.numel, s);
  const int shift = dense_shift<Type>(out, s, packed);
  if (shift < 0) {
    decode_strided<Type>(packed, s, parts.whole, out, stream);
  } else {
    const Dense d{parts.whole.count, shift, static_cast<int>(s.bits), s.levels};
    with_planes(d.bits,
                [&](auto planes) { decode_planes<Type, decltype(planes)::value>(packed, d, out, stream); });
  }
  decode_strided<Type>(packed, s, parts.rest, out, stream);
}

template <class Visit>
void with_type(Dtype dtype, const Visit& visit) {
  switch (dtype) {
    case Dtype::kFloat:
      return visit(Float());
    case Dtype::kHalf:
      return visit(Half());
    case Dtype::kBFloat16:
      return visit(BFloat16());
  }
}

}  // namespace

void quantize(const Strided& x, const Settings& settings, const Noise& noise, const Packed& packed,
              void* stream) {
  const int64_t groups = split(x.numel, settings).groups();
  if (x.numel > 0) {
    with_type(x.dtype, [&](auto type) { encode<decltype(type)>(x, settings, noise, packed, stream); });
  } else if (groups > 0) {
    check(cudaMemsetAsync(packed.ranges, 0, sizeof(float) * 2 * static_cast<size_t>(groups),
                          static_cast<cudaStream_t>(stream)));
  }
}

void dequantize(const Packed& packed, const Settings& settings, const Strided& out, void* stream) {
  if (out.numel == 0) return;
  with_type(out.dtype, [&](auto type) { decode<decltype(type)>(packed, settings, out, stream); });
}

}  // namespace mesa_tune::cuda
