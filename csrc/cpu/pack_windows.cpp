// A max pool's indices as offsets in their windows, and back. Offsets are stored as bit planes, each packed
// as by pack_bits. What is hard is speed: an iterator updates the start of the window from output to output.

#include "pack_windows.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "bits.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kBlock = 1 << 12;  // outputs processed at a time; a multiple of 8

// Iterates over the outputs in row-major order, with the start of each output's window.
class WindowIterator {
 public:
  WindowIterator(const std::vector<Windows>& windows, int64_t output)
      : windows_(windows), window_(windows.size()), start_(windows.size()) {
    for (size_t d = windows.size(); d-- > 0; output /= windows[d].number) move(d, output % windows[d].number);
  }
  size_t dims() const { return windows_.size(); }
  const Windows& axis(size_t d) const { return windows_[d]; }
  int64_t start(size_t d) const { return start_[d]; }
  void next() {
    for (size_t d = window_.size(); d-- > 0;) {
      if (window_[d] + 1 < windows_[d].number) return move(d, window_[d] + 1);
      move(d, 0);
    }
  }

 private:
  void move(size_t d, int64_t window) {
    window_[d] = window;
    start_[d] = window_start(windows_[d], window);
  }

  const std::vector<Windows>& windows_;
  std::vector<int64_t> window_, start_;
};

MESA_TUNE_INLINE void pack_plane(const uint32_t* offsets, int64_t bytes, int64_t plane, uint8_t* data) {
  alignas(64) uint8_t bits[kBlock];
  for (int64_t i = 0; i < 8 * bytes; ++i) bits[i] = offsets[i] >> plane & 1;
  for (int64_t i = 0; i < bytes; ++i) data[i] = gather_bits(bits + 8 * i);
}
MESA_TUNE_PATHS(pack_plane, (const uint32_t* offsets, int64_t bytes, int64_t plane, uint8_t* data),
                (offsets, bytes, plane, data))

MESA_TUNE_INLINE void add_plane(const uint8_t* data, int64_t bytes, int64_t plane, uint32_t* offsets) {
  for (int64_t i = 0; i < bytes; ++i)
    for (int64_t k = 0; k < 8; ++k) offsets[8 * i + k] |= uint32_t{data[i]} >> k << 31 >> (31 - plane);
}
MESA_TUNE_PATHS(add_plane, (const uint8_t* data, int64_t bytes, int64_t plane, uint32_t* offsets),
                (data, bytes, plane, offsets))

// Calls work(first output, number of outputs) for each block.
template <class Work>
void for_blocks(int64_t numel, const Work& work) {
  torch::stable::parallel_for(0, (numel + kBlock - 1) / kBlock, 1, [&](int64_t from, int64_t to) {
    for (int64_t block = from; block < to; ++block)
      work(block * kBlock, std::min(kBlock, numel - block * kBlock));
  });
}

}  // namespace

void pack_windows(const int64_t* indices, int64_t numel, const std::vector<Windows>& windows, uint8_t* data) {
  const int64_t planes = offset_bits(windows), plane = (numel + 7) / 8;
  for_blocks(numel, [&](int64_t first, int64_t n) {
    alignas(64) uint32_t offsets[kBlock] = {};
    WindowIterator iterator(windows, first);
    for (int64_t i = 0; i < n; ++i, iterator.next()) offsets[i] = to_offset(indices[first + i], iterator);
    for (int64_t p = 0; p < planes; ++p)
      pack_plane_paths[path()](offsets, (n + 7) / 8, p, data + p * plane + first / 8);
  });
}

void unpack_windows(const uint8_t* data, int64_t numel, const std::vector<Windows>& windows,
                    int64_t* indices) {
  const int64_t planes = offset_bits(windows), plane = (numel + 7) / 8;
  for_blocks(numel, [&](int64_t first, int64_t n) {
    alignas(64) uint32_t offsets[kBlock] = {};
    for (int64_t p = 0; p < planes; ++p)
      add_plane_paths[path()](data + p * plane + first / 8, (n + 7) / 8, p, offsets);
    WindowIterator iterator(windows, first);
    for (int64_t i = 0; i < n; ++i, iterator.next()) indices[first + i] = to_index(offsets[i], iterator);
  });
}

}  // namespace mesa_tune::cpu
