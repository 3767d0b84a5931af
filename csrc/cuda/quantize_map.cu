// quantize_map on CUDA devices: quantize, with one kernel for each map.

#include "encode.cuh"

namespace mesa_tune::cuda {
namespace {

template <Map::Kind kKind>
using Kind = std::integral_constant<Map::Kind, kKind>;

template <class Visit>
void with_kind(Map::Kind kind, const Visit& visit) {
  switch (kind) {
    case Map::kNone:
      return;
    case Map::kNormalize:
      return visit(Kind<Map::kNormalize>());
    case Map::kGelu:
      return visit(Kind<Map::kGelu>());
    case Map::kGeluTanh:
      return visit(Kind<Map::kGeluTanh>());
    case Map::kSilu:
      return visit(Kind<Map::kSilu>());
    case Map::kExp:
      return visit(Kind<Map::kExp>());
    case Map::kDefinite:
      return visit(Kind<Map::kDefinite>());
  }
}

}  // namespace

void quantize_map(const Strided& x, const Map& map, const Settings& settings, const Noise& noise,
                  const Packed& packed, void* stream) {
  if (x.numel == 0) return;
  with_type(x.dtype, [&](auto type) {
    with_kind(map.kind, [&](auto kind) {
      encode<decltype(type), decltype(kind)::value>(x, map, settings, noise, packed, {}, stream);
    });
  });
}

}  // namespace mesa_tune::cuda
