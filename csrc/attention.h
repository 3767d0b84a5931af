// Interface between the operator (attention.cpp) and its CPU kernel (cpu/attention.cpp).
#pragma once

#include <cstdint>

namespace mesa_tune {

// A float32 tensor of shape (samples, heads, tokens, width), dense along the width. data is null for a result
// that is not computed.
struct Heads {
  float* data;
  int64_t sample_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t width;

  float* at(int64_t sample, int64_t head) const {
    return data == nullptr ? nullptr : data + sample * sample_stride + head * head_stride;
  }
};

// One number per score; strides may be zero.
struct Bias {
  const float* data;
  int64_t sample_stride;
  int64_t head_stride;
  int64_t query_stride;
  int64_t key_stride;
};

// The backward of softmax(scale q k^T + bias) v. Dropout multiplied each probability by `raised` where its
// bit is set, by 0 elsewhere; without `bits` there was no dropout.
struct AttentionBackward {
  Heads q, k, v, grad;
  Heads dq, dk, dv;
  int64_t samples, heads, queries, keys;
  float scale;
  bool causal;
  Bias bias;
  const uint8_t* bits;
  int64_t first_bit;  // index of the first probability's bit
  float raised;
};

namespace cpu {

void attention_backward(const AttentionBackward& task);

}  // namespace cpu
}  // namespace mesa_tune
