"""torch's layers with `settings`: how each stores what it keeps for backward.

Each *is* its twin (arguments, parameters, `state_dict` keys, outputs); only the calls that its forward makes
go to our functions, by the layer's settings. Inside a converted model the policy decides, and `settings`
rest.
"""

from typing import Any

import torch
from torch import nn

from mesa_tune.formulas import matmul as products
from mesa_tune.functional import StandingAlone, policy_at_work
from mesa_tune.policy.settings import LayerSettings


class _Settled(nn.Module):
    """Takes `settings` beside the twin's arguments, and runs the twin's forward by them."""

    def __init__(self, *args: Any, settings: LayerSettings | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = LayerSettings() if settings is None else settings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The twin's forward."""
        if policy_at_work() or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        with StandingAlone(self.settings):
            return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """The twin's description, and the settings."""
        return ", ".join(part for part in (super().extra_repr(), f"settings={self.settings.label}") if part)


class Linear(_Settled, nn.Linear):
    """`nn.Linear`; keeps the input."""


class Conv1d(_Settled, nn.Conv1d):
    """`nn.Conv1d`; keeps the input."""


class Conv2d(_Settled, nn.Conv2d):
    """`nn.Conv2d`; keeps the input."""


class Conv3d(_Settled, nn.Conv3d):
    """`nn.Conv3d`; keeps the input."""


class BatchNorm1d(_Settled, nn.BatchNorm1d):
    """`nn.BatchNorm1d`; keeps the normalized input."""


class BatchNorm2d(_Settled, nn.BatchNorm2d):
    """`nn.BatchNorm2d`; keeps the normalized input."""


class BatchNorm3d(_Settled, nn.BatchNorm3d):
    """`nn.BatchNorm3d`; keeps the normalized input."""


class LayerNorm(_Settled, nn.LayerNorm):
    """`nn.LayerNorm`; keeps the normalized input."""


class GELU(_Settled, nn.GELU):
    """`nn.GELU`; keeps its derivative."""


class ReLU(_Settled, nn.ReLU):
    """`nn.ReLU`; keeps one exact bit an element."""


class SiLU(_Settled, nn.SiLU):
    """`nn.SiLU`; keeps its derivative."""


class Mish(_Settled, nn.Mish):
    """`nn.Mish`; keeps its derivative."""


class Hardswish(_Settled, nn.Hardswish):
    """`nn.Hardswish`; keeps its derivative."""


class Hardsigmoid(_Settled, nn.Hardsigmoid):
    """`nn.Hardsigmoid`; keeps its derivative."""


class Softplus(_Settled, nn.Softplus):
    """`nn.Softplus`; keeps its derivative."""


class LogSigmoid(_Settled, nn.LogSigmoid):
    """`nn.LogSigmoid`; keeps its derivative."""


class Softsign(_Settled, nn.Softsign):
    """`nn.Softsign`; keeps its derivative."""


class Tanhshrink(_Settled, nn.Tanhshrink):
    """`nn.Tanhshrink`; keeps its derivative."""


class ELU(_Settled, nn.ELU):
    """`nn.ELU`; keeps its derivative."""


class CELU(_Settled, nn.CELU):
    """`nn.CELU`; keeps its derivative."""


class SELU(_Settled, nn.SELU):
    """`nn.SELU`; keeps its derivative."""


class Tanh(_Settled, nn.Tanh):
    """`nn.Tanh`; keeps the output."""


class Sigmoid(_Settled, nn.Sigmoid):
    """`nn.Sigmoid`; keeps the output."""


class GLU(_Settled, nn.GLU):
    """`nn.GLU`; keeps the derivatives by both halves."""


class ReLU6(_Settled, nn.ReLU6):
    """`nn.ReLU6`; keeps one exact bit an element."""


class LeakyReLU(_Settled, nn.LeakyReLU):
    """`nn.LeakyReLU`; keeps one exact bit an element."""


class Hardtanh(_Settled, nn.Hardtanh):
    """`nn.Hardtanh`; keeps one exact bit an element."""


class Threshold(_Settled, nn.Threshold):
    """`nn.Threshold`; keeps one exact bit an element."""


class Hardshrink(_Settled, nn.Hardshrink):
    """`nn.Hardshrink`; keeps one exact bit an element."""


class Softshrink(_Settled, nn.Softshrink):
    """`nn.Softshrink`; keeps one exact bit an element."""


class Softmax(_Settled, nn.Softmax):
    """`nn.Softmax`; keeps the output."""


class MatMul(_Settled, products.MatMul):
    """`products.MatMul`; keeps each operand whose partner wants a gradient."""


class CrossEntropyLoss(_Settled, nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss`; keeps the probabilities."""


class MultiheadAttention(_Settled, nn.MultiheadAttention):
    """`nn.MultiheadAttention`; keeps its inputs, queries, keys, values and result."""


class Bilinear(_Settled, nn.Bilinear):
    """`nn.Bilinear`; keeps both inputs."""


class ConvTranspose1d(_Settled, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d`; keeps the input."""


class ConvTranspose2d(_Settled, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d`; keeps the input."""


class ConvTranspose3d(_Settled, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d`; keeps the input."""


class SyncBatchNorm(_Settled, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm`; keeps the normalized input; among several processes, what PyTorch keeps."""


class InstanceNorm1d(_Settled, nn.InstanceNorm1d):
    """`nn.InstanceNorm1d`; keeps the normalized input."""


class InstanceNorm2d(_Settled, nn.InstanceNorm2d):
    """`nn.InstanceNorm2d`; keeps the normalized input."""


class InstanceNorm3d(_Settled, nn.InstanceNorm3d):
    """`nn.InstanceNorm3d`; keeps the normalized input."""


class GroupNorm(_Settled, nn.GroupNorm):
    """`nn.GroupNorm`; keeps the normalized input."""


class RMSNorm(_Settled, nn.RMSNorm):
    """`nn.RMSNorm`; keeps the normalized input."""


class LogSoftmax(_Settled, nn.LogSoftmax):
    """`nn.LogSoftmax`; keeps the probabilities."""


class NLLLoss(_Settled, nn.NLLLoss):
    """`nn.NLLLoss`; keeps indices."""


class MSELoss(_Settled, nn.MSELoss):
    """`nn.MSELoss`; keeps its derivative."""


class L1Loss(_Settled, nn.L1Loss):
    """`nn.L1Loss`; keeps two exact bits an element."""


class SmoothL1Loss(_Settled, nn.SmoothL1Loss):
    """`nn.SmoothL1Loss`; keeps its derivative."""


class HuberLoss(_Settled, nn.HuberLoss):
    """`nn.HuberLoss`; keeps its derivative."""


class KLDivLoss(_Settled, nn.KLDivLoss):
    """`nn.KLDivLoss`; keeps its derivative."""


class BCELoss(_Settled, nn.BCELoss):
    """`nn.BCELoss`; keeps its derivative."""


class BCEWithLogitsLoss(_Settled, nn.BCEWithLogitsLoss):
    """`nn.BCEWithLogitsLoss`; keeps its derivative."""


class Dropout(_Settled, nn.Dropout):
    """`nn.Dropout`; keeps one exact bit an element."""


class Dropout1d(_Settled, nn.Dropout1d):
    """`nn.Dropout1d`; keeps one exact bit a channel."""


class Dropout2d(_Settled, nn.Dropout2d):
    """`nn.Dropout2d`; keeps one exact bit a channel."""


class Dropout3d(_Settled, nn.Dropout3d):
    """`nn.Dropout3d`; keeps one exact bit a channel."""


class AlphaDropout(_Settled, nn.AlphaDropout):
    """`nn.AlphaDropout`; keeps one exact bit an element."""


class FeatureAlphaDropout(_Settled, nn.FeatureAlphaDropout):
    """`nn.FeatureAlphaDropout`; keeps one exact bit a channel."""


class MaxPool1d(_Settled, nn.MaxPool1d):
    """`nn.MaxPool1d`; keeps exact offsets within windows."""


class MaxPool2d(_Settled, nn.MaxPool2d):
    """`nn.MaxPool2d`; keeps exact offsets within windows."""


class MaxPool3d(_Settled, nn.MaxPool3d):
    """`nn.MaxPool3d`; keeps exact offsets within windows."""


class AdaptiveMaxPool1d(_Settled, nn.AdaptiveMaxPool1d):
    """`nn.AdaptiveMaxPool1d`; keeps exact offsets within windows."""


class AdaptiveMaxPool2d(_Settled, nn.AdaptiveMaxPool2d):
    """`nn.AdaptiveMaxPool2d`; keeps exact offsets within windows."""


class AdaptiveMaxPool3d(_Settled, nn.AdaptiveMaxPool3d):
    """`nn.AdaptiveMaxPool3d`; keeps exact offsets within windows."""


class AvgPool1d(_Settled, nn.AvgPool1d):
    """`nn.AvgPool1d`; keeps nothing."""


class AvgPool2d(_Settled, nn.AvgPool2d):
    """`nn.AvgPool2d`; keeps nothing."""


class AvgPool3d(_Settled, nn.AvgPool3d):
    """`nn.AvgPool3d`; keeps nothing."""


class AdaptiveAvgPool1d(_Settled, nn.AdaptiveAvgPool1d):
    """`nn.AdaptiveAvgPool1d`; keeps nothing."""


class AdaptiveAvgPool2d(_Settled, nn.AdaptiveAvgPool2d):
    """`nn.AdaptiveAvgPool2d`; keeps nothing."""


class AdaptiveAvgPool3d(_Settled, nn.AdaptiveAvgPool3d):
    """`nn.AdaptiveAvgPool3d`; keeps nothing."""
