// choose_rows on the CPU: systematic sampling in proportion to norms, with the arithmetic of
// mesa_tune/ops/reference/sampling.py. Everything that is added up is an integer.

#include "choose_rows.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "arithmetic.h"

namespace mesa_tune::cpu {
namespace {

constexpr int64_t kUnit = int64_t{1} << 36;     // probability 1
constexpr int64_t kLargest = int64_t{1} << 32;  // weight of the largest norm, but for the floor
constexpr int64_t kFloor = 10;                  // a tenth of the mean is added to each
constexpr int kPlaceBits = 26;                  // a place and a weight fit 64 bits

// A weight, and the place of its row. Those in ascending order have weights in descending order; of equal
// weights the first row comes first.
class Entry {
 public:
  Entry(int64_t weight, int64_t place) : bits_(((2 * kLargest - weight) << kPlaceBits) | place) {}
  int64_t weight() const { return 2 * kLargest - (bits_ >> kPlaceBits); }
  int64_t place() const { return bits_ & ((int64_t{1} << kPlaceBits) - 1); }
  bool operator<(const Entry& other) const { return bits_ < other.bits_; }

 private:
  int64_t bits_;
};

std::vector<Entry> entries_of(const float* norms, int64_t rows) {
  double most = 0;
  bool all_finite = true;
  for (int64_t i = 0; i < rows; ++i) {
    if (std::isfinite(norms[i])) most = std::max(most, double{norms[i]});
    all_finite &= std::isfinite(norms[i]);
  }
  const auto top = static_cast<double>(all_finite ? kLargest : kLargest / (2 * rows));
  const auto known = [&](int64_t i) {
    const double norm = std::isfinite(norms[i]) ? norms[i] : 0;
    return static_cast<int64_t>(norm / (most > 0 ? most : 1) * top);
  };
  int64_t sum = 0;
  for (int64_t i = 0; i < rows; ++i) sum += known(i);
  std::vector<Entry> entries;
  entries.reserve(rows);
  for (int64_t i = 0; i < rows; ++i)
    entries.emplace_back(std::isfinite(norms[i]) ? known(i) + sum / (kFloor * rows) + 1 : kLargest, i);
  return entries;
}

// What weights are multiplied with to make probabilities in units of kUnit. `entries` are in order.
double factor_of(const std::vector<Entry>& entries, int64_t count) {
  int64_t rest = 0;
  for (const Entry& entry : entries) rest += entry.weight();
  int64_t certain = 0;
  while ((count - certain) * entries[certain].weight() > rest) rest -= entries[certain++].weight();
  return static_cast<double>(count - certain) / static_cast<double>(rest) * static_cast<double>(kUnit);
}

// Of entries in the order of rows.
int64_t uniform(int64_t key, const std::vector<Entry>& entries) {
  uint64_t content = 0;
  for (size_t i = 0; i < entries.size(); ++i) content += static_cast<uint64_t>(entries[i].weight()) * (i + 1);
  uint32_t number = 0;
  for (const uint64_t word : {static_cast<uint64_t>(key), content}) {
    number = mix(number ^ static_cast<uint32_t>(word));
    number = mix(number ^ static_cast<uint32_t>(word >> 32));
  }
  return int64_t{number} << 4;
}

}  // namespace

void choose_rows(const float* norms, int64_t rows, int64_t count, int64_t key, int32_t* index,
                 float* inverse) {
  std::vector<Entry> entries = entries_of(norms, rows);
  int64_t end = 0, point = uniform(key, entries);
  std::sort(entries.begin(), entries.end());
  const double factor = factor_of(entries, count);
  std::vector<std::pair<int64_t, int64_t>> chosen;
  chosen.reserve(count);
  for (const Entry& entry : entries) {
    const double wide = std::min(static_cast<double>(kUnit), static_cast<double>(entry.weight()) * factor);
    const int64_t part = std::min(kUnit, static_cast<int64_t>(wide) + 2);
    end += part;
    if (point >= end || static_cast<int64_t>(chosen.size()) == count) continue;
    chosen.emplace_back(entry.place(), part);
    point += kUnit;
  }
  std::sort(chosen.begin(), chosen.end());
  for (int64_t i = 0; i < count; ++i) {
    index[i] = static_cast<int32_t>(chosen[i].first);
    inverse[i] = static_cast<float>(static_cast<double>(kUnit) / static_cast<double>(chosen[i].second));
  }
}

}  // namespace mesa_tune::cpu
