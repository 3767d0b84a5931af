// The ops of ReLU and its relatives on CUDA devices.

#include "bits.cuh"
#include "encode.cuh"
#include "gate.h"

namespace mesa_tune::cuda {
namespace {

template <class Type>
__global__ void compare(const typename Type::Storage* x, int64_t numel, float limit, uint8_t* data) {
  pack_elements(numel, data, [&](int64_t element) { return Type::load(x[element]) <= limit; });
}

template <class Type>
__global__ void gate_elements(const typename Type::Storage* grad, const uint8_t* data, int64_t numel,
                              float slope, int64_t inner, typename Type::Storage* out) {
  for (int64_t i = thread_number(); i < numel; i += thread_count()) {
    const int64_t bit = inner == 1 ? i : quotient(i, inner);
    const bool shut = data[bit / 8] >> (bit % 8) & 1;
    if (!shut) {
      out[i] = grad[i];
    } else {
      out[i] = Type::store(slope == 0.0f ? 0.0f : Type::load(grad[i]) * slope);
    }
  }
}

}  // namespace

void pack_at_most(const Strided& x, float limit, uint8_t* data, void* stream) {
  with_type(x.dtype, [&](auto type) {
    using Type = decltype(type);
    launch(compare<Type>, (x.numel + kWarp - 1) / kWarp, stream,
           static_cast<const typename Type::Storage*>(x.data), x.numel, limit, data);
  });
}

void gate(const Gate& task, void* stream) {
  with_type(task.grad.dtype, [&](auto type) {
    using Type = decltype(type);
    launch(gate_elements<Type>, task.grad.numel, stream,
           static_cast<const typename Type::Storage*>(task.grad.data), task.data, task.grad.numel, task.slope,
           task.inner, static_cast<typename Type::Storage*>(task.out.data));
  });
}

}  // namespace mesa_tune::cuda
