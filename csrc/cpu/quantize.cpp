// quantize, quantize_within and extents on the CPU. Groups that fit the first-level cache are measured,
// rounded and packed in one pass. Larger ones are measured by pieces, then rounded and packed by tiles, so
// that a single group still keeps every thread busy. Which thread does what changes nothing: noise depends on
// positions alone.

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
  bool given;  // the ranges are there, and values may lie outside
  Keys keys;
};

// The values as they are rounded: not below a given range, and quartered in a wide one, so that no difference
// overflows. Above a range the rounding itself ends at the top level; one of a single value has code 0 alone.
MESA_TUNE_INLINE const float* fit(const Encode& task, const Range& range, const float* values, int64_t n,
                                  float* buffer) {
  if (task.given) {
    const float most = range.step == 0 ? range.zero : std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; ++i) buffer[i] = std::min(std::max(values[i], range.zero), most);
    values = buffer;
  }
  if (!range.wide()) return values;
  for (int64_t i = 0; i < n; ++i) buffer[i] = values[i] * kQuarter;
  return buffer;
}

// The codes of elements [element, element + n) of a group whose range is invalid: the top one for gaps. A
// given range may have ended below some.
__attribute__((noinline)) void encode_with_gaps(const Encode& task, const Range& stored, const Keys& keys,
                                                const float* values, int64_t n, int64_t element,
                                                float* buffer, uint8_t* codes) {
  std::fill_n(codes, n, uint8_t{0});
  if (!stored.has_gaps()) return;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const int64_t gap = task.settings.levels - 1;
  const Range range = stored.revealed();
  const float most = range.step == 0 ? range.zero : std::numeric_limits<float>::max();
  const float factor = range.wide() ? kQuarter : 1.0f;
  for (int64_t i = 0; i < n; ++i)
    buffer[i] = is_finite(values[i]) ? std::clamp(values[i], range.zero, most) * factor : infinity;
  Encoder(range, gap, task.noise.stochastic, keys).encode(buffer, n, element, codes);
  for (int64_t i = 0; i < n; ++i)
    if (buffer[i] == infinity) codes[i] = static_cast<uint8_t>(gap);
}

// Elements [index, index + n) of a layout's count, as they are encoded.
MESA_TUNE_INLINE const float* take(const Encode& task, int64_t in, int64_t index, int64_t n, float* buffer) {
  return mapped(task.map, load(task.x, in, index, n, buffer), index, n, buffer);
}

// Ranges and keys of some groups. They take as long as the rounding of sixty elements, one by one; side by
// side, as vectors, next to nothing.
struct Batch {
  static constexpr int64_t kMost = 64;

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
  // Again, of what is finite, where something is not.
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
  MESA_TUNE_INLINE void store_ranges(const Packed& packed, int64_t first, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) store_range(packed, first + i, {zero[i], step[i]});
  }
  MESA_TUNE_INLINE void read_ranges(const Packed& packed, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const Range range = range_of(packed, first + i);
      zero[i] = range.zero;
      step[i] = range.step;
    }
  }
  MESA_TUNE_INLINE void mix_keys(int64_t count, const Keys& keys, int64_t group) {
    for (int64_t i = 0; i < count; ++i) {
      const Keys group_keys = keys.of_group(group + i, {zero[i], step[i]});
      counter_key[i] = group_keys.counter_key;
      hash_key[i] = group_keys.hash_key;
    }
  }

  const float* values[kMost];
  int32_t low[kMost], high[kMost];
  float zero[kMost], step[kMost];
  uint32_t counter_key[kMost], hash_key[kMost];
};

MESA_TUNE_INLINE void encode_group(const Encode& task, const Span& span, int64_t group, const float* values,
                                   const Keys& keys, float* buffer) {
  alignas(64) uint8_t codes[kTile];
  const Settings& s = task.settings;
  const Range range = range_of(task.packed, group);
  if (range.valid()) {
    const Encoder encoder(range, s.levels, task.noise.stochastic, keys);
    encoder.encode(fit(task, range, values, span.size, buffer), span.size, 0, codes);
  } else {
    encode_with_gaps(task, range, keys, values, span.size, 0, buffer, codes);
  }
  for (int64_t i = span.size; i < 8 * span.plane(); ++i) codes[i] = 0;
  transpose_rows(codes, span.plane(), 8, planes_of(task.packed, s, span, group), span.plane(), s.bits,
                 span.plane());
}

// Asks for a later group's elements, if they are neighbours: measuring waits for memory, rounding does not.
MESA_TUNE_INLINE void prefetch(const Encode& task, const Span& span, int64_t group, int64_t to) {
  if (group >= to || !task.x.layout.contiguous()) return;
  const int64_t width = task.x.dtype == Dtype::kFloat ? 4 : 2;
  const int64_t step = layout_group(task.settings, group) * task.x.layout.group_step;
  const char* at = static_cast<const char*>(task.x.data) + width * (step + start(task.settings, span, group));
  for (int64_t byte = 0; byte < width * span.size; byte += 64) __builtin_prefetch(at + byte, 0, 2);
}

// Whole groups [from, to) of a span.
MESA_TUNE_INLINE void encode_groups(const Encode& task, const Span& span, int64_t from, int64_t to) {
  alignas(64) float buffer[kTile];
  Batch batch;
  const int64_t most = std::clamp<int64_t>(kTile / span.size, 1, Batch::kMost);
  for (int64_t first = from; first < to; first += most) {
    const int64_t count = std::min(most, to - first);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t in = layout_group(task.settings, first + i);
      batch.values[i] =
          take(task, in, start(task.settings, span, first + i), span.size, buffer + i * span.size);
      if (task.given) continue;
      Extremes extremes;
      extremes.include(batch.values[i], span.size);
      batch.low[i] = extremes.low;
      batch.high[i] = extremes.high;
    }
    if (task.given) {
      batch.read_ranges(task.packed, first, count);
    } else {
      batch.measure_all(count, span.size, task.settings.levels);
      batch.store_ranges(task.packed, first, count);
    }
    batch.mix_keys(count, task.keys, first);
    for (int64_t i = 0; i < count; ++i) {
      prefetch(task, span, first + most + i, to);
      encode_group(task, span, first + i, batch.values[i], {batch.counter_key[i], batch.hash_key[i]},
                   buffer + i * span.size);
    }
  }
}
MESA_TUNE_PATHS(encode_groups, (const Encode& task, const Span& span, int64_t from, int64_t to),
                (task, span, from, to))

// Extremes of pieces [from, to), counted through the groups of a span: of all elements, or the finite ones.
MESA_TUNE_INLINE void measure_pieces(const Encode& task, const Span& span, bool finite, Extremes* found,
                                     int64_t from, int64_t to) {
  alignas(64) float buffer[kTile];
  const int64_t each = ceil_div(span.size, kTile);
  for (int64_t piece = from; piece < to; ++piece) {
    const int64_t group = span.first + piece / each, begin = piece % each * kTile;
    const int64_t n = std::min(kTile, span.size - begin);
    const int64_t in = layout_group(task.settings, group);
    const float* values = take(task, in, start(task.settings, span, group) + begin, n, buffer);
    if (finite) {
      found[piece].include_finite(values, n);
    } else {
      found[piece].include(values, n);
    }
  }
}
MESA_TUNE_PATHS(measure_pieces,
                (const Encode& task, const Span& span, bool finite, Extremes* found, int64_t from,
                 int64_t to),
                (task, span, finite, found, from, to))

MESA_TUNE_INLINE void encode_tile(const Encode& task, const Span& span, int64_t group, int64_t column) {
  alignas(64) float buffer[kRun];
  alignas(64) uint8_t codes[kTile];
  const Settings& s = task.settings;
  const Range range = range_of(task.packed, group);
  const int64_t columns = std::min(kRun, span.plane() - column);
  const Keys keys = task.keys.of_group(group, range);
  const Encoder encoder(range, s.levels, task.noise.stochastic, keys);
  for (int64_t run = 0; run < 8; ++run) {
    const int64_t first = run * span.plane() + column, n = run_length(span, first, columns);
    const float* values = take(task, layout_group(s, group), start(s, span, group) + first, n, buffer);
    if (range.valid()) {
      encoder.encode(fit(task, range, values, n, buffer), n, first, codes + run * kRun);
    } else {
      encode_with_gaps(task, range, keys, values, n, first, buffer, codes + run * kRun);
    }
    for (int64_t i = n; i < columns; ++i) codes[run * kRun + i] = 0;
  }
  transpose_rows(codes, kRun, 8, planes_of(task.packed, s, span, group) + column, span.plane(), s.bits,
                 columns);
}

MESA_TUNE_INLINE void encode_tiles(const Encode& task, const Span& span, int64_t from, int64_t to) {
  const int64_t each = ceil_div(span.plane(), kRun);
  for (int64_t tile = from; tile < to; ++tile)
    encode_tile(task, span, span.first + tile / each, tile % each * kRun);
}
MESA_TUNE_PATHS(encode_tiles, (const Encode& task, const Span& span, int64_t from, int64_t to),
                (task, span, from, to))

// The extremes of every group of a span: of all elements, or the finite ones.
std::vector<Extremes> measure_span(const Encode& task, const Span& span, bool finite = false) {
  const int64_t each = ceil_div(span.size, kTile);
  std::vector<Extremes> found(static_cast<size_t>(span.count * each));
  parallel(span.count * each, std::min(span.size, kTile), [&](int64_t from, int64_t to) {
    measure_pieces_paths[path()](task, span, finite, found.data(), from, to);
  });
  for (int64_t group = 0; each > 1 && group < span.count; ++group) {
    Extremes all;
    for (int64_t piece = group * each; piece < (group + 1) * each; ++piece) all.include(found[piece]);
    found[group] = all;
  }
  return found;
}

void store_ranges(const Encode& task, const Span& span) {
  const std::vector<Extremes> found = measure_span(task, span);
  const auto is_finite = [](const Extremes& extremes) { return extremes.finite(); };
  const bool valid = std::all_of(found.begin(), found.end(), is_finite);
  const std::vector<Extremes> finite = valid ? found : measure_span(task, span, true);
  for (int64_t group = 0; group < span.count; ++group) {
    const bool gaps = !found[group].finite();
    store_range(task.packed, span.first + group, measure(finite[group], task.settings.levels, gaps));
  }
}

void encode_span(const Encode& task, const Span& span) {
  if (span.count == 0 || span.size == 0) return;
  if (span.size <= kTile) {
    return parallel(span.count, span.size, [&](int64_t from, int64_t to) {
      encode_groups_paths[path()](task, span, span.first + from, span.first + to);
    });
  }
  if (!task.given) store_ranges(task, span);
  parallel(span.count * ceil_div(span.plane(), kRun), kTile,
           [&](int64_t from, int64_t to) { encode_tiles_paths[path()](task, span, from, to); });
}

void encode(const Strided& x, const Map& map, const Settings& settings, const Noise& noise,
            const Packed& packed, bool given) {
  Encode task{x, map, settings, noise, packed, given, {}};
  task.keys.absorb(noise.seed);
  const Split parts = split(x.numel, settings);
  encode_span(task, parts.whole);
  encode_span(task, parts.rest);
}

}  // namespace

void quantize(const Strided& x, const Map& map, const Settings& settings, const Noise& noise,
              const Packed& packed) {
  if (x.numel == 0) std::fill_n(packed.ranges, 2 * split(0, settings).groups(), 0.0f);
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
    const std::vector<Extremes> found = measure_span(task, span);
    for (int64_t group = 0; group < span.count; ++group) {
      float* own = ends + 2 * (span.first + group);
      own[0] = found[group].minimum();
      own[1] = found[group].maximum();
    }
  }
}

}  // namespace mesa_tune::cpu
