// Encodes a tensor: chooses the kernels, and launches them in their order.
#pragma once

#include "dense.cuh"
#include "quantize.h"
#include "strided.cuh"

namespace mesa_tune::cuda {

// Calls visit with Float, Half or BFloat16.
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

template <class Type, Map::Kind kKind>
void encode_whole(const Strided& x, const Map& map, const Dense& d, const Noise& noise, const Packed& packed,
                  const ZeroRows& zero_rows, void* stream) {
  const Mapping mapping(map, int64_t{kColumns<Type>} << d.shift);
  // Fewer kernels for maps of 16 bits: they take long to compile.
  with_planes<kMapsPairs<Type, kKind> ? 4 : 1>(d.bits, [&](auto planes) {
    constexpr int count = decltype(planes)::value;
    const auto kernel =
        noise.stochastic ? encode_dense<Type, count, true, kKind> : encode_dense<Type, count, false, kKind>;
    const int64_t blocks = blocks_for(d.groups << d.shift);
    launch_blocks(kernel, blocks + blocks_for(zero_rows_threads(zero_rows)), stream,
                  static_cast<const uint4*>(x.data), mapping, d, noise, packed, zero_rows, blocks);
  });
}

template <class Type, bool kMapped>
void encode_strided(const Strided& x, const Map& map, const Settings& s, const Span& span, const Noise& noise,
                    const Packed& packed, void* stream) {
  const auto* data = static_cast<const typename Type::Storage*>(x.data);
  const Groups groups{x.layout, s, span};
  const int64_t pieces = pieces_of(span), merged = pieces > 1 ? span.count : 0;
  launch(clear_extremes, merged, stream, groups, packed);
  launch(measure_pieces<Type, kMapped>, span.count * pieces * kWarp, stream, data, map, groups, packed);
  launch(store_ranges, merged, stream, groups, packed);
  launch(encode_columns<Type, kMapped>, span.count * span.plane(), stream, data, map, groups, noise, packed);
}

// Packs rows of zeros, too, if the groups take one pass and there is no map.
template <class Type, Map::Kind kKind>
void encode(const Strided& x, const Map& map, const Settings& s, const Noise& noise, const Packed& packed,
            const ZeroRows& zero_rows, void* stream) {
  constexpr bool mapped = kKind != Map::kNone;
  const Split parts = split(x.numel, s);
  const int shift = dense_shift<Type>(x, s, packed);
  if (shift < 0) {
    encode_strided<Type, mapped>(x, map, s, parts.whole, noise, packed, stream);
  } else {
    const Dense d{parts.whole.count, shift, static_cast<int>(s.bits), static_cast<int>(s.levels)};
    encode_whole<Type, kKind>(x, map, d, noise, packed, zero_rows, stream);
  }
  encode_strided<Type, mapped>(x, map, s, parts.rest, noise, packed, stream);
}

}  // namespace mesa_tune::cuda
