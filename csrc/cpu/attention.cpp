// Attention's gradients. With scale s, bias m and output gradient g: P = softmax(s q k^T + m), dP = g v^T,
// dS = P * (dP - sum(dP * P)), dq = s dS k, dk = s dS^T q, dv = P^T g. A thread processes one head at a time,
// in blocks of queries whose scores fit the second-level cache. Rows of scores are whole, so no statistics
// from the forward are needed. Matrix products are PyTorch's.

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

constexpr int64_t kScores = 1 << 16;  // scores of one block
constexpr int64_t kMinQueries = 64;   // fewest queries of one block: with fewer, products are slow
constexpr float kMasked = -std::numeric_limits<float>::infinity();

// The scores of queries [first, first + count): `count` rows of `keys` numbers. `row` is the stride of rows,
// a multiple of kLanes.
struct Block {
  float* p;        // q k^T, then P before its factors, then P after dropout
  float* dp;       // dP, then dS
  float* factors;  // one number per row, by which P is multiplied
  int64_t first;
  int64_t count;
  int64_t keys;
  int64_t row;
  const float* bias;  // of the first query; null: none
  int64_t bit;        // index of the first query's first dropout bit
};

// s q k^T + m; kMasked for keys that causal attention masks, and in the padding of the row.
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
  const int64_t visible = task.causal ? std::min(keys, block.first + i + 1) : keys;
  std::fill(p + visible, p + block.row, kMasked);
}

MESA_TUNE_INLINE float maximum(const float* values, int64_t n) {
  int32_t largest = std::numeric_limits<int32_t>::min();
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, Extremes::ordered(values[i]));
  return Extremes::value(largest);
}

// Replaces q k^T by exp(scores - maximum); returns the factor by which these are P.
MESA_TUNE_INLINE float softmax_row(const AttentionBackward& task, const Block& block, int64_t i,
                                   float* __restrict p) {
  scores_row(task, block, i, p);
  const float largest = maximum(p, block.row);
  if (largest == kMasked && block.bias != nullptr) {  // the bias masks all keys of the query: P is 0
    std::fill_n(p, block.row, 0.0f);
    return 0.0f;
  }
  Lanes sums;
  for (int64_t j = 0; j < block.row; j += kLanes) {
    for (int64_t lane = j; lane < j + kLanes; ++lane) p[lane] = exponential(p[lane] - largest);
    sums.add(Lanes::read(p + j));
  }
  return 1.0f / sums.total();
}

// Multiplies the numbers of one row by their dropout factors, whose bits begin with number `bit`.
MESA_TUNE_INLINE void drop(const AttentionBackward& task, int64_t bit, int64_t keys,
                           float* __restrict scores) {
  const uint8_t* __restrict bits = task.bits;
  const float raised = task.raised;
  for (int64_t j = 0; bits != nullptr && j < keys; ++j)
    scores[j] *= bits[(bit + j) >> 3] >> ((bit + j) & 7) & 1 ? raised : 0.0f;
}

// Replaces dP by dS, and P by P after dropout.
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

int64_t queries_per_block(const AttentionBackward& task) {
  const int64_t queries = std::max(kScores / row_length(task.keys), kMinQueries);
  return std::max<int64_t>(1, std::min(queries, task.queries));
}

// The backward of one head of one sample. `scores`: a buffer for one block.
class Head {
 public:
  Head(const AttentionBackward& task, int64_t number, float* scores)
      : task_(task), sample_(number / task.heads), head_(number % task.heads), scores_(scores) {}

  void run() const {
    clear(task_.dk, task_.dk.at(sample_, head_), task_.keys);
    clear(task_.dv, task_.dv.at(sample_, head_), task_.keys);
    const int64_t block = queries_per_block(task_);
    for (int64_t first = 0; first < task_.queries; first += block)
      run_block(first, std::min(block, task_.queries - first));
  }

 private:
  void run_block(int64_t first, int64_t count) const {
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
        bias.data == nullptr
            ? nullptr
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

  // Tokens [first, first + count) of this head, one per row.
  Tensor rows(const Heads& tensor, int64_t first, int64_t count) const {
    return matrix(tensor.at(sample_, head_) + first * tensor.token_stride, count, tensor.width,
                  tensor.token_stride);
  }

  // The first tokens of this head, one per column.
  Tensor columns(const Heads& tensor, int64_t count) const {
    return transposed(tensor.at(sample_, head_), count, tensor.width, tensor.token_stride);
  }

  const AttentionBackward& task_;
  int64_t sample_;
  int64_t head_;
  float* scores_;
};

}  // namespace

void attention_backward(const AttentionBackward& task) {
  torch::stable::parallel_for(0, task.samples * task.heads, 1, [&](int64_t from, int64_t to) {
    const int64_t size = queries_per_block(task) * (2 * row_length(task.keys) + 1);
    const auto scores = std::make_unique<float[]>(static_cast<size_t>(size));
    for (int64_t number = from; number < to; ++number) Head(task, number, scores.get()).run();
  });
}

}  // namespace mesa_tune::cpu
