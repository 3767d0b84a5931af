// extents and quantize_within on CUDA devices, for running ranges: minimum and maximum of every group, and
// encoding in ranges that are given.

#include "encode.cuh"

namespace mesa_tune::cuda {
namespace {

__global__ void clear_ends(const __grid_constant__ Groups groups, const Packed packed) {
  for (int64_t i = thread_number(); i < groups.span.count; i += thread_count())
    *extremes_of(packed, groups.span.first + i) = Extremes();
}

__device__ inline void store_ends_of(const Packed& packed, int64_t group, const Extremes& extremes) {
  packed.ranges[2 * group] = extremes.minimum();
  packed.ranges[2 * group + 1] = extremes.maximum();
}

template <class Type>
__global__ void measure_ends(const typename Type::Storage* x, const __grid_constant__ Groups groups,
                             const Packed packed) {
  for_each_piece(groups.span, [&](int64_t group, int64_t begin, int64_t end, bool whole) {
    const Extremes all = measured<Type, false, false>(x, Map{}, groups, group, begin, end);
    if (!is_first_lane()) return;
    if (whole) {
      store_ends_of(packed, group, all);
    } else {
      merge(extremes_of(packed, group), all);
    }
  });
}

// Replaces merged extremes by the ends.
__global__ void store_merged(const __grid_constant__ Groups groups, const Packed packed) {
  for (int64_t i = thread_number(); i < groups.span.count; i += thread_count()) {
    const Extremes merged = *extremes_of(packed, groups.span.first + i);
    store_ends_of(packed, groups.span.first + i, merged);
  }
}

template <class Type>
void measure_span(const Strided& x, const Settings& s, const Span& span, const Packed& ends, void* stream) {
  const Groups groups{x.layout, s, span};
  const int64_t pieces = pieces_of(span), merged = pieces > 1 ? span.count : 0;
  launch(clear_ends, merged, stream, groups, ends);
  launch(measure_ends<Type>, span.count * pieces * kWarp, stream,
         static_cast<const typename Type::Storage*>(x.data), groups, ends);
  launch(store_merged, merged, stream, groups, ends);
}

}  // namespace

void extents(const Strided& x, const Settings& settings, float* ends, void* stream) {
  const Split parts = split(x.numel, settings);
  if (x.numel == 0) {
    check(cudaMemsetAsync(ends, 0, sizeof(float) * 2 * static_cast<size_t>(parts.groups()),
                          static_cast<cudaStream_t>(stream)));
    return;
  }
  with_type(x.dtype, [&](auto type) {
    for (const Span& span : {parts.whole, parts.rest})
      measure_span<decltype(type)>(x, settings, span, Packed{nullptr, ends}, stream);
  });
}

void quantize_within(const Strided& x, const Settings& settings, const Noise& noise, const Packed& packed,
                     void* stream) {
  const Split parts = split(x.numel, settings);
  with_type(x.dtype, [&](auto type) {
    using Type = decltype(type);
    for (const Span& span : {parts.whole, parts.rest})
      launch(encode_columns<Type, false, true>, span.count * span.plane(), stream,
             static_cast<const typename Type::Storage*>(x.data), Map{}, Groups{x.layout, settings, span},
             noise, packed);
  });
}

}  // namespace mesa_tune::cuda
