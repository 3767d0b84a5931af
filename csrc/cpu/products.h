// PyTorch's matrix products on slices of tensors. Inside parallel_for they use only the calling
// thread.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "quantize.h"

namespace mesa_tune::cpu {

inline int32_t number_of(Dtype dtype) {
  if (dtype == Dtype::kFloat) return aoti_torch_dtype_float32();
  return dtype == Dtype::kHalf ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
}

// A matrix over this memory.
inline torch::stable::Tensor matrix(const void* data, Dtype dtype, int64_t rows, int64_t columns,
                                    int64_t row_stride, int64_t column_stride = 1) {
  const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(const_cast<void*>(data), 2, sizes, strides, 0,
                                                            number_of(dtype), aoti_torch_device_type_cpu(), 0,
                                                            &handle));
  return torch::stable::Tensor(handle);
}

inline torch::stable::Tensor matrix(const float* data, int64_t rows, int64_t columns, int64_t row_stride,
                                    int64_t column_stride = 1) {
  return matrix(data, Dtype::kFloat, rows, columns, row_stride, column_stride);
}

// The transpose of a matrix over this memory.
inline torch::stable::Tensor transposed(const void* data, Dtype dtype, int64_t rows, int64_t columns,
                                        int64_t row_stride) {
  return matrix(data, dtype, columns, rows, 1, row_stride);
}

inline torch::stable::Tensor transposed(const float* data, int64_t rows, int64_t columns,
                                        int64_t row_stride) {
  return transposed(data, Dtype::kFloat, rows, columns, row_stride);
}

// out = a b.
inline void product(const torch::stable::Tensor& out, const torch::stable::Tensor& a,
                    const torch::stable::Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

// out += a b.
inline void add_product(const torch::stable::Tensor& out, const torch::stable::Tensor& a,
                        const torch::stable::Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
}

}  // namespace mesa_tune::cpu
