// dequantize on the CPU. As in quantize.cpp, small groups are processed whole, large ones in tiles.

#include "groups.h"
#include "planes.h"
#include "quantize.h"
#include "rounding.h"

namespace mesa_tune::cpu {
namespace {

struct Decode {
  const Packed& packed;
  const Settings& settings;
  const Strided& out;
  const float* factor;  // dense, with `out` dense; null: 1
};

// Decodes elements [index, index + n) of a group of the Layout into `out`.
MESA_TUNE_INLINE void decode_into(const Decode& task, const Range& range, const uint8_t* codes, int64_t group,
                                  int64_t index, int64_t n, float* buffer) {
  const int64_t levels = task.settings.levels;
  if (direct(task.out) && task.factor == nullptr)
    return decode(range, levels, codes, n, address(task.out, group, index));
  decode(range, levels, codes, n, buffer);
  if (task.factor == nullptr) return store(buffer, group, index, n, task.out);
  const float* __restrict factor = task.factor + index;
  float* __restrict out = address(task.out, group, index);
  for (int64_t i = 0; i < n; ++i) out[i] = factor[i] * buffer[i];
}

// Whole groups [from, to) of a span.
MESA_TUNE_INLINE void decode_groups(const Decode& task, const Span& span, int64_t from, int64_t to) {
  alignas(64) float buffer[kTile];
  alignas(64) uint8_t codes[kTile];
  const Settings& s = task.settings;
  for (int64_t group = from; group < to; ++group) {
    const Range range = range_of(task.packed, group, s.levels);
    const int64_t index = first_index(s, span, group), in_layout = layout_group(s, group);
    transpose_rows(planes_of(task.packed, s, span, group), span.plane(), s.bits, codes, span.plane(), 8,
                   span.plane());
    decode_into(task, range, codes, in_layout, index, span.size, buffer);
  }
}
MESA_TUNE_PATHS(decode_groups, (const Decode& task, const Span& span, int64_t from, int64_t to),
                (task, span, from, to))

// The columns of one group that begin with `column`, kRun of them or fewer at the end of the planes.
MESA_TUNE_INLINE void decode_tile(const Decode& task, const Span& span, int64_t group, int64_t column) {
  alignas(64) float buffer[kRun];
  alignas(64) uint8_t codes[kTile];
  const Settings& s = task.settings;
  const Range range = range_of(task.packed, group, s.levels);
  const int64_t columns = std::min(kRun, span.plane() - column);
  transpose_rows(planes_of(task.packed, s, span, group) + column, span.plane(), s.bits, codes, kRun, 8,
                 columns);
  for (int64_t run = 0; run < 8; ++run) {
    const int64_t first = run * span.plane() + column, n = run_length(span, first, columns);
    const int64_t index = first_index(s, span, group) + first, in_layout = layout_group(s, group);
    decode_into(task, range, codes + run * kRun, in_layout, index, n, buffer);
  }
}

// Tiles [from, to), counted over all groups of a span.
MESA_TUNE_INLINE void decode_tiles(const Decode& task, const Span& span, int64_t from, int64_t to) {
  const int64_t tiles_per_group = ceil_div(span.plane(), kRun);
  for (int64_t tile = from; tile < to; ++tile)
    decode_tile(task, span, span.first + tile / tiles_per_group, tile % tiles_per_group * kRun);
}
MESA_TUNE_PATHS(decode_tiles, (const Decode& task, const Span& span, int64_t from, int64_t to),
                (task, span, from, to))

void decode_span(const Decode& task, const Span& span) {
  if (span.count == 0 || span.size == 0) return;
  if (span.size <= kTile) {
    return parallel(span.count, span.size, [&](int64_t from, int64_t to) {
      decode_groups_paths[path()](task, span, span.first + from, span.first + to);
    });
  }
  parallel(span.count * ceil_div(span.plane(), kRun), kTile,
           [&](int64_t from, int64_t to) { decode_tiles_paths[path()](task, span, from, to); });
}

}  // namespace

void dequantize(const Packed& packed, const Settings& settings, const Strided& out, const float* factor) {
  const Decode task{packed, settings, out, factor};
  const Split parts = split(out.numel, settings);
  decode_span(task, parts.whole);
  decode_span(task, parts.rest);
}

}  // namespace mesa_tune::cpu
