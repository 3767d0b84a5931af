// Attention's gradients, a head at a time and of it so many queries that their scores stay in the
// second-level cache: P = softmax(s q k^T + m), dP = g v^T, dS = P (dP - sum(dP P)), dq = s dS k, dk = s dS^T
// q, dv = P^T g. Rows of scores are whole, so no statistics of a forward are needed. Products are PyTorch's.

#include "attention.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "arithmetic.h"
#include "curves.h"
#include "lanes.h"
#include "paths.h"
#include "products.h"

namespace mesa_tune::cpu {
namespace {

using torch::stable::Tensor;

constexpr int64_t kScores = 1 << 16;  // at a time, of
constexpr int64_t kQueries = 64;      // at least so many queries, or products are slow
constexpr float kLeast = -std::numeric_limits<float>::infinity();

// Scores of some queries: `count` rows of `keys` numbers, `row` apart, which is a multiple of the lanes.
struct Block {
  float* p;
  float* dp;
  float* factors;  // one a row: P is what `p` holds times that
  int64_t first;   // query
  int64_t count;
  int64_t keys;
  int64_t row;
  const float* bias;
  int64_t bit;
};

// s q k^T + m; what is not seen, and what is beyond the keys, least.
MESA_TUNE_INLINE void scores_row(const AttentionBackward& task, const Block& block, int64_t i,
                                 float* __restrict p) {
  const int64_t keys = block.keys, step = task.bias.key_stride;
  const float scale = task.scale;
  for (int64_t j = 0; j < block.row; ++j) p[j] *= scale;
  const float* __restrict bias = block.bias + (block.bias == nullptr ? 0 : i * task.bias.query_stride);
  if (bias != nullptr && step == 1) {
    for (int64_t j = 0; j < keys; ++j) p[j] += bias[j];
  } else if (bias != nullptr) {
    for (int64_t j = 0; j < keys; ++j) p[j] += bias[j * step];
  }
  const int64_t seen = task.causal ? std::min(keys, block.first + i + 1) : keys;
  std::fill(p + seen, p + block.row, kLeast);
}

MESA_TUNE_INLINE float greatest(const float* values, int64_t n) {
  int32_t most = std::numeric_limits<int32_t>::min();
  for (int64_t i = 0; i < n; ++i) most = std::max(most, Extremes::ordered(values[i]));
  return Extremes::value(most);
}

// P in place of q k^T, but for a factor, which is returned.
MESA_TUNE_INLINE float softmax_row(const AttentionBackward& task, const Block& block, int64_t i,
                                   float* __restrict p) {
  scores_row(task, block, i, p);
  const float most = greatest(p, block.row);
  if (most == kLeast && block.bias != nullptr) {  // a mask may shut out a whole row, which then is zero
    std::fill_n(p, block.row, 0.0f);
    return 0.0f;
  }
  Lanes sums;
  for (int64_t j = 0; j < block.row; j += kLanes) {
    for (int64_t lane = j; lane < j + kLanes; ++lane) p[lane] = exponential(p[lane] - most);
    sums.add(Lanes::read(p + j));
  }
  return 1.0f / sums.total();
}

// Some scores of a row times what dropout multiplies them by.
MESA_TUNE_INLINE void drop(const AttentionBackward& task, int64_t bit, int64_t keys,
                           float* __restrict scores) {
  const uint8_t* __restrict bits = task.bits;
  const float raised = task.raised;
  for (int64_t j = 0; bits != nullptr && j < keys; ++j)
    scores[j] *= bits[(bit + j) >> 3] >> ((bit + j) & 7) & 1 ? raised : 0.0f;
}

// dS in place of dP, and what dropout makes of P in place of it.
MESA_TUNE_INLINE void backward_row(const AttentionBackward& task, const Block& block, int64_t i,
                                   float* __restrict p, float* __restrict dp) {
  const int64_t row = block.row, bit = block.bit + i * task.keys;
  std::fill(dp + block.keys, dp + row, 0.0f);
  drop(task, bit, block.keys, dp);
  Lanes sums;
  for (int64_t j = 0; j < row; j += kLanes) {
    Lanes product = Lanes::read(p + j);
    product.multiply(Lanes::read(dp + j));
    sums.add(product);
  }
  const float factor = block.factors[i], mean = sums.total() * factor, scale = task.scale;
  for (int64_t j = 0; j < row; ++j) {
    p[j] *= factor;
    dp[j] = (dp[j] - mean) * p[j] * scale;
  }
  drop(task, bit, block.keys, p);
}

MESA_TUNE_INLINE void softmax(const AttentionBackward& task, const Block& block) {
  for (int64_t i = 0; i < block.count; ++i)
    block.factors[i] = softmax_row(task, block, i, block.p + i * block.row);
}
MESA_TUNE_PATHS(softmax, (const AttentionBackward& task, const Block& block), (task, block))

MESA_TUNE_INLINE void backward(const AttentionBackward& task, const Block& block) {
  for (int64_t i = 0; i < block.count; ++i)
    backward_row(task, block, i, block.p + i * block.row, block.dp + i * block.row);
}
MESA_TUNE_PATHS(backward, (const AttentionBackward& task, const Block& block), (task, block))

void clear(const Heads& heads, float* data, int64_t tokens) {
  for (int64_t i = 0; data != nullptr && i < tokens; ++i)
    std::fill_n(data + i * heads.token_stride, heads.width, 0.0f);
}

int64_t row_length(int64_t keys) {
  return (keys + kLanes - 1) / kLanes * kLanes;
}

int64_t queries_at_once(const AttentionBackward& task) {
  const int64_t suits = std::max(kScores / row_length(task.keys), kQueries);
  return std::max<int64_t>(1, std::min(suits, task.queries));
}

// One head of one sample.
class Head {
 public:
  Head(const AttentionBackward& task, int64_t number, float* scores)
      : task_(task), sample_(number / task.heads), head_(number % task.heads), scores_(scores) {}

  void run() const {
    clear(task_.dk, task_.dk.at(sample_, head_), task_.keys);
    clear(task_.dv, task_.dv.at(sample_, head_), task_.keys);
    const int64_t each = queries_at_once(task_);
    for (int64_t first = 0; first < task_.queries; first += each)
      run(first, std::min(each, task_.queries - first));
  }

 private:
  void run(int64_t first, int64_t count) const {
    const int64_t keys = task_.causal ? std::min(task_.keys, first + count) : task_.keys;
    const int64_t row = row_length(keys);
    const Bias& bias = task_.bias;
    const Block block{
        scores_,
        scores_ + count * row,
        scores_ + 2 * count * row,
        first,
        count,
        keys,
        row,
        bias.data == nullptr ? nullptr
                             : bias.data + sample_ * bias.sample_stride + head_ * bias.head_stride + first * bias.query_stride,
        task_.first_bit + ((sample_ * task_.heads + head_) * task_.queries + first) * task_.keys};
    const Tensor p = matrix(block.p, count, keys, row), dp = matrix(block.dp, count, keys, row);
    const Tensor q = rows(task_.q, first, count), grad = rows(task_.grad, first, count);
    product(p, q, columns(task_.k, keys));
    softmax_paths[path()](task_, block);
    product(dp, grad, columns(task_.v, keys));
    backward_paths[path()](task_, block);
    if (task_.dq.data != nullptr) product(rows(task_.dq, first, count), dp, rows(task_.k, 0, keys));
    if (task_.dk.data != nullptr)
      add_product(rows(task_.dk, 0, keys), transposed(block.dp, count, keys, row), q);
    if (task_.dv.data != nullptr)
      add_product(rows(task_.dv, 0, keys), transposed(block.p, count, keys, row), grad);
  }

  Tensor rows(const Heads& of, int64_t first, int64_t count) const {
    return matrix(of.at(sample_, head_) + first * of.token_stride, count, of.width, of.token_stride);
  }

  Tensor columns(const Heads& of, int64_t count) const {
    return transposed(of.at(sample_, head_), count, of.width, of.token_stride);
  }

  const AttentionBackward& task_;
  int64_t sample_;
  int64_t head_;
  float* scores_;
};

}  // namespace

void attention_backward(const AttentionBackward& task) {
  torch::stable::parallel_for(0, task.samples * task.heads, 1, [&](int64_t from, int64_t to) {
    const int64_t numbers = queries_at_once(task) * (2 * row_length(task.keys) + 1);
    const auto scores = std::make_unique<float[]>(static_cast<size_t>(numbers));
    for (int64_t number = from; number < to; ++number) Head(task, number, scores.get()).run();
  });
}

}  // namespace mesa_tune::cpu
