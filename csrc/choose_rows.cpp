// The CPU implementation of operator `choose_rows` (mesa_tune/ops/codecs.py): checks the tensors and calls
// the kernel.

#include "choose_rows.h"

#include <tuple>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMostRows = int64_t{1} << 26;

std::tuple<Tensor, Tensor> choose_rows(Tensor norms, int64_t count, Tensor key) {
  check_on_cpu(norms);
  const int64_t rows = norms.numel();
  STD_TORCH_CHECK(rows <= kMostRows, "expected at most ", kMostRows, " rows, but got ", rows);
  STD_TORCH_CHECK(count >= 1 && count <= rows, "expected 1 to ", rows, " rows to choose, but got ", count);
  const auto* values = static_cast<const float*>(dense_data(norms, norms, ScalarType::Float, rows, "norms"));
  const auto* number = static_cast<const int64_t*>(dense_data(key, norms, ScalarType::Long, 1, "key"));
  Tensor index = empty_tensor(norms, {count}, ScalarType::Int);
  Tensor inverse = empty_tensor(norms, {count}, ScalarType::Float);
  cpu::choose_rows(values, rows, count, *number, static_cast<int32_t*>(index.mutable_data_ptr()),
                   static_cast<float*>(inverse.mutable_data_ptr()));
  return {index, inverse};
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("choose_rows", TORCH_BOX(&mesa_tune::choose_rows));
}
