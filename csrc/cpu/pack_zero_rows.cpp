// pack_zero_rows on the CPU: one bit per row, whether all its elements are zero. A row is read up to its
// first few elements that are not. And clear_rows, which makes such rows zero again.

#include <cstring>

#include "groups.h"
#include "paths.h"
#include "quantize.h"
#include "tile.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kAtOnce = 64;  // elements of a row that are compared at a time

MESA_TUNE_INLINE bool is_zero(const Strided& x, int64_t first, int64_t width) {
  alignas(64) float buffer[kAtOnce];
  for (int64_t begin = 0; begin < width; begin += kAtOnce) {
    const int64_t n = std::min(kAtOnce, width - begin);
    const float* values = load(x, 0, first + begin, n, buffer);
    int32_t others = 0;
    for (int64_t i = 0; i < n; ++i) others |= values[i] != 0.0f;
    if (others != 0) return false;
  }
  return true;
}

MESA_TUNE_INLINE void pack_rows(const Strided& x, const ZeroRows& to, int64_t from, int64_t end) {
  for (int64_t byte = from; byte < end; ++byte) {
    uint32_t bits = 0;
    for (int64_t i = 0, n = std::min<int64_t>(8, to.rows - 8 * byte); i < n; ++i)
      bits |= uint32_t{is_zero(x, (8 * byte + i) * to.width, to.width)} << i;
    to.data[byte] = static_cast<uint8_t>(bits);
  }
}
MESA_TUNE_PATHS(pack_rows, (const Strided& x, const ZeroRows& to, int64_t from, int64_t end),
                (x, to, from, end))

}  // namespace

void pack_zero_rows(const Strided& x, const ZeroRows& zero_rows) {
  parallel(plane_bytes(zero_rows.rows), 8 * std::min(kAtOnce, std::max<int64_t>(1, zero_rows.width)),
           [&](int64_t from, int64_t to) { pack_rows_paths[path()](x, zero_rows, from, to); });
}

void clear_rows(const uint8_t* bits, int64_t first, int64_t count, int64_t bytes, void* out) {
  for (int64_t i = 0; bits != nullptr && i < count; ++i)
    if (bits[(first + i) >> 3] >> ((first + i) & 7) & 1)
      std::memset(static_cast<char*>(out) + i * bytes, 0, static_cast<size_t>(bytes));
}

}  // namespace mesa_tune::cpu
