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

std::vector<int64_t> weights_of(const float* norms, int64_t rows) {
  double most = 0;
  bool all_finite = true;
  for (int64_t i = 0; i < rows; ++i) {
    if (std::isfinite(norms[i])) most = std::max(most, double{norms[i]});
    all_finite &= std::isfinite(norms[i]);
  }
  const auto top = static_cast<double>(all_finite ? kLargest : kLargest / (2 * rows));
  std::vector<int64_t> weights(rows);
  int64_t sum = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const double known = std::isfinite(norms[i]) ? norms[i] : 0;
    sum += weights[i] = static_cast<int64_t>(known / (most > 0 ? most : 1) * top);
  }
  for (int64_t i = 0; i < rows; ++i)
    weights[i] = std::isfinite(norms[i]) ? weights[i] + sum / (kFloor * rows) + 1 : kLargest;
  return weights;
}

// Places in descending order of weight; of equal weights the first comes first.
std::vector<int64_t> order_of(const std::vector<int64_t>& weights) {
  std::vector<int64_t> order(weights.size());
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = ((2 * kLargest - weights[i]) << kPlaceBits) | static_cast<int64_t>(i);
  std::sort(order.begin(), order.end());
  for (int64_t& place : order) place &= (int64_t{1} << kPlaceBits) - 1;
  return order;
}

// What weights in this order are multiplied with to make probabilities in units of kUnit.
double factor_of(const std::vector<int64_t>& weights, const std::vector<int64_t>& order, int64_t count) {
  int64_t rest = 0;
  for (const int64_t weight : weights) rest += weight;
  int64_t certain = 0;
  while ((count - certain) * weights[order[certain]] > rest) rest -= weights[order[certain++]];
  return static_cast<double>(count - certain) / static_cast<double>(rest) * static_cast<double>(kUnit);
}

int64_t uniform(int64_t key, const std::vector<int64_t>& weights) {
  uint64_t content = 0;
  for (size_t i = 0; i < weights.size(); ++i) content += static_cast<uint64_t>(weights[i]) * (i + 1);
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
  const std::vector<int64_t> weights = weights_of(norms, rows);
  const std::vector<int64_t> order = order_of(weights);
  const double factor = factor_of(weights, order, count);
  std::vector<std::pair<int64_t, int64_t>> chosen;
  chosen.reserve(count);
  int64_t end = 0, point = uniform(key, weights);
  for (const int64_t place : order) {
    const double wide = std::min(static_cast<double>(kUnit), static_cast<double>(weights[place]) * factor);
    const int64_t part = std::min(kUnit, static_cast<int64_t>(wide) + 2);
    end += part;
    if (point >= end || static_cast<int64_t>(chosen.size()) == count) continue;
    chosen.emplace_back(place, part);
    point += kUnit;
  }
  std::sort(chosen.begin(), chosen.end());
  for (int64_t i = 0; i < count; ++i) {
    index[i] = static_cast<int32_t>(chosen[i].first);
    inverse[i] = static_cast<float>(static_cast<double>(kUnit) / static_cast<double>(chosen[i].second));
  }
}

}  // namespace mesa_tune::cpu
