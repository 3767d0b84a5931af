// The CPU implementation of operator `linear_backward` (mesa_tune/ops/fused.py): checks the tensors and calls
// the kernel.

#include "linear.h"

#include <optional>
#include <tuple>
#include <vector>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tensor for a result; without elements if the result is not requested.
Tensor result(const Tensor& like, bool requested, const std::vector<int64_t>& sizes) {
  return empty_tensor(like, requested ? sizes : std::vector<int64_t>{0}, like.scalar_type());
}

template <class Number>
Number* data_of(const Tensor& x, bool present = true) {
  return present ? static_cast<Number*>(const_cast<void*>(x.const_data_ptr())) : nullptr;
}

// `x` in the dtype of `like`.
Tensor converted(const Tensor& x, const Tensor& like) {
  if (x.scalar_type() == like.scalar_type()) return x;
  Tensor copy = empty_tensor(x, x.sizes().vec(), like.scalar_type());
  return torch::stable::copy_(copy, x);
}

struct Tensors {
  Tensor grad, ranges, dx, dw, db;
  std::optional<Tensor> weight, zero_rows;
};

template <class Number>
void run(const Tensors& t, const Tensor& data, bool transposed, bool bias, int64_t rows, int64_t width,
         const Settings& s) {
  const int64_t out = t.grad.size(t.grad.dim() - 1);
  const bool weighted = t.weight.has_value();
  Matrix<const Number> weight{nullptr, 0, 0};
  if (weighted)
    weight = {data_of<Number>(*t.weight), t.weight->stride(transposed ? 1 : 0),
              t.weight->stride(transposed ? 0 : 1)};
  const LinearBackward<Number> task{dtype_of(t.grad.scalar_type()),
                                    data_of<Number>(t.grad),
                                    weight,
                                    data_of<Number>(t.dx, weighted),
                                    data_of<Number>(t.dw),
                                    transposed,
                                    data_of<Number>(t.db, bias),
                                    t.zero_rows.has_value() ? data_of<uint8_t>(*t.zero_rows) : nullptr,
                                    rows,
                                    out,
                                    width};
  cpu::linear_backward(task, read_packed(data, t.ranges, t.grad, rows * width, s), s);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(Tensor data, Tensor ranges, Tensor grad,
                                                   std::optional<Tensor> weight,
                                                   std::optional<Tensor> zero_rows, int64_t width,
                                                   bool transposed, bool bias, int64_t bits, int64_t levels,
                                                   int64_t group_size) {
  const Settings s{bits, levels, group_size, 0};
  const Tensor dense_grad = to_contiguous(grad);
  check_on_cpu(dense_grad);
  check_settings(s, dense_grad);
  STD_TORCH_CHECK(dense_grad.dim() > 0 && width > 0, "expected a gradient of rows, and an input of a width");
  std::vector<int64_t> sizes = dense_grad.sizes().vec();
  const int64_t out = sizes.back();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  sizes.back() = width;
  const std::vector<int64_t> weight_sizes = {transposed ? width : out, transposed ? out : width};
  if (weight.has_value()) {
    STD_TORCH_CHECK(
        same_device(*weight, dense_grad) && weight->dim() == 2 && weight->sizes().vec() == weight_sizes,
        "expected a weight of shape (", weight_sizes[0], ", ", weight_sizes[1], ")");
    dtype_of(weight->scalar_type());
    weight = converted(*weight, dense_grad);
  }
  if (zero_rows.has_value())
    dense_data(*zero_rows, dense_grad, ScalarType::Byte, plane_bytes(rows), "bits of zero rows");
  const Dtype dtype = dtype_of(dense_grad.scalar_type());
  const Tensors tensors{dense_grad,
                        ranges,
                        result(dense_grad, weight.has_value(), sizes),
                        result(dense_grad, true, weight_sizes),
                        result(dense_grad, bias, {out}),
                        weight,
                        zero_rows};
  const auto kernel = dtype == Dtype::kFloat ? run<float> : run<uint16_t>;
  kernel(tensors, data, transposed, bias, rows, width, s);
  return {tensors.dx, tensors.dw, tensors.db};
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("linear_backward", TORCH_BOX(&mesa_tune::linear_backward));
}
