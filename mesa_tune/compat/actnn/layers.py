"""ActNN's layers: torch's, with `group` beside the twin's arguments, by the configuration of `conf`."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.compat.actnn import conf
from mesa_tune.compat.actnn.conf import QuantizationConfig
from mesa_tune.compat.actnn.scheme import QBNScheme, QScheme
from mesa_tune.compat.layers import Keeping
from mesa_tune.engine.function import Memories
from mesa_tune.notice import warn_once
from mesa_tune.policy.settings import EXACT, LayerSettings

Scheme = QScheme | QBNScheme


def settings_of(config: QuantizationConfig, group: int, scheme: Scheme | None) -> LayerSettings:
    """How a layer of `group` with `scheme` stores what it saves."""
    if not config.compress_activation:
        return LayerSettings(store="offload") if config.swap else EXACT
    bits = config.bits(group) if scheme is None else scheme.bits
    if bits > conf.MOST_BITS:
        return EXACT
    return LayerSettings(
        level=2**bits,
        group_size=config.group_size if config.pergroup else None,
        quant_groups=None if config.pergroup else 1,
        rounding="stochastic" if config.stochastic else "nearest",
        allocation="uniform" if scheme is None else "sample",
    )


def memories_of(scheme: Scheme | None) -> Memories | None:
    """What the codec gets to know of the samples of this step."""
    scale = scheme.get_scale() if isinstance(scheme, QScheme) else None
    return None if scale is None else {0: {"sensitivity": scale}}


def watched(scheme: Scheme | None, x: Tensor, channels: int, output: Tensor) -> Tensor:
    """`output`, after `scheme` has been shown the range of `x`; it will be shown the gradient, too."""
    if not (isinstance(scheme, QScheme) and output.requires_grad):
        return output
    if not torch.compiler.is_compiling() and (scheme.watching or scheme.config.use_gradient):
        scheme.observe(x, channels)
        output.register_hook(scheme.set_scale)
    return output


class _Layer(Keeping):
    """`config` is the layer's configuration (see `conf`), `scheme` its adaptive bits or None."""

    def __init__(self, *given: Any, group: int = 0, **named: Any) -> None:
        super().__init__(*given, **named)
        self.start(group)

    def start(self, group: int = 0) -> None:
        """Reads the configuration."""
        self._config = conf.for_new_layer()
        self.group = group
        self.scheme = self._make_scheme()

    @property
    def config(self) -> QuantizationConfig:
        """The configuration that counts now."""
        return self._config.now()

    def _make_scheme(self) -> Scheme | None:
        return None

    def is_compressing(self) -> bool:
        return self.training and self.config.training

    def kept_by(self) -> LayerSettings:
        config = self.config
        if config.swap and config.compress_activation:
            warn_once("mesa-tune: actnn: packed tensors stay on the device: `swap` moves what is not packed.")
        return settings_of(config, self.group, self.scheme)


class _Weighted(_Layer):
    """A layer whose weight's gradient its stored input enters: its samples may differ in bits."""

    def _make_scheme(self) -> QScheme | None:
        if not (self.config.adaptive_conv_scheme and self.config.compress_activation):
            return None
        if not isinstance(self, nn.modules.conv._ConvNd):
            return QScheme(self, self.group, config=self._config)
        return QScheme(self, self.group, prod(self.kernel_size), self.groups, self._config)

    def memories(self, *args: Any, **kwargs: Any) -> Memories | None:
        return memories_of(self.scheme)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The twin's forward."""
        output: Tensor = super().forward(*args, **kwargs)
        if not self.training:
            return output
        channels = 1 if isinstance(self, nn.modules.conv._ConvNd) else -1
        return watched(self.scheme, args[0] if args else kwargs["input"], channels, output)


class _BatchNorm(_Layer):
    def _make_scheme(self) -> QBNScheme | None:
        adaptive = self.config.adaptive_bn_scheme and self.config.compress_activation
        return QBNScheme(self.group, self._config) if adaptive else None

    def kept_by(self) -> LayerSettings:
        return super().kept_by() if self.config.enable_quantized_bn else EXACT


class QConv1d(_Weighted, nn.Conv1d):
    """`nn.Conv1d`; keeps the input."""


class QConv2d(_Weighted, nn.Conv2d):
    """`nn.Conv2d`; keeps the input."""


class QConv3d(_Weighted, nn.Conv3d):
    """`nn.Conv3d`; keeps the input."""


class QConvTranspose1d(_Weighted, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d`, with bias or without; keeps the input."""


class QConvTranspose2d(_Weighted, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d`, with bias or without; keeps the input."""


class QConvTranspose3d(_Weighted, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d`, with bias or without; keeps the input."""


class QLinear(_Weighted, nn.Linear):
    """`nn.Linear`; keeps the input."""


class QBatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d`; keeps the normalized input."""


class QBatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d`; keeps the normalized input."""


class QBatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d`; keeps the normalized input."""


class QSyncBatchNorm(_BatchNorm, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm`; keeps the normalized input."""


class _Exact(_Layer):
    """A layer that keeps no more than bits, exactly, and so has no bits to choose."""

    def kept_by(self) -> LayerSettings:
        return LayerSettings() if self.config.compress_activation else super().kept_by()


class QReLU(_Exact, nn.ReLU):
    """`nn.ReLU`, in place too; keeps one exact bit an element."""


class QDropout(_Exact, nn.Dropout):
    """`nn.Dropout`; keeps one exact bit an element."""


class QMaxPool2d(_Exact, nn.MaxPool2d):
    """`nn.MaxPool2d`; keeps where in its window each maximum was."""


class QAvgPool2d(_Exact, nn.AvgPool2d):
    """`nn.AvgPool2d`, an average indeed (ActNN puts a maximum in its place); keeps nothing but a shape."""
