// The CPU implementation of operator `attention_backward` (mesa_tune/ops/fused.py): checks the tensors and
// calls the kernel.

#include "attention.h"

#include <optional>

#include "arguments.h"

namespace mesa_tune {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_heads(const Tensor& x, int64_t samples, int64_t heads, int64_t tokens, int64_t width,
                 const char* name) {
  STD_TORCH_CHECK(x.is_cpu() && x.scalar_type() == ScalarType::Float && x.dim() == 4 &&
                      x.size(0) == samples && x.size(1) == heads && x.size(2) == tokens &&
                      x.size(3) == width && (width == 1 || x.stride(3) == 1),
                  "expected ", name, " in float32 on the CPU of shape (", samples, ", ", heads, ", ", tokens,
                  ", ", width, "), its last dimension dense");
}

Heads heads_of(const Tensor& x, void* data) {
  return {static_cast<float*>(data), x.stride(0), x.stride(1), x.stride(2), x.size(3)};
}

Heads read_heads(const Tensor& x) {
  return heads_of(x, const_cast<void*>(x.const_data_ptr()));
}

Heads written_heads(const std::optional<Tensor>& x, const Tensor& like, const char* name) {
  if (!x.has_value()) return {nullptr, 0, 0, 0, 0};
  check_heads(*x, like.size(0), like.size(1), like.size(2), like.size(3), name);
  return heads_of(*x, x->mutable_data_ptr());
}

void attention_backward(Tensor q, Tensor k, Tensor v, Tensor grad, std::optional<Tensor> bias,
                        std::optional<Tensor> bits, int64_t first_bit, double scale, bool causal,
                        double raised, std::optional<Tensor> dq, std::optional<Tensor> dk,
                        std::optional<Tensor> dv) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "expected q, k and v of four dimensions");
  const int64_t samples = q.size(0), heads = q.size(1), queries = q.size(2), keys = k.size(2);
  STD_TORCH_CHECK(keys > 0, "expected at least one key");
  check_heads(q, samples, heads, queries, q.size(3), "q");
  check_heads(k, samples, heads, keys, q.size(3), "k");
  check_heads(v, samples, heads, keys, v.size(3), "v");
  check_heads(grad, samples, heads, queries, v.size(3), "the gradient");
  AttentionBackward task{read_heads(q),
                         read_heads(k),
                         read_heads(v),
                         read_heads(grad),
                         written_heads(dq, q, "dq"),
                         written_heads(dk, k, "dk"),
                         written_heads(dv, v, "dv"),
                         samples,
                         heads,
                         queries,
                         keys,
                         static_cast<float>(scale),
                         causal,
                         {nullptr, 0, 0, 0, 0},
                         nullptr,
                         first_bit,
                         static_cast<float>(raised)};
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->is_cpu() && bias->scalar_type() == ScalarType::Float && bias->dim() == 4 &&
                        bias->size(0) == samples && bias->size(1) == heads && bias->size(2) == queries &&
                        bias->size(3) == keys,
                    "expected a bias in float32 on the CPU in the shape of the scores");
    task.bias = {static_cast<const float*>(bias->const_data_ptr()), bias->stride(0), bias->stride(1),
                 bias->stride(2), bias->stride(3)};
  }
  if (bits.has_value()) {
    const int64_t numel = first_bit + samples * heads * queries * keys;
    STD_TORCH_CHECK(first_bit >= 0 && bits->is_contiguous() && 8 * bits->numel() >= numel && bits->is_cpu() &&
                        bits->scalar_type() == ScalarType::Byte,
                    "expected at least ", numel, " bits in bytes on the CPU");
    task.bits = static_cast<const uint8_t*>(bits->const_data_ptr());
  }
  cpu::attention_backward(task);
}

}  // namespace
}  // namespace mesa_tune

STABLE_TORCH_LIBRARY_IMPL(mesa_tune, CPU, m) {
  m.impl("attention_backward", TORCH_BOX(&mesa_tune::attention_backward));
}
