"""torch's layers with `settings`: for model code that wants to name them."""

from mesa_tune.nn.layers import (
    GELU,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Conv1d,
    Conv2d,
    Conv3d,
    CrossEntropyLoss,
    LayerNorm,
    Linear,
    MatMul,
    MultiheadAttention,
    ReLU,
    Softmax,
)

__all__ = [
    "GELU",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "CrossEntropyLoss",
    "LayerNorm",
    "Linear",
    "MatMul",
    "MultiheadAttention",
    "ReLU",
    "Softmax",
]
