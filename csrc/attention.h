// What the dispatcher's side (attention.cpp) asks of the CPU's kernel.
#pragma once

#include <cstdint>

namespace mesa_tune {

// Float32 of shape (samples, heads, tokens, width), neighbours along the width; without data, not wanted.
struct Heads {
  float* data;
  int64_t sample;
  int64_t head;
  int64_t token;
  int64_t width;

  float* at(int64_t of_sample, int64_t of_head) const {
    return data == nullptr ? nullptr : data + of_sample * sample + of_head * head;
  }
};

// Something for every score: strides may be zero.
struct Bias {
  const float* data;
  int64_t sample;
  int64_t head;
  int64_t query;
  int64_t key;
};

// The backward of softmax(scale q k^T + bias) v, where dropout let through what has a bit, times `raised`.
struct AttentionBackward {
  Heads q, k, v, grad;
  Heads dq, dk, dv;
  int64_t samples, heads, queries, keys;
  float scale;
  bool causal;
  Bias bias;
  const uint8_t* bits;
  int64_t first_bit;
  float raised;
};

namespace cpu {

void attention_backward(const AttentionBackward& task);

}  // namespace cpu
}  // namespace mesa_tune
