"""PyTorch's functions with compressed saved activations: one file a family, and their public twins."""

from mesa_tune.functional.public import (
    batch_norm,
    conv1d,
    conv2d,
    conv3d,
    cross_entropy,
    gelu,
    layer_norm,
    linear,
    matmul,
    relu,
    scaled_dot_product_attention,
    softmax,
)

__all__ = [
    "batch_norm",
    "conv1d",
    "conv2d",
    "conv3d",
    "cross_entropy",
    "gelu",
    "layer_norm",
    "linear",
    "matmul",
    "relu",
    "scaled_dot_product_attention",
    "softmax",
]
