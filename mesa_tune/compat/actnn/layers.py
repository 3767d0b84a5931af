"""ActNN's layers: torch's layers with a further argument `group`, configured by `conf`.

What is hard is that bits change during training: a layer asks its scheme for its bits in every call, and
shows the scheme its input and the gradient of its output.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.compat.actnn import conf
from mesa_tune.compat.actnn.conf import QuantizationConfig
from mesa_tune.compat.actnn.scheme import QBNScheme, QScheme
from mesa_tune.compat.layers import CompatLayer
from mesa_tune.engine.function import Memories
from mesa_tune.notice import warn_once
from mesa_tune.policy.settings import EXACT, LayerSettings

Scheme = QScheme | QBNScheme


def settings_of(config: QuantizationConfig, group: int, scheme: Scheme | None) -> LayerSettings:
    """Return how a layer of `group` with `scheme` stores its saved tensor."""
    if not config.compress_activation:
        return LayerSettings(store="offload") if config.swap else EXACT
    bits = config.bits(group) if scheme is None else scheme.bits
    if bits > conf.MAX_BITS:
        return EXACT
    return LayerSettings(
        level=2**bits,
        group_size=config.group_size if config.pergroup else None,
        quant_groups=None if config.pergroup else 1,
        rounding="stochastic" if config.stochastic else "nearest",
        allocation="uniform" if scheme is None else "sample",
    )


def memories_of(scheme: Scheme | None) -> Memories | None:
    """Return the codec's state for a call: the sensitivities of the samples of this step, or None."""
    scale = scheme.get_scale() if isinstance(scheme, QScheme) else None
    return None if scale is None else {0: {"sensitivity": scale}}


def observed(scheme: Scheme | None, x: Tensor, channels: int, output: Tensor) -> Tensor:
    """Pass the ranges of `x` to `scheme`, and later the gradient of `output`; return `output`.

    `channels` is the channel dimension of `x`.
    """
    if not (isinstance(scheme, QScheme) and output.requires_grad):
        return output
    if not torch.compiler.is_compiling() and (scheme.observing or scheme.config.use_gradient):
        scheme.observe(x, channels)
        output.register_hook(scheme.set_scale)
    return output


class _ActNNLayer(CompatLayer):
    """Mixin before a torch layer: `config` is its configuration, `scheme` its adaptive bits or None."""

    def __init__(self, *args: Any, group: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start(group)

    def start(self, group: int = 0) -> None:
        """Read the configuration, and make the scheme."""
        self._config = conf.for_new_layer()
        self.group = group
        self.scheme = self._make_scheme()

    @property
    def config(self) -> QuantizationConfig:
        """The current configuration."""
        return self._config.now()

    def _make_scheme(self) -> Scheme | None:
        return None

    def is_compressing(self) -> bool:
        return self.training and self.config.training

    def storage_settings(self) -> LayerSettings:
        config = self.config
        if config.swap and config.compress_activation:
            warn_once("mesa-tune: actnn: packed tensors stay on the device: `swap` moves what is not packed.")
        return settings_of(config, self.group, self.scheme)


class _Weighted(_ActNNLayer):
    """A layer that saves its input for the gradient of its weight; each sample may have its own bits."""

    def _make_scheme(self) -> QScheme | None:
        if not (self.config.adaptive_conv_scheme and self.config.compress_activation):
            return None
        if not isinstance(self, nn.modules.conv._ConvNd):
            return QScheme(self, self.group, config=self._config)
        return QScheme(self, self.group, prod(self.kernel_size), self.groups, self._config)

    def memories(self, *args: Any, **kwargs: Any) -> Memories | None:
        return memories_of(self.scheme)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward of torch's layer."""
        output: Tensor = super().forward(*args, **kwargs)
        if not self.training:
            return output
        channels = 1 if isinstance(self, nn.modules.conv._ConvNd) else -1
        return observed(self.scheme, args[0] if args else kwargs["input"], channels, output)


class _BatchNorm(_ActNNLayer):
    def _make_scheme(self) -> QBNScheme | None:
        adaptive = self.config.adaptive_bn_scheme and self.config.compress_activation
        return QBNScheme(self.group, self._config) if adaptive else None

    def storage_settings(self) -> LayerSettings:
        return super().storage_settings() if self.config.enable_quantized_bn else EXACT


class QConv1d(_Weighted, nn.Conv1d):
    """`nn.Conv1d`; saves the input."""


class QConv2d(_Weighted, nn.Conv2d):
    """`nn.Conv2d`; saves the input."""


class QConv3d(_Weighted, nn.Conv3d):
    """`nn.Conv3d`; saves the input."""


class QConvTranspose1d(_Weighted, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d`, with bias or without; saves the input."""


class QConvTranspose2d(_Weighted, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d`, with bias or without; saves the input."""


class QConvTranspose3d(_Weighted, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d`, with bias or without; saves the input."""


class QLinear(_Weighted, nn.Linear):
    """`nn.Linear`; saves the input."""


class QBatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d`; saves the normalized input."""


class QBatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d`; saves the normalized input."""


class QBatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d`; saves the normalized input."""


class QSyncBatchNorm(_BatchNorm, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm`; saves the normalized input."""


class _Exact(_ActNNLayer):
    """A layer that saves at most a few exact bits per element, so its bits are no choice."""

    def storage_settings(self) -> LayerSettings:
        return LayerSettings() if self.config.compress_activation else super().storage_settings()


class QReLU(_Exact, nn.ReLU):
    """`nn.ReLU`, also in place; saves 1 exact bit per element."""


class QDropout(_Exact, nn.Dropout):
    """`nn.Dropout`; saves 1 exact bit per element."""


class QMaxPool2d(_Exact, nn.MaxPool2d):
    """`nn.MaxPool2d`; saves the exact position of each maximum in its window."""


class QAvgPool2d(_Exact, nn.AvgPool2d):
    """`nn.AvgPool2d`, a true average (ActNN computes a maximum); saves only a shape."""
