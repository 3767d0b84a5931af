// dequantize on the CPU, in the portions of quantize.cpp: small groups whole, large ones by tiles.

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
};

MESA_TUNE_INLINE void expand(const Range& range, const uint8_t* codes, int64_t n, float* values) {
  if (range.wide()) return decode_wide(range, codes, n, values);
  decode(range, codes, n, values);
}

MESA_TUNE_INLINE void decode_groups(const Decode& task, const Span& span, int64_t from, int64_t to) {
  alignas(64) float buffer[kTile];
  alignas(64) uint8_t codes[kTile];
  const Settings& s = task.settings;
  for (int64_t group = from; group < to; ++group) {
    const Range range = range_of(task.packed, group);
    const int64_t index = start(s, span, group), in = layout_group(s, group);
    transpose_rows(planes_of(task.packed, s, span, group), span.plane(), s.bits, codes, span.plane(), 8,
                   span.plane());
    if (direct(task.out)) {
      expand(range, codes, span.size, address(task.out, in, index));
    } else {
      expand(range, codes, span.size, buffer);
      store(buffer, in, index, span.size, task.out);
    }
  }
}
MESA_TUNE_PATHS(decode_groups, (const Decode& task, const Span& span, int64_t from, int64_t to),
                (task, span, from, to))

MESA_TUNE_INLINE void decode_tile(const Decode& task, const Span& span, int64_t group, int64_t column) {
  alignas(64) float buffer[kRun];
  alignas(64) uint8_t codes[kTile];
  const Settings& s = task.settings;
  const Range range = range_of(task.packed, group);
  const int64_t columns = std::min(kRun, span.plane() - column);
  transpose_rows(planes_of(task.packed, s, span, group) + column, span.plane(), s.bits, codes, kRun, 8,
                 columns);
  for (int64_t run = 0; run < 8; ++run) {
    const int64_t first = run * span.plane() + column, n = run_length(span, first, columns);
    const int64_t index = start(s, span, group) + first, in = layout_group(s, group);
    if (direct(task.out)) {
      expand(range, codes + run * kRun, n, address(task.out, in, index));
    } else {
      expand(range, codes + run * kRun, n, buffer);
      store(buffer, in, index, n, task.out);
    }
  }
}

MESA_TUNE_INLINE void decode_tiles(const Decode& task, const Span& span, int64_t from, int64_t to) {
  const int64_t each = pieces(span.plane(), kRun);
  for (int64_t tile = from; tile < to; ++tile)
    decode_tile(task, span, span.first + tile / each, tile % each * kRun);
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
  parallel(span.count * pieces(span.plane(), kRun), kTile,
           [&](int64_t from, int64_t to) { decode_tiles_paths[path()](task, span, from, to); });
}

}  // namespace

void dequantize(const Packed& packed, const Settings& settings, const Strided& out) {
  const Decode task{packed, settings, out};
  const Split parts = split(out.numel, settings);
  decode_span(task, parts.whole);
  decode_span(task, parts.rest);
}

}  // namespace mesa_tune::cpu
