"""torch's layers with an argument `settings`: how the layer stores what it saves for backward.

Each class is a subclass of torch's layer, with the same arguments, parameters, `state_dict` keys and outputs.
While its forward runs, calls such as `F.linear` go to the functions of `mesa_tune.functional`, with the
layer's settings. Inside a converted model the policy decides, and `settings` has no effect.
"""

from typing import Any

import torch
from torch import nn

from mesa_tune.formulas import matmul as products
from mesa_tune.functional import SettingsMode, policy_applies
from mesa_tune.policy.settings import LayerSettings


class _WithSettings(nn.Module):
    """Mixin before a torch layer: adds the argument `settings`, and runs the layer's forward with them."""

    def __init__(self, *args: Any, settings: LayerSettings | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = LayerSettings() if settings is None else settings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of torch's layer."""
        if policy_applies() or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        with SettingsMode(self.settings):
            return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return torch's description with the settings."""
        return ", ".join(part for part in (super().extra_repr(), f"settings={self.settings.label}") if part)


class Linear(_WithSettings, nn.Linear):
    """`nn.Linear`; saves the input."""


class Conv1d(_WithSettings, nn.Conv1d):
    """`nn.Conv1d`; saves the input."""


class Conv2d(_WithSettings, nn.Conv2d):
    """`nn.Conv2d`; saves the input."""


class Conv3d(_WithSettings, nn.Conv3d):
    """`nn.Conv3d`; saves the input."""


class BatchNorm1d(_WithSettings, nn.BatchNorm1d):
    """`nn.BatchNorm1d`; saves the normalized input."""


class BatchNorm2d(_WithSettings, nn.BatchNorm2d):
    """`nn.BatchNorm2d`; saves the normalized input."""


class BatchNorm3d(_WithSettings, nn.BatchNorm3d):
    """`nn.BatchNorm3d`; saves the normalized input."""


class LayerNorm(_WithSettings, nn.LayerNorm):
    """`nn.LayerNorm`; saves the normalized input."""


class GELU(_WithSettings, nn.GELU):
    """`nn.GELU`; saves its derivative."""


class ReLU(_WithSettings, nn.ReLU):
    """`nn.ReLU`; saves 1 exact bit per element."""


class SiLU(_WithSettings, nn.SiLU):
    """`nn.SiLU`; saves its derivative."""


class Mish(_WithSettings, nn.Mish):
    """`nn.Mish`; saves its derivative."""


class Hardswish(_WithSettings, nn.Hardswish):
    """`nn.Hardswish`; saves its derivative."""


class Hardsigmoid(_WithSettings, nn.Hardsigmoid):
    """`nn.Hardsigmoid`; saves its derivative."""


class Softplus(_WithSettings, nn.Softplus):
    """`nn.Softplus`; saves its derivative."""


class LogSigmoid(_WithSettings, nn.LogSigmoid):
    """`nn.LogSigmoid`; saves its derivative."""


class Softsign(_WithSettings, nn.Softsign):
    """`nn.Softsign`; saves its derivative."""


class Tanhshrink(_WithSettings, nn.Tanhshrink):
    """`nn.Tanhshrink`; saves its derivative."""


class ELU(_WithSettings, nn.ELU):
    """`nn.ELU`; saves its derivative."""


class CELU(_WithSettings, nn.CELU):
    """`nn.CELU`; saves its derivative."""


class SELU(_WithSettings, nn.SELU):
    """`nn.SELU`; saves its derivative."""


class Tanh(_WithSettings, nn.Tanh):
    """`nn.Tanh`; saves the output."""


class Sigmoid(_WithSettings, nn.Sigmoid):
    """`nn.Sigmoid`; saves the output."""


class GLU(_WithSettings, nn.GLU):
    """`nn.GLU`; saves the derivatives with respect to both halves."""


class ReLU6(_WithSettings, nn.ReLU6):
    """`nn.ReLU6`; saves 1 exact bit per element."""


class LeakyReLU(_WithSettings, nn.LeakyReLU):
    """`nn.LeakyReLU`; saves 1 exact bit per element."""


class Hardtanh(_WithSettings, nn.Hardtanh):
    """`nn.Hardtanh`; saves 1 exact bit per element."""


class Threshold(_WithSettings, nn.Threshold):
    """`nn.Threshold`; saves 1 exact bit per element."""


class Hardshrink(_WithSettings, nn.Hardshrink):
    """`nn.Hardshrink`; saves 1 exact bit per element."""


class Softshrink(_WithSettings, nn.Softshrink):
    """`nn.Softshrink`; saves 1 exact bit per element."""


class Softmax(_WithSettings, nn.Softmax):
    """`nn.Softmax`; saves the output."""


class MatMul(_WithSettings, products.MatMul):
    """`a @ b` as a module; saves each operand that the gradient of the other one needs."""


class CrossEntropyLoss(_WithSettings, nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss`; saves the probabilities."""


class MultiheadAttention(_WithSettings, nn.MultiheadAttention):
    """`nn.MultiheadAttention`; saves its inputs, queries, keys, values and result."""


class Bilinear(_WithSettings, nn.Bilinear):
    """`nn.Bilinear`; saves both inputs."""


class ConvTranspose1d(_WithSettings, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d`; saves the input."""


class ConvTranspose2d(_WithSettings, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d`; saves the input."""


class ConvTranspose3d(_WithSettings, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d`; saves the input."""


class SyncBatchNorm(_WithSettings, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm`; saves the normalized input; among several processes, what PyTorch saves."""


class InstanceNorm1d(_WithSettings, nn.InstanceNorm1d):
    """`nn.InstanceNorm1d`; saves the normalized input."""


class InstanceNorm2d(_WithSettings, nn.InstanceNorm2d):
    """`nn.InstanceNorm2d`; saves the normalized input."""


class InstanceNorm3d(_WithSettings, nn.InstanceNorm3d):
    """`nn.InstanceNorm3d`; saves the normalized input."""


class GroupNorm(_WithSettings, nn.GroupNorm):
    """`nn.GroupNorm`; saves the normalized input."""


class RMSNorm(_WithSettings, nn.RMSNorm):
    """`nn.RMSNorm`; saves the normalized input."""


class LogSoftmax(_WithSettings, nn.LogSoftmax):
    """`nn.LogSoftmax`; saves the probabilities."""


class NLLLoss(_WithSettings, nn.NLLLoss):
    """`nn.NLLLoss`; saves the class indices."""


class MSELoss(_WithSettings, nn.MSELoss):
    """`nn.MSELoss`; saves its derivative."""


class L1Loss(_WithSettings, nn.L1Loss):
    """`nn.L1Loss`; saves 2 exact bits per element."""


class SmoothL1Loss(_WithSettings, nn.SmoothL1Loss):
    """`nn.SmoothL1Loss`; saves its derivative."""


class HuberLoss(_WithSettings, nn.HuberLoss):
    """`nn.HuberLoss`; saves its derivative."""


class KLDivLoss(_WithSettings, nn.KLDivLoss):
    """`nn.KLDivLoss`; saves its derivative."""


class BCELoss(_WithSettings, nn.BCELoss):
    """`nn.BCELoss`; saves its derivative."""


class BCEWithLogitsLoss(_WithSettings, nn.BCEWithLogitsLoss):
    """`nn.BCEWithLogitsLoss`; saves its derivative."""


class Dropout(_WithSettings, nn.Dropout):
    """`nn.Dropout`; saves 1 exact bit per element."""


class Dropout1d(_WithSettings, nn.Dropout1d):
    """`nn.Dropout1d`; saves 1 exact bit per channel."""


class Dropout2d(_WithSettings, nn.Dropout2d):
    """`nn.Dropout2d`; saves 1 exact bit per channel."""


class Dropout3d(_WithSettings, nn.Dropout3d):
    """`nn.Dropout3d`; saves 1 exact bit per channel."""


class AlphaDropout(_WithSettings, nn.AlphaDropout):
    """`nn.AlphaDropout`; saves 1 exact bit per element."""


class FeatureAlphaDropout(_WithSettings, nn.FeatureAlphaDropout):
    """`nn.FeatureAlphaDropout`; saves 1 exact bit per channel."""


class MaxPool1d(_WithSettings, nn.MaxPool1d):
    """`nn.MaxPool1d`; saves exact offsets within windows."""


class MaxPool2d(_WithSettings, nn.MaxPool2d):
    """`nn.MaxPool2d`; saves exact offsets within windows."""


class MaxPool3d(_WithSettings, nn.MaxPool3d):
    """`nn.MaxPool3d`; saves exact offsets within windows."""


class AdaptiveMaxPool1d(_WithSettings, nn.AdaptiveMaxPool1d):
    """`nn.AdaptiveMaxPool1d`; saves exact offsets within windows."""


class AdaptiveMaxPool2d(_WithSettings, nn.AdaptiveMaxPool2d):
    """`nn.AdaptiveMaxPool2d`; saves exact offsets within windows."""


class AdaptiveMaxPool3d(_WithSettings, nn.AdaptiveMaxPool3d):
    """`nn.AdaptiveMaxPool3d`; saves exact offsets within windows."""


class AvgPool1d(_WithSettings, nn.AvgPool1d):
    """`nn.AvgPool1d`; saves nothing."""


class AvgPool2d(_WithSettings, nn.AvgPool2d):
    """`nn.AvgPool2d`; saves nothing."""


class AvgPool3d(_WithSettings, nn.AvgPool3d):
    """`nn.AvgPool3d`; saves nothing."""


class AdaptiveAvgPool1d(_WithSettings, nn.AdaptiveAvgPool1d):
    """`nn.AdaptiveAvgPool1d`; saves nothing."""


class AdaptiveAvgPool2d(_WithSettings, nn.AdaptiveAvgPool2d):
    """`nn.AdaptiveAvgPool2d`; saves nothing."""


class AdaptiveAvgPool3d(_WithSettings, nn.AdaptiveAvgPool3d):
    """`nn.AdaptiveAvgPool3d`; saves nothing."""
