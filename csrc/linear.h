// Interface between the operator (linear.cpp) and its CPU kernel (cpu/linear.cpp).
#pragma once

#include "quantize.h"

namespace mesa_tune {

// A float32 matrix of any strides.
template <class Float>
struct Matrix {
  Float* data;
  int64_t row_stride;
  int64_t column_stride;
};

// The backward of y = x w^T + b: dx = grad w, dw = grad^T x, db = sum of the rows of grad. A null dx (then
// the weight is null, too) or db is not computed. Tensors without strides are dense.
struct LinearBackward {
  const float* grad;           // (rows, out)
  Matrix<const float> weight;  // (out, in)
  float* dx;                   // (rows, in)
  Matrix<float> dw;            // (out, in), row-major or column-major
  float* db;                   // (out)
  int64_t rows, out, in;
};

namespace cpu {

// `packed`: x, in groups of consecutive elements.
void linear_backward(const LinearBackward& task, const Packed& packed, const Settings& settings);

}  // namespace cpu
}  // namespace mesa_tune
