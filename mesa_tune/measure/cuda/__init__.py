"""CUDA modelled on a machine without it: which tensors its kernels save, and its allocator."""
