// Kernels for groups of any size and layout. One warp measures one piece of a group. The extremes of a group
// of several pieces are merged by atomics, whose order does not matter. They need no memory of their own: the
// extremes of all elements use that of the range, the extremes of the finite elements that of the codes. Then
// each thread encodes or decodes one column of eight elements. Encoding takes ranges in float32, where ends
// are stored, too: the extremes need their memory, and all columns the range as it was measured, for noise.
#pragma once

#include "column.cuh"
#include "extremes.cuh"
#include "launch.cuh"
#include "map.cuh"
#include "planes.cuh"
#include "ranges.h"
#include "rounding.cuh"

namespace mesa_tune::cuda {

constexpr int64_t kPiece = 2048;  // elements of one group that one warp measures

// Groups of one size. A kernel reads them in constant memory: a Layout is too large for registers.
struct Groups {
  Layout layout;
  Settings settings;
  Span span;

  __device__ int64_t offset(int64_t group, int64_t index) const {
    return settings.quant_groups > 0 ? layout.offset(group, index) : layout.offset(0, element(group, index));
  }
  // The index of this element in packing order.
  __device__ int64_t element(int64_t group, int64_t index) const {
    return span.element + (group - span.first) * span.size + index;
  }
  __device__ uint8_t* planes(const Packed& packed, int64_t group) const {
    return packed.data + span.byte + (group - span.first) * settings.bits * span.plane();
  }
};

// Stores the range of a group from the extremes of all its elements and of the finite ones.
__device__ inline void store_measured(const Packed& packed, int64_t group, const Extremes& all,
                                      const Extremes& finite, int levels) {
  store_range(packed, group, measure(finite, levels, !all.finite()), levels);
}

// The extremes of all elements, in the memory of the group's range.
__device__ inline Extremes* extremes_of(const Packed& packed, int64_t group) {
  return reinterpret_cast<Extremes*>(packed.ranges) + group;
}

// The extremes of the finite elements, in the first aligned words of the group's codes. A group of several
// pieces has enough of them.
__device__ inline Extremes* finite_of(const Groups& groups, const Packed& packed, int64_t group) {
  constexpr uintptr_t word = alignof(Extremes);
  const auto address = reinterpret_cast<uintptr_t>(groups.planes(packed, group));
  return reinterpret_cast<Extremes*>((address + word - 1) & ~(word - 1));
}

// One element, with the map applied.
template <class Type, bool kMapped>
__device__ inline float load_mapped(const typename Type::Storage* x, const Map& map, const Groups& groups,
                                    int64_t group, int64_t index) {
  const float value = Type::load(x[groups.offset(group, index)]);
  if constexpr (kMapped) {
    return Type::load(Type::store(mapped(map, groups.element(group, index), value)));
  } else {
    return value;
  }
}

static __global__ void clear_extremes(const __grid_constant__ Groups groups, const Packed packed) {
  for (int64_t i = thread_number(); i < groups.span.count; i += thread_count()) {
    *extremes_of(packed, groups.span.first + i) = Extremes();
    *finite_of(groups, packed, groups.span.first + i) = Extremes();
  }
}

__device__ inline void merge(Extremes* merged, const Extremes& piece) {
  atomicMin(&merged->low, piece.low);
  atomicMax(&merged->high, piece.high);
}

// Extremes of elements [begin, end), or of the finite ones, in every lane of a warp.
template <class Type, bool kMapped, bool kFinite>
__device__ inline Extremes measured(const typename Type::Storage* x, const Map& map, const Groups& groups,
                                    int64_t group, int64_t begin, int64_t end) {
  Extremes extremes;
  for (int64_t i = begin + threadIdx.x % kWarp; i < end; i += kWarp) {
    const float value = load_mapped<Type, kMapped>(x, map, groups, group, i);
    if constexpr (kFinite) {
      extremes.include_finite(&value, 1);
    } else {
      extremes.include(&value, 1);
    }
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) extremes.include(of_lane(extremes, distance));
  return extremes;
}

constexpr int64_t pieces_of(const Span& span) {
  return (span.size + kPiece - 1) / kPiece;
}

// Calls visit(group, begin, end, whole) for the pieces of all groups, one warp per piece; `whole`: it is the
// only one of its group.
template <class Visit>
__device__ inline void for_each_piece(const Span& span, const Visit& visit) {
  const int64_t pieces = pieces_of(span);
  for (int64_t turn = thread_number(); turn / kWarp < span.count * pieces; turn += thread_count()) {
    const int64_t piece = turn / kWarp, number = quotient(piece, pieces);
    const int64_t begin = (piece - number * pieces) * kPiece, end = std::min(begin + kPiece, span.size);
    visit(span.first + number, begin, end, pieces == 1);
  }
}

__device__ inline bool is_first_lane() {
  return threadIdx.x % kWarp == 0;
}

template <class Type, bool kMapped>
__global__ void measure_pieces(const typename Type::Storage* x, const Map map,
                               const __grid_constant__ Groups groups, const Packed packed) {
  for_each_piece(groups.span, [&](int64_t group, int64_t begin, int64_t end, bool whole) {
    const Extremes all = measured<Type, kMapped, false>(x, map, groups, group, begin, end);
    Extremes finite = all;
    if (!all.finite()) finite = measured<Type, kMapped, true>(x, map, groups, group, begin, end);
    if (!is_first_lane()) return;
    if (whole) {
      store_measured(packed, group, all, finite, groups.settings.levels);
    } else {
      merge(extremes_of(packed, group), all);
      merge(finite_of(groups, packed, group), finite);
    }
  });
}

// Stores the ranges of groups of several pieces.
static __global__ void store_ranges(const __grid_constant__ Groups groups, const Packed packed) {
  for (int64_t i = thread_number(); i < groups.span.count; i += thread_count()) {
    const int64_t group = groups.span.first + i;
    const Extremes all = *extremes_of(packed, group), finite = *finite_of(groups, packed, group);
    store_measured(packed, group, all, finite, groups.settings.levels);
  }
}

// The position of a value in a given range, of which it may be outside; 0 in a range of one value. The top
// code is not for finite values where it stands for gaps.
__device__ inline float position_within(const Scale& scale, float value, bool has_gaps) {
  const float top = has_gaps ? scale.top - 1.0f : scale.top;
  return scale.inverse > 0 ? fminf(fmaxf((value - scale.base) * scale.inverse, 0.0f), top) : 0.0f;
}

// `kGiven`: the ranges were given, else they are those of the elements.
template <class Type, bool kMapped, bool kGiven = false>
__global__ void encode_columns(const typename Type::Storage* x, const Map map,
                               const __grid_constant__ Groups groups, const Noise noise,
                               const Packed packed) {
  const Span& span = groups.span;
  const Settings& s = groups.settings;
  const Keys seed = seed_keys(noise);
  for (int64_t turn = thread_number(); turn < span.count * span.plane(); turn += thread_count()) {
    const int64_t number = quotient(turn, span.plane()), column = turn - number * span.plane();
    const int64_t group = span.first + number;
    const Range stored = range_of(packed, group, s.levels), range = stored.revealed();
    const Scale scale(range, s.levels);
    const Keys keys = seed.of_group(group, stored);
    const float factor = range.wide() ? kQuarter : 1.0f;
    uint64_t codes = 0;
    for (int run = 0; run < 8; ++run) {
      const int64_t element = run * span.plane() + column;
      if (element >= span.size) break;
      const float value = load_mapped<Type, kMapped>(x, map, groups, group, element) * factor;
      // NaN and Inf get the top code; no finite element gets it, because kRoom raises the step.
      const bool finite = is_finite(value);
      float position = scale.position(finite ? value : fabsf(value));
      if constexpr (kGiven) {
        position = position_within(scale, value, stored.has_gaps());
        if (!finite) position = stored.has_gaps() ? scale.top : 0.0f;
      }
      const uint32_t code =
          noise.stochastic
              ? rounded(position, lift(counter_of(element, keys), keys.hash_key, noise_half(element)))
              : nearest(position);
      codes |= uint64_t{code >> 24} << (8 * run);
    }
    const uint64_t bytes = transposed(codes);
    uint8_t* const planes = groups.planes(packed, group) + column;
    for (int plane = 0; plane < s.bits; ++plane)
      planes[plane * span.plane()] = static_cast<uint8_t>(bytes >> (8 * plane));
  }
}

template <class Type>
__global__ void decode_columns(const Packed packed, const __grid_constant__ Groups groups,
                               const float* factor, typename Type::Storage* out) {
  const Span& span = groups.span;
  for (int64_t turn = thread_number(); turn < span.count * span.plane(); turn += thread_count()) {
    const int64_t number = quotient(turn, span.plane()), column = turn - number * span.plane();
    const int64_t group = span.first + number;
    const Column values(groups.planes(packed, group) + column, span.plane(), groups.settings,
                        range_of(packed, group, groups.settings.levels));
    for (int run = 0; run < 8; ++run) {
      const int64_t element = run * span.plane() + column;
      if (element >= span.size) break;
      const float multiplier = factor == nullptr ? 1.0f : factor[groups.element(group, element)];
      out[groups.offset(group, element)] = Type::store(values(run) * multiplier);
    }
  }
}

}  // namespace mesa_tune::cuda
