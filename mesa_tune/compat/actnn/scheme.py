"""ActNN's schemes: how many bits a layer has, and how much each of its samples matters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mesa_tune.codec_ops import RAW
from mesa_tune.codecs.mixed import allocate
from mesa_tune.compat.actnn.conf import QuantizationConfig


class QScheme:
    """A linear layer's or a convolution's bits: `bits` on average over its samples.

    `num_samples` (of the training set), `batch` (the indices of the samples of this step) and `update_scale`
    are the class's, as ActNN's users set them; they count where `config.use_gradient` is on. What a scheme
    learns is its own: `scales` (squared norms of samples' gradients, averaged over time) and `C`, the
    variance that its stored copies bring into the weight's gradient at one bit (ActNN, section 4.1).
    """

    num_samples: ClassVar[int] = 1
    batch: ClassVar[Any] = None
    update_scale: ClassVar[bool] = True

    def __init__(
        self,
        config: QuantizationConfig,
        group: int,
        locations: int = 1,
        depthwise: int = 1,
        channels: int = -1,
    ) -> None:
        """`locations`: elements of the kernel; `depthwise`: its groups; `channels`: their dimension."""
        self.config = config
        self.channels = channels
        self.group = group
        self.bits = config.bits(group)
        self.locations = locations
        self.depthwise = depthwise
        self.watching = True
        self.dim = 0
        self.ranges: Tensor | None = None
        self.scales = torch.zeros(1)
        if config.use_gradient:
            if QScheme.num_samples <= 1:
                raise ValueError(
                    "use_gradient needs the size of the training set, but `QScheme.num_samples` is "
                    f"{QScheme.num_samples}: set it before layers are made"
                )
            self.scales = torch.zeros(QScheme.num_samples)

    def get_scale(self) -> Tensor | None:
        """How much each sample of this step matters; None where samples are not told apart."""
        if not self.config.use_gradient:
            return None
        scale = self.scales[_batch()].clone()
        return torch.where(scale == 0, scale.mean() + 1e-9, scale)

    def set_scale(self, grad: Tensor) -> None:
        """Notes the gradient of the layer's output."""
        if not QScheme.update_scale:
            return
        squares = grad.detach().flatten(1).float().square().sum(1)
        if self.config.use_gradient:
            batch = _batch()
            self.scales[batch] = 0.5 * self.scales[batch] + 0.5 * squares.to(self.scales.device)
        else:
            self.scales = squares.mean()

    def observe(self, x: Tensor) -> None:
        """Notes the ranges of what the layer keeps, x."""
        if x.dim() < 2 or not x.numel():
            return
        size = self.config.group_size
        ends = RAW.extents(x.detach(), size, 0)
        pixels = x[0].numel() // x.shape[self.channels]
        self.ranges = (ends[:, 1] - ends[:, 0]).square().sum() * size / pixels
        self.dim = x.numel()

    @property
    def C(self) -> Tensor | None:  # noqa: N802
        """Variance at one bit; None before a forward and a backward."""
        if self.ranges is None:
            return None
        scale = self.scales.mean() if self.config.use_gradient else self.scales.sum()
        return self.locations / 4 / self.depthwise * self.ranges * scale.to(self.ranges.device)

    @staticmethod
    def allocate_perlayer(layers: Sequence[QScheme]) -> None:
        """Gives `layers` that have been observed their bits, the configured ones on average a group."""
        for group in dict.fromkeys(layer.group for layer in layers):
            known = [layer for layer in layers if layer.group == group and layer.C is not None]
            if not known:
                continue
            errors = torch.stack([layer.C.cpu() for layer in known if layer.C is not None]).tolist()
            bits = allocate(errors, [layer.dim for layer in known], known[0].config.bits(group))
            for layer, given in zip(known, bits, strict=True):
                layer.bits = given


class QBNScheme:
    """A batch norm's bits: those of the linear layer or convolution before it, as in ActNN."""

    def __init__(self, config: QuantizationConfig, group: int) -> None:
        self.config = config
        self.group = group
        self.bits = config.bits(group)
        self.prev_linear: QScheme | None = None

    def follow(self) -> None:
        """Takes over the bits of the layer before; without one, 8."""
        self.bits = 8 if self.prev_linear is None else self.prev_linear.bits


def relate(schemes: Iterable[QScheme | QBNScheme | None]) -> list[QScheme]:
    """Tells every batch norm which layer is before it; returns the others."""
    before: QScheme | None = None
    found = []
    for scheme in schemes:
        if isinstance(scheme, QScheme):
            before = scheme
            found.append(scheme)
        elif scheme is not None:
            scheme.prev_linear = before
    return found


def _batch() -> Tensor:
    if QScheme.batch is None:
        raise ValueError(
            "use_gradient needs the indices of the samples: set `QScheme.batch` in every step, "
            "for instance to what actnn.DataLoader yields beside the data"
        )
    return torch.as_tensor(QScheme.batch, dtype=torch.int64).cpu()
