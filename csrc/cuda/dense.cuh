// Encodes and decodes groups of consecutive elements in one pass. A lane processes 16 bytes of each of a
// group's eight runs. So it has whole bytes of every plane, and lanes exchange nothing but the range. The
// lanes per group are a power of two, at most a warp. What is hard is that all lanes of a warp must take part
// in an exchange: in the last warp, lanes without a group repeat the last group, and write the same bytes.
#pragma once

#include <cstring>

#include "extremes.cuh"
#include "launch.cuh"
#include "map.cuh"
#include "planes.cuh"
#include "quantize.h"
#include "ranges.h"
#include "rounding.cuh"
#include "zero_rows.cuh"

namespace mesa_tune::cuda {

template <class Type>
constexpr int kColumns =
    16 / sizeof(typename Type::Storage);  // elements in 16 bytes = bytes of a lane per plane

template <class Type>
constexpr int kWords = kColumns<Type> / 4;  // words of a lane per plane

struct Dense {
  int64_t groups;
  int shift;  // log2 of the lanes per group
  int bits;
  int levels;

  __device__ int lanes() const { return 1 << shift; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) & (lanes() - 1); }
  // Whether a lane of this warp has a group: the same for all its lanes, which exchange values.
  __device__ bool any(int64_t turn) const { return (turn & -kWarp) >> shift < groups; }
  __device__ int64_t group(int64_t turn) const {
    const int64_t group = turn >> shift;
    return group < groups ? group : groups - 1;
  }
};

// A lane's elements: 16 bytes of each run of a group.
template <class Type>
struct Raw {
  uint32_t words[8][4];

  __device__ Raw(const uint4* x, int64_t first, int lanes) {
#pragma unroll
    for (int run = 0; run < 8; ++run) {
      const uint4 bytes = x[first + run * lanes];
      words[run][0] = bytes.x, words[run][1] = bytes.y, words[run][2] = bytes.z, words[run][3] = bytes.w;
    }
  }
  __device__ float value(int run, int column) const {
    constexpr int per_word = kPairs<Type> ? 2 : 1;
    return number_of<Type>(words[run][column / per_word], column % per_word);
  }
  __device__ void set(int run, int column, float value) {
    if constexpr (kPairs<Type>) {
      const int shift = 16 * (column % 2);
      uint32_t& word = words[run][column / 2];
      word = (word & ~(0xFFFFu << shift)) | uint32_t{Type::store(value)} << shift;
    } else {
      words[run][column] = bit_cast<uint32_t>(value);
    }
  }
};

// The interface of Raw for a decode without a factor.
struct Ones {
  __device__ Ones(const uint4*, int64_t, int) {}
  __device__ float value(int, int) const { return 1.0f; }
};

// A map, and the steps from a lane's element to that in the next column and to that in the next run.
struct Mapping {
  Map map;
  StatisticIndex column, run;

  Mapping(const Map& map, int64_t columns) : map(map), column(map, 1), run(map, columns) {}
};

// Applies a map to a lane's elements. `index`: index in the tensor of the lane's first element.
template <Map::Kind kKind, class Type>
__device__ inline void apply(const Mapping& mapping, int64_t index, Raw<Type>& raw) {
  StatisticIndex first(mapping.map, index);
#pragma unroll
  for (int run = 0; run < 8; ++run) {
    StatisticIndex statistic = first;
#pragma unroll
    for (int column = 0; column < kColumns<Type>; ++column) {
      const float value = raw.value(run, column);
      if constexpr (kKind == Map::kNormalize) {
        raw.set(run, column, normalized(mapping.map, statistic, value));
        statistic.add(mapping.map, mapping.column);
      } else {
        raw.set(run, column, curve<kKind>(value));
      }
    }
    if constexpr (kKind == Map::kNormalize) first.add(mapping.map, mapping.run);
  }
}

// The extremes of a group, in each of its lanes.
template <class Type>
__device__ inline Extremes extremes_of(const Raw<Type>& raw, const Dense& d) {
  uint32_t minima = raw.words[0][0], maxima = minima;
#pragma unroll
  for (int i = 1; i < 32; ++i) {
    minima = minimum(Type(), minima, raw.words[i / 4][i % 4]);
    maxima = maximum(Type(), maxima, raw.words[i / 4][i % 4]);
  }
  for (int distance = d.lanes() / 2; distance > 0; distance /= 2) {
    minima = minimum(Type(), minima, __shfl_xor_sync(kAllLanes, minima, distance));
    maxima = maximum(Type(), maxima, __shfl_xor_sync(kAllLanes, maxima, distance));
  }
  return extremes_within<Type>(minima, maxima);
}

// The extremes of the finite elements. Clears the sign of infinities: so they get the top code, as NaN does,
// which no finite element gets because kRoom raises the step. All lanes of the warp must call this: they
// exchange values.
template <class Type>
__device__ inline Extremes finite_extremes_of(Raw<Type>& raw, const Dense& d) {
  constexpr int per_word = kPairs<Type> ? 2 : 1;
  constexpr uint32_t sign = kPairs<Type> ? 0x8000 : 0x80000000;
  Extremes finite;
#pragma unroll
  for (int i = 0; i < 32 * per_word; ++i) {
    uint32_t& word = raw.words[i / per_word / 4][i / per_word % 4];
    const float value = number_of<Type>(word, i % per_word);
    finite.include_finite(&value, 1);
    if (!is_finite(value)) word &= ~(sign << (16 * (i % per_word)));
  }
  for (int distance = d.lanes() / 2; distance > 0; distance /= 2) finite.include(of_lane(finite, distance));
  return finite;
}

// The decoded elements of one run, 16 bytes.
template <class Type, class Factor>
__device__ inline uint4 decoded_run(const Values& value, const uint32_t (&codes)[kWords<Type>],
                                    const Factor& factor, int run) {
  typename Type::Storage elements[kColumns<Type>];
#pragma unroll
  for (int i = 0; i < kColumns<Type>; ++i)
    elements[i] = Type::store(value(codes[i / 4] >> (i % 4 * 8) & 0xFF) * factor.value(run, i));
  uint4 bytes;
  std::memcpy(&bytes, elements, sizeof(bytes));
  return bytes;
}

// The codes of four consecutive elements from `column` on, one byte per code.
template <bool kStochastic, class Type>
__device__ inline uint32_t four_codes(const Raw<Type>& raw, int run, int column, const Scale& scale,
                                      float factor, uint32_t element, const Keys& keys) {
  const uint32_t counter =
      pair_of(element) + keys.counter_key;  // of the first; all four are in the same half
  const uint32_t half = noise_half(element);
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float position = scale.position(raw.value(run, column + i) * factor);
    codes[i] = kStochastic ? rounded(position, lift(counter + i, keys.hash_key, half)) : nearest(position);
  }
  return __byte_perm(__byte_perm(codes[0], codes[1], 0x73), __byte_perm(codes[2], codes[3], 0x73), 0x5410);
}

// A lane's bytes of one plane.
template <int kCount>
struct Bytes {
  uint32_t words[kCount];
};
template <>
struct alignas(8) Bytes<2> {
  uint32_t words[2];
};

template <class Type>
__device__ inline int64_t plane_index(const Dense& d, int64_t group, int plane) {
  return ((group * d.bits + plane) << d.shift) + d.lane();
}

// Blocks per multiprocessor that registers must suffice for: with 3, extremes of bfloat16 spill before sm_80,
// and the curves of maps on sm_120. Maps of 16 bits spill with as many everywhere.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1200)
constexpr int kBlocks = 2;
#else
constexpr int kBlocks = 3;
#endif

template <class Type, Map::Kind kKind>
constexpr bool kMapsPairs = kPairs<Type> && kKind != Map::kNone;

// The first `blocks` blocks encode; the others pack rows of zeros.
template <class Type, int kPlanes, bool kStochastic, Map::Kind kKind>
__global__ void __launch_bounds__(kThreads, kBlocks - kMapsPairs<Type, kKind>)
    encode_dense(const uint4* x, const Mapping mapping, const Dense d, const Noise noise, const Packed packed,
                 const ZeroRows zero_rows, int64_t blocks) {
  constexpr int words = kWords<Type>;
  const int64_t threads = blocks * kThreads;
  if constexpr (kKind == Map::kNone) {
    if (thread_number() >= threads) {
      const auto* elements = reinterpret_cast<const typename Type::Storage*>(x);
      return pack_rows(zero_rows, thread_number() - threads, thread_count() - threads,
                       [&](int64_t element) { return Type::load(elements[element]); });
    }
  }
  auto* const planes = reinterpret_cast<Bytes<words>*>(packed.data);
  const Keys seed = seed_keys(noise);
  for (int64_t turn = thread_number(); d.any(turn); turn += threads) {
    const int64_t group = d.group(turn);
    const int64_t first = group * 8 * d.lanes() + d.lane();
    Raw<Type> raw(x, first, d.lanes());
    if constexpr (kKind != Map::kNone) apply<kKind>(mapping, first * kColumns<Type>, raw);
    Extremes extremes = extremes_of(raw, d);
    const bool gaps = !extremes.finite();
    if (__any_sync(kAllLanes, gaps)) extremes = finite_extremes_of(raw, d);
    Range range = measure(extremes, d.levels, gaps);
    if (d.lane() == 0) store_range<kPairs<Type>>(packed, group, range, d.levels);
    const Keys keys = seed.of_group(group, range);
    range = range.revealed();
    const Scale scale(range, d.levels);
    const float factor = range.wide() ? kQuarter : 1.0f;
    Bytes<words> bytes[kPlanes];
#pragma unroll
    for (int word = 0; word < words; ++word) {
      uint32_t rows[8];
#pragma unroll
      for (int run = 0; run < 8; ++run) {
        // Computed from the index in the tensor, because values computed from the lane would be the same in
        // every turn, and the compiler would reserve registers for all of them.
        const auto index = static_cast<uint32_t>((first + run * d.lanes()) * kColumns<Type> + 4 * word);
        const uint32_t element = index & (8 * d.lanes() * kColumns<Type> - 1);
        rows[run] = four_codes<kStochastic>(raw, run, 4 * word, scale, factor, element, keys);
      }
      to_planes<kPlanes>(rows);
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) bytes[plane].words[word] = rows[plane];
    }
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      if (plane < d.bits) planes[plane_index<Type>(d, group, plane)] = bytes[plane];
  }
}

// Writes NaN where the code is the top one: where the bit in each plane is that of the top code.
template <class Type>
__device__ inline void write_gaps(const Bytes<kWords<Type>>* planes, const Dense& d, int64_t group,
                                  void* out) {
  auto* first =
      static_cast<typename Type::Storage*>(out) + (group * 8 * d.lanes() + d.lane()) * kColumns<Type>;
  for (int word = 0; word < kWords<Type>; ++word) {
    uint32_t gaps = ~0u;
    for (int plane = 0; plane < d.bits; ++plane) {
      const uint32_t bits = planes[plane_index<Type>(d, group, plane)].words[word];
      gaps &= (d.levels - 1) >> plane & 1 ? bits : ~bits;
    }
#pragma unroll 1
    for (int i = 0; i < 32; ++i)  // one byte per column, one bit per run
      if (gaps >> i & 1)
        first[i % 8 * d.lanes() * kColumns<Type> + 4 * word + i / 8] = Type::store(bit_cast<float>(kNan));
  }
}

template <class Type, int kPlanes, class Factor>
__global__ void __launch_bounds__(kThreads, 3)
    decode_dense(const Packed packed, const Dense d, const uint4* factors, uint4* out) {
  constexpr int words = kWords<Type>;
  const auto* const planes = reinterpret_cast<const Bytes<words>*>(packed.data);
  for (int64_t turn = thread_number(); d.any(turn); turn += thread_count()) {
    const int64_t group = d.group(turn);
    const Factor factor(factors, group * 8 * d.lanes() + d.lane(), d.lanes());
    Bytes<words> bytes[kPlanes] = {};
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      if (plane < d.bits) bytes[plane] = planes[plane_index<Type>(d, group, plane)];
    const Range stored = range_of(packed, group, d.levels);
    const Values value(stored);
    uint32_t codes[8][words];
#pragma unroll
    for (int word = 0; word < words; ++word) {
      uint32_t rows[8];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) rows[plane] = bytes[plane].words[word];
      to_codes<kPlanes>(rows);
#pragma unroll
      for (int run = 0; run < 8; ++run) codes[run][word] = rows[run];
    }
#pragma unroll
    for (int run = 0; run < 8; ++run)
      out[(group * 8 + run) * d.lanes() + d.lane()] = decoded_run<Type>(value, codes[run], factor, run);
    if (stored.has_gaps()) write_gaps<Type>(planes, d, group, out);
  }
}

inline bool aligned(const void* address, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// log2 of the lanes per group, or -1 if the groups cannot be processed in one pass.
template <class Type>
int dense_shift(const Strided& x, const Settings& s, const Packed& packed) {
  if (s.quant_groups > 0 || !x.layout.contiguous()) return -1;
  if (!aligned(x.data, 16) || !aligned(packed.data, kColumns<Type>)) return -1;
  for (int shift = 0; 1 << shift <= kWarp; ++shift)
    if (s.group_size == int64_t{8 * kColumns<Type>} << shift) return shift;
  return -1;
}

// Calls visit with the number of planes rounded up to 1, 2, 4 or 8, at least kFewest, as a
// std::integral_constant.
template <int kFewest = 1, class Visit>
void with_planes(int bits, const Visit& visit) {
  if constexpr (kFewest == 1) {
    if (bits == 1) return visit(std::integral_constant<int, 1>());
    if (bits == 2) return visit(std::integral_constant<int, 2>());
  }
  if (bits <= 4) return visit(std::integral_constant<int, 4>());
  return visit(std::integral_constant<int, 8>());
}

}  // namespace mesa_tune::cuda
