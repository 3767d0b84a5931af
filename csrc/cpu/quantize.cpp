// quantize, quantize_within and extents on the CPU. Groups that fit the first-level cache are measured,
// rounded and packed in one pass. Larger groups are measured in pieces, then rounded and packed in tiles, so
// that several threads can share one group. The division among threads does not change the result: noise
// depends on indices alone.

#include "quantize.h"

#include <vector>

#include "groups.h"
#include "map.h"
#include "planes.h"
#include "rounding.h"

namespace mesa_tune::cpu {
namespace {

struct Encode {
  const Strided& x;
  const Map& map;
  const Settings& settings;
  const Noise& noise;
  const Packed& packed;
  bool has_ranges;  // `packed` has the ranges already, and values may be outside them
  Keys keys;
};

// Prepares values for rounding. If the ranges were given, clamps them from below; rounding itself stops at
// the top code, except in a range of one value, where only code 0 is valid. Quarters values of a wide range,
// so that no difference overflows.
MESA_TUNE_INLINE const float* prepare(const Encode& task, const Range& range, const float* values, int64_t n,
                                      float* buffer) {
  if (task.has_ranges) {
    const float high = range.step == 0 ? range.zero : std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; ++i) buffer[i] = std::min(std::max(values[i], range.zero), high);
    values = buffer;
  }
  if (!range.wide()) return values;
  for (int64_t i = 0; i < n; ++i) buffer[i] = values[i] * kQuarter;
  return buffer;
}

// The codes of elements [element, element + n) of a group whose step is NaN: with a hidden step, the top code
// for gaps; else 0. Finite values may be outside a given range, so they are clamped.
__attribute__((noinline)) void encode_with_gaps(const Encode& task, const Range& stored, const Keys& keys,
                                                const float* values, int64_t n, int64_t element,
                                                float* buffer, uint8_t* codes) {
  std::fill_n(codes, n, uint8_t{0});
  if (!stored.has_gaps()) return;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const int64_t gap = task.settings.levels - 1;
  const Range range = stored.revealed();
  const float high = range.step == 0 ? range.zero : std::numeric_limits<float>::max();
  const float factor = range.wide() ? kQuarter : 1.0f;
  for (int64_t i = 0; i < n; ++i)
    buffer[i] = is_finite(values[i]) ? std::clamp(values[i], range.zero, high) * factor : infinity;
  Encoder(range, gap, task.noise.stochastic, keys).encode(buffer, n, element, codes);
  for (int64_t i = 0; i < n; ++i)
    if (buffer[i] == infinity) codes[i] = static_cast<uint8_t>(gap);
}

// Elements [index, index + n) of a group of the Layout, with the map applied. Its results are numbers of the
// dtype of x, so that 16 bits are enough for the ends of a range.
MESA_TUNE_INLINE const float* load_mapped(const Encode& task, int64_t group, int64_t index, int64_t n,
                                          float* buffer) {
  const float* values = mapped(task.map, load(task.x, group, index, n, buffer), index, n, buffer);
  if (task.map.kind != Map::kNone) round_to(task.x.dtype, buffer, n);
  return values;
}

// Ranges and keys of several groups, so that their computation vectorizes over groups. For a single group it
// takes as long as rounding 60 elements.
struct Batch {
  static constexpr int64_t kMaxGroups = 64;

  MESA_TUNE_INLINE void measure_all(int64_t count, int64_t size, int64_t levels) {
    int32_t valid = 1;
    for (int64_t i = 0; i < count; ++i) {
      const Extremes extremes{low[i], high[i]};
      const Range range = measure(extremes, levels);
      zero[i] = range.zero;
      step[i] = range.step;
      valid &= extremes.finite();
    }
    if (!valid) measure_gaps(count, size, levels);
  }
  // Measures the groups with gaps again, by their finite elements.
  __attribute__((noinline)) void measure_gaps(int64_t count, int64_t size, int64_t levels) {
    for (int64_t i = 0; i < count; ++i) {
      if (Extremes{low[i], high[i]}.finite()) continue;
      Extremes finite;
      finite.include_finite(values[i], size);
      const Range range = measure(finite, levels, true);
      zero[i] = range.zero;
      step[i] = range.step;
    }
  }
  MESA_TUNE_INLINE void store_ranges(const Packed& packed, int64_t first, int64_t count,
                                     int64_t levels) const {
    for (int64_t i = 0; i < count; ++i) store_range(packed, first + i, {zero[i], step[i]}, levels);
  }
  MESA_TUNE_INLINE void read_ranges(const Packed& packed, int64_t first, int64_t count, int64_t levels) {
    for (int64_t i = 0; i < count; ++i) {
      const Range range = range_of(packed, first + i, levels);
      zero[i] = range.zero;
      step[i] = range.step;
    }
  }
  MESA_TUNE_INLINE void mix_keys(int64_t count, const Keys& keys, int64_t first) {
    for (int64_t i = 0; i < count; ++i) {
      const Keys group_keys = keys.of_group(first + i, {zero[i], step[i]});
      counter_key[i] = group_keys.counter_key;
      hash_key[i] = group_keys.hash_key;
    }
  }

  const float* values[kMaxGroups];
  int32_t low[kMaxGroups], high[kMaxGroups];
  float zero[kMaxGroups], step[kMaxGroups];
  uint32_t counter_key[kMaxGroups], hash_key[kMaxGroups];
};

MESA_TUNE_INLINE void encode_group(const Encode& task, const Span& span, int64_t group, const float* values,
                                   const Keys& keys, float* buffer) {
  alignas(64) uint8_t codes[kTile];
  const Settings& s = task.settings;
  const Range range = range_of(task.packed, group, s.levels);
  if (range.valid()) {
    const Encoder encoder(range, s.levels, task.noise.stochastic, keys);
    encoder.encode(prepare(task, range, values, span.size, buffer), span.size, 0, codes);
  } else {
    encode_with_gaps(task, range, keys, values, span.size, 0, buffer, codes);
  }
  for (int64_t i = span.size; i < 8 * span.plane(); ++i) codes[i] = 0;
  transpose_rows(codes, span.plane(), 8, planes_of(task.packed, s, span, group), span.plane(), s.bits,
                 span.plane());
}

// Prefetches a group of the next batch if its elements are consecutive in memory. It is called while this
// batch is rounded: measuring waits for memory, rounding does not.
MESA_TUNE_INLINE void prefetch(const Encode& task, const Span& span, int64_t group, int64_t to) {
  if (group >= to || !task.x.layout.contiguous()) return;
  const int64_t width = task.x.dtype == Dtype::kFloat ? 4 : 2;
  const int64_t step = layout_group(task.settings, group) * task.x.layout.group_step;
  const char* begin =
      static_cast<const char*>(task.x.data) + width * (step + first_index(task.settings, span, group));
  for (int64_t byte = 0; byte < width * span.size; byte += 64) __builtin_prefetch(begin + byte, 0, 2);
}

// Whole groups [from, to) of a span.
MESA_TUNE_INLINE void encode_groups(const Encode& task, const Span& span, int64_t from, int64_t to) {
  alignas(64) float buffer[kTile];
  Batch batch;
  const int64_t batch_size = std::clamp<int64_t>(kTile / span.size, 1, Batch::kMaxGroups);
  const int64_t levels = task.settings.levels;
  for (int64_t first = from; first < to; first += batch_size) {
    const int64_t count = std::min(batch_size, to - first);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t in_layout = layout_group(task.settings, first + i);
      batch.values[i] = load_mapped(task, in_layout, first_index(task.settings, span, first + i), span.size,
                                    buffer + i * span.size);
      if (task.has_ranges) continue;
      Extremes extremes;
      extremes.include(batch.values[i], span.size);
      batch.low[i] = extremes.low;
      batch.high[i] = extremes.high;
    }
    if (task.has_ranges) {
      batch.read_ranges(task.packed, first, count, levels);
    } else {
      batch.measure_all(count, span.size, levels);
      batch.store_ranges(task.packed, first, count, levels);
    }
    batch.mix_keys(count, task.keys, first);
    for (int64_t i = 0; i < count; ++i) {
      prefetch(task, span, first + batch_size + i, to);
      encode_group(task, span, first + i, batch.values[i], {batch.counter_key[i], batch.hash_key[i]},
                   buffer + i * span.size);
    }
  }
}
MESA_TUNE_PATHS(encode_groups, (const Encode& task, const Span& span, int64_t from, int64_t to),
                (task, span, from, to))

// Extremes of pieces [from, to), counted over all groups of a span; of all elements, or of the finite ones.
MESA_TUNE_INLINE void measure_pieces(const Encode& task, const Span& span, bool finite, Extremes* extremes,
                                     int64_t from, int64_t to) {
  alignas(64) float buffer[kTile];
  const int64_t pieces_per_group = ceil_div(span.size, kTile);
  for (int64_t piece = from; piece < to; ++piece) {
    const int64_t group = span.first + piece / pieces_per_group, begin = piece % pieces_per_group * kTile;
    const int64_t n = std::min(kTile, span.size - begin);
    const int64_t in_layout = layout_group(task.settings, group);
    const float* values =
        load_mapped(task, in_layout, first_index(task.settings, span, group) + begin, n, buffer);
    if (finite) {
      extremes[piece].include_finite(values, n);
    } else {
      extremes[piece].include(values, n);
    }
  }
}
MESA_TUNE_PATHS(measure_pieces,
                (const Encode& task, const Span& span, bool finite, Extremes* extremes, int64_t from,
                 int64_t to),
                (task, span, finite, extremes, from, to))

// The columns of one group that begin with `column`, kRun of them or fewer at the end of the planes.
MESA_TUNE_INLINE void encode_tile(const Encode& task, const Span& span, int64_t group, int64_t column) {
  alignas(64) float buffer[kRun];
  alignas(64) uint8_t codes[kTile];
  const Settings& s = task.settings;
  const Range range = range_of(task.packed, group, s.levels);
  const int64_t columns = std::min(kRun, span.plane() - column);
  const Keys keys = task.keys.of_group(group, range);
  const Encoder encoder(range, s.levels, task.noise.stochastic, keys);
  for (int64_t run = 0; run < 8; ++run) {
    const int64_t first = run * span.plane() + column, n = run_length(span, first, columns);
    const float* values =
        load_mapped(task, layout_group(s, group), first_index(s, span, group) + first, n, buffer);
    if (range.valid()) {
      encoder.encode(prepare(task, range, values, n, buffer), n, first, codes + run * kRun);
    } else {
      encode_with_gaps(task, range, keys, values, n, first, buffer, codes + run * kRun);
    }
    for (int64_t i = n; i < columns; ++i) codes[run * kRun + i] = 0;
  }
  transpose_rows(codes, kRun, 8, planes_of(task.packed, s, span, group) + column, span.plane(), s.bits,
                 columns);
}

// Tiles [from, to), counted over all groups of a span.
MESA_TUNE_INLINE void encode_tiles(const Encode& task, const Span& span, int64_t from, int64_t to) {
  const int64_t tiles_per_group = ceil_div(span.plane(), kRun);
  for (int64_t tile = from; tile < to; ++tile)
    encode_tile(task, span, span.first + tile / tiles_per_group, tile % tiles_per_group * kRun);
}
MESA_TUNE_PATHS(encode_tiles, (const Encode& task, const Span& span, int64_t from, int64_t to),
                (task, span, from, to))

// The extremes of every group of a span; of all elements, or of the finite ones.
std::vector<Extremes> measure_span(const Encode& task, const Span& span, bool finite = false) {
  const int64_t pieces_per_group = ceil_div(span.size, kTile);
  std::vector<Extremes> extremes(static_cast<size_t>(span.count * pieces_per_group));
  parallel(span.count * pieces_per_group, std::min(span.size, kTile), [&](int64_t from, int64_t to) {
    measure_pieces_paths[path()](task, span, finite, extremes.data(), from, to);
  });
  for (int64_t group = 0; pieces_per_group > 1 && group < span.count; ++group) {
    Extremes merged;
    for (int64_t piece = group * pieces_per_group; piece < (group + 1) * pieces_per_group; ++piece)
      merged.include(extremes[piece]);
    extremes[group] = merged;
  }
  return extremes;
}

// Measures every group of a span and stores its range.

void store_ranges(const Encode& task, const Span& span) {
  const std::vector<Extremes> extremes = measure_span(task, span);
  const auto is_finite = [](const Extremes& group) { return group.finite(); };
  const bool valid = std::all_of(extremes.begin(), extremes.end(), is_finite);
  const std::vector<Extremes> finite = valid ? extremes : measure_span(task, span, true);
  const int64_t levels = task.settings.levels;
  for (int64_t group = 0; group < span.count; ++group) {
    const bool gaps = !extremes[group].finite();
    store_range(task.packed, span.first + group, measure(finite[group], levels, gaps), levels);
  }
}

void encode_span(const Encode& task, const Span& span) {
  if (span.count == 0 || span.size == 0) return;
  if (span.size <= kTile) {
    return parallel(span.count, span.size, [&](int64_t from, int64_t to) {
      encode_groups_paths[path()](task, span, span.first + from, span.first + to);
    });
  }
  if (!task.has_ranges) store_ranges(task, span);
  parallel(span.count * ceil_div(span.plane(), kRun), kTile,
           [&](int64_t from, int64_t to) { encode_tiles_paths[path()](task, span, from, to); });
}

void encode(const Strided& x, const Map& map, const Settings& settings, const Noise& noise,
            const Packed& packed, bool has_ranges) {
  Encode task{x, map, settings, noise, packed, has_ranges, {}};
  task.keys.absorb(noise.seed);
  const Split parts = split(x.numel, settings);
  encode_span(task, parts.whole);
  encode_span(task, parts.rest);
}

}  // namespace

void quantize(const Strided& x, const Map& map, const Settings& settings, const Noise& noise,
              const Packed& packed) {
  const int64_t empty_groups = x.numel == 0 ? split(0, settings).groups() : 0;
  for (int64_t group = 0; group < empty_groups; ++group)
    store_range(packed, group, {0.0f, 0.0f}, settings.levels);
  encode(x, map, settings, noise, packed, false);
}

void quantize_within(const Strided& x, const Settings& settings, const Noise& noise, const Packed& packed) {
  encode(x, {}, settings, noise, packed, true);
}

void extents(const Strided& x, const Settings& settings, float* ends) {
  const Map none;
  const Encode task{x, none, settings, {}, {}, false, {}};
  const Split parts = split(x.numel, settings);
  if (x.numel == 0) std::fill_n(ends, 2 * parts.groups(), 0.0f);
  for (const Span& span : {parts.whole, parts.rest}) {
    if (span.count == 0 || span.size == 0) continue;
    const std::vector<Extremes> extremes = measure_span(task, span);
    for (int64_t group = 0; group < span.count; ++group) {
      float* group_ends = ends + 2 * (span.first + group);
      group_ends[0] = extremes[group].minimum();
      group_ends[1] = extremes[group].maximum();
    }
  }
}

}  // namespace mesa_tune::cpu
