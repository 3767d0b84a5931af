// What the dispatcher's side (linear.cpp) asks of the CPU's kernel.
#pragma once

#include "quantize.h"

namespace mesa_tune {

// Float32 numbers, strides apart.
template <class Float>
struct Matrix {
  Float* data;
  int64_t row;
  int64_t column;
};

// The backward of y = x w^T + b: dx = grad w, dw = grad^T x, db = sum of grad's rows. Without data, dx (then
// the weight has none, either) and db are not wanted. What has no strides is dense.
struct LinearBackward {
  const float* grad;           // rows, out
  Matrix<const float> weight;  // out, in
  float* dx;                   // rows, in
  Matrix<float> dw;            // out, in; without a gap
  float* db;                   // out
  int64_t rows, out, in;
};

namespace cpu {

// x is what is packed, in groups of consecutive elements.
void linear_backward(const LinearBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu
}  // namespace mesa_tune
