// Groups of consecutive elements in one pass. A lane takes 16 bytes of each of a group's eight runs: whole
// bytes of every plane, so nothing but the range goes between lanes. A group has a power of two of lanes, at
// most a warp. Lanes of the last warp that find no group repeat the last one: they write the same bytes.
#pragma once

#include <cstring>

#include "launch.cuh"
#include "planes.cuh"
#include "rounding.cuh"

namespace mesa_tune::cuda {

template <class Type>
constexpr int kColumns = 16 / sizeof(typename Type::Storage);  // elements of 16 bytes, bytes of a plane

template <class Type>
constexpr int kWords = kColumns<Type> / 4;

struct Dense {
  int64_t groups;
  int shift;  // log2 of the lanes of a group
  int bits;
  int64_t levels;

  __device__ int lanes() const { return 1 << shift; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) & (lanes() - 1); }
  // The same for all lanes of a warp, which exchange values.
  __device__ bool any(int64_t turn) const { return (turn & -kWarp) >> shift < groups; }
  __device__ int64_t group(int64_t turn) const {
    const int64_t own = turn >> shift;
    return own < groups ? own : groups - 1;
  }
};

// NaN if either is.
__device__ inline float lesser(float a, float b) {
#ifdef __CUDA_ARCH__
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
  return a;
#else
  return a < b || a != a ? a : b;
#endif
}

template <int kCount>
__device__ inline Range range_of(const float (&values)[8][kCount], const Dense& d) {
  float low = values[0][0], high = -values[0][0];
#pragma unroll
  for (int i = 1; i < 8 * kCount; ++i) {
    low = lesser(low, values[i / kCount][i % kCount]);
    high = lesser(high, -values[i / kCount][i % kCount]);
  }
  for (int distance = d.lanes() / 2; distance > 0; distance /= 2) {
    low = lesser(low, __shfl_xor_sync(kAllLanes, low, distance));
    high = lesser(high, __shfl_xor_sync(kAllLanes, high, distance));
  }
  return measure({Extremes::ordered(low), Extremes::ordered(-high)}, d.levels);
}

template <class Type>
__device__ inline void load(const uint4* from, int lanes, float (&values)[8][kColumns<Type>]) {
  uint4 raw[8];
#pragma unroll
  for (int run = 0; run < 8; ++run) raw[run] = from[run * lanes];
#pragma unroll
  for (int run = 0; run < 8; ++run) {
    typename Type::Storage parts[kColumns<Type>];
    std::memcpy(parts, &raw[run], sizeof(parts));
#pragma unroll
    for (int i = 0; i < kColumns<Type>; ++i) values[run][i] = Type::load(parts[i]);
  }
}

template <class Type>
__device__ inline uint4 pack(const Values& value, const uint32_t (&codes)[kWords<Type>]) {
  typename Type::Storage parts[kColumns<Type>];
#pragma unroll
  for (int i = 0; i < kColumns<Type>; ++i)
    parts[i] = Type::store(value(codes[i / 4] >> (i % 4 * 8) & 0xFF));
  uint4 raw;
  std::memcpy(&raw, parts, sizeof(raw));
  return raw;
}

// Four neighbours' codes, a byte each.
template <bool kStochastic>
__device__ inline uint32_t four_codes(const float* values, const Scale& scale, uint32_t counter,
                                      uint32_t key) {
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    codes[i] = rounded(scale.position(values[i]), kStochastic ? slack(counter + i, key) : kNearestSlack);
  return __byte_perm(__byte_perm(codes[0], codes[1], 0x73), __byte_perm(codes[2], codes[3], 0x73), 0x5410);
}

// A lane's bytes of every plane.
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

template <class Type, int kPlanes, bool kStochastic>
__global__ void __launch_bounds__(kThreads, 2)
    encode_dense(const uint4* x, const Dense d, const Noise noise, const Packed packed) {
  constexpr int words = kWords<Type>;
  auto* const planes = reinterpret_cast<Bytes<words>*>(packed.data);
  const Keys seed = seed_keys(noise);
  for (int64_t turn = thread_number(); d.any(turn); turn += thread_count()) {
    const int64_t group = d.group(turn);
    float values[8][kColumns<Type>];
    load<Type>(x + group * 8 * d.lanes() + d.lane(), d.lanes(), values);
    const Range range = range_of(values, d);
    if (d.lane() == 0) {
      packed.ranges[2 * group] = range.zero;
      packed.ranges[2 * group + 1] = range.step;
    }
    if (range.wide()) {
#pragma unroll
      for (int i = 0; i < 8 * kColumns<Type>; ++i)
        values[i / kColumns<Type>][i % kColumns<Type>] *= kQuarter;
    }
    const Scale scale(range, d.levels);
    const Keys keys = seed.of_group(group, range);
    Bytes<words> bytes[kPlanes];
#pragma unroll
    for (int word = 0; word < words; ++word) {
      uint32_t rows[8];
#pragma unroll
      for (int run = 0; run < 8; ++run) {
        const auto element = static_cast<uint32_t>((run * d.lanes() + d.lane()) * kColumns<Type> + 4 * word);
        rows[run] = four_codes<kStochastic>(&values[run][4 * word], scale, element + keys.one, keys.two);
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

template <class Type, int kPlanes>
__global__ void __launch_bounds__(kThreads, 2)
    decode_dense(const Packed packed, const Dense d, uint4* out) {
  constexpr int words = kWords<Type>;
  const auto* const planes = reinterpret_cast<const Bytes<words>*>(packed.data);
  for (int64_t turn = thread_number(); d.any(turn); turn += thread_count()) {
    const int64_t group = d.group(turn);
    Bytes<words> bytes[kPlanes] = {};
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      if (plane < d.bits) bytes[plane] = planes[plane_index<Type>(d, group, plane)];
    const Values value(Range{packed.ranges[2 * group], packed.ranges[2 * group + 1]});
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
      out[(group * 8 + run) * d.lanes() + d.lane()] = pack<Type>(value, codes[run]);
  }
}

}  // namespace mesa_tune::cuda
