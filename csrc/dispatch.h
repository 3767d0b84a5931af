// Runs what an operator does on the device of its tensor: its CPU kernel, or, if they were built, its CUDA
// kernel.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#ifdef MESA_TUNE_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

namespace mesa_tune {

// Calls on_cpu(), or on_cuda(stream) with the current stream of the device of `x`.
template <class OnCpu, class OnCuda>
void dispatch(const torch::stable::Tensor& x, const OnCpu& on_cpu, [[maybe_unused]] const OnCuda& on_cuda) {
  if (x.is_cpu()) return on_cpu();
#ifdef MESA_TUNE_CUDA
  STD_TORCH_CHECK(x.is_cuda(), "expected a tensor on the CPU or on a CUDA device");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  on_cuda(stream);
#else
  STD_TORCH_CHECK(false, "expected a tensor on the CPU");
#endif
}

}  // namespace mesa_tune
