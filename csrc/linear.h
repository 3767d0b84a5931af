// Interface between the operator (linear.cpp) and its CPU kernel (cpu/linear.cpp).
#pragma once

#include "quantize.h"

namespace mesa_tune {

// A matrix of any strides.
template <class Number>
struct Matrix {
  Number* data;
  int64_t row_stride;
  int64_t column_stride;
};

// The backward of y = x w^T + b: dx = grad w, dw = grad^T x, db = sum of the rows of grad. A null dx (then
// the weight is null, too) or db is not computed. Tensors without strides are dense. Numbers are float, or of
// 16 bits, which are those of `dtype`.
template <class Number>
struct LinearBackward {
  Dtype dtype;
  const Number* grad;           // (rows, out)
  Matrix<const Number> weight;  // (out, in)
  Number* dx;                   // (rows, in)
  Number* dw;                   // (out, in), or (in, out) if transposed
  bool transposed;
  Number* db;                // (out)
  const uint8_t* zero_rows;  // one bit per row of x: it is zero, however it was rounded; null: none
  int64_t rows, out, in;
};

namespace cpu {

// `packed`: x, in groups of consecutive elements.
void linear_backward(const LinearBackward<float>& task, const Packed& packed, const Settings& settings);
void linear_backward(const LinearBackward<uint16_t>& task, const Packed& packed, const Settings& settings);

}  // namespace cpu
}  // namespace mesa_tune
