// Gives the CPU's kernel to `linear_backward` of mesa_tune/fused_ops.py.

#include "linear.h"

#include <optional>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_matrix(const Tensor& x, int64_t rows, int64_t columns, const char* name) {
  STD_TORCH_CHECK(x.is_cpu() && x.scalar_type() == ScalarType::Float && x.dim() == 2 && x.size(0) == rows &&
                      x.size(1) == columns,
                  "expected ", name, " in float32 on the CPU of shape (", rows, ", ", columns, ")");
}

void check_dense_rows(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.stride(1) == 1 || x.size(1) <= 1, "expected rows of neighbours in ", name);
}

Matrix matrix_of(const Tensor& x, void* data) {
  return {static_cast<float*>(data), x.stride(0), x.stride(1)};
}

Matrix read_matrix(const Tensor& x) {
  return matrix_of(x, const_cast<void*>(x.const_data_ptr()));
}

void linear_backward(Tensor data, Tensor ranges, Tensor grad, std::optional<Tensor> weight, int64_t bits,
                     int64_t levels, int64_t group_size, std::optional<Tensor> dx, Tensor dw,
                     std::optional<Tensor> db) {
  STD_TORCH_CHECK(grad.dim() == 2 && dw.dim() == 2, "expected a gradient and a dw of two dimensions");
  const Settings s{bits, levels, group_size, 0};
  const int64_t rows = grad.size(0), out = grad.size(1), in = dw.size(1);
  check_settings(s, grad);
  check_matrix(grad, rows, out, "a gradient");
  check_dense_rows(grad, "the gradient");
  check_matrix(dw, out, in, "dw");
  STD_TORCH_CHECK((dw.stride(0) == in && dw.stride(1) == 1) || (dw.stride(0) == 1 && dw.stride(1) == out),
                  "expected dw without holes");
  LinearBackward task{read_matrix(grad),
                      {nullptr, 0, 0},
                      {nullptr, 0, 0},
                      matrix_of(dw, dw.mutable_data_ptr()),
                      nullptr,
                      rows,
                      out,
                      in};
  if (dx.has_value()) {
    STD_TORCH_CHECK(weight.has_value(), "expected a weight for dx");
    check_matrix(*weight, out, in, "a weight");
    task.weight = read_matrix(*weight);
    check_matrix(*dx, rows, in, "dx");
    check_dense_rows(*dx, "dx");
    task.dx = matrix_of(*dx, dx->mutable_data_ptr());
  }
  if (db.has_value()) {
    const void* sums = dense(*db, grad, ScalarType::Float, out, "db");
    task.db = static_cast<float*>(const_cast<void*>(sums));
  }
  cpu::linear_backward(task, read_packed(data, ranges, grad, rows * in, s), s);
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("linear_backward", TORCH_BOX(&mesa_tune::linear_backward));
}
