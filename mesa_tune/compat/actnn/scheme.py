"""ActNN's schemes: the bits of each layer, and the sensitivity of each sample.

What is hard: ActNN's users set class attributes (`QScheme.num_samples`, `QScheme.batch`), and
`QScheme.layers` lists all schemes of the process, without extending the life of deleted models' schemes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from mesa_tune.codecs.mixed import allocate
from mesa_tune.compat.actnn import conf
from mesa_tune.compat.actnn.conf import QuantizationConfig
from mesa_tune.ops.codecs import RAW

Item = TypeVar("Item")


class WeakList(Generic[Item]):
    """List of weak references: iterating yields the objects that still exist."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Item]] = []

    def append(self, item: Item) -> None:
        """Add `item` at the end."""
        self._references = [reference for reference in self._references if reference() is not None]
        self._references.append(weakref.ref(item))

    def __iter__(self) -> Iterator[Item]:
        items = (reference() for reference in self._references)
        return (item for item in items if item is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> Item:
        return list(self)[index]


class QScheme:
    """Bits of one linear layer or convolution: `bits` is the average over its samples.

    Class attributes, as in ActNN: `layers` (the existing schemes in order of creation); and, with
    `config.use_gradient`, `num_samples` (size of the training set), `batch` (indices of the samples of this
    step) and `update_scale`. Instance attributes: `scales` (squared norm of each sample's gradient, averaged
    over time) and `C`, the variance of the weight's gradient that storing at 1 bit would cause (ActNN,
    section 4.1).
    """

    num_samples: ClassVar[int] = 1
    num_layers: ClassVar[int] = 0
    batch: ClassVar[Any] = None
    update_scale: ClassVar[bool] = True
    layers: ClassVar[WeakList[QScheme]] = WeakList()

    def __init__(
        self,
        layer: Any = None,
        group: int = 0,
        num_locations: int = 1,
        depthwise_groups: int = 1,
        config: QuantizationConfig | None = None,
    ) -> None:
        """`num_locations`: elements of the kernel; `depthwise_groups`: its groups. `layer` is unused."""
        self._config = conf.for_new_layer() if config is None else config
        self.group = group
        self.bits = self.config.bits(group)
        self.locations = num_locations
        self.depthwise = depthwise_groups
        self.observing = True
        self.dim = 0
        self.ranges: Tensor | None = None
        self.scales = torch.zeros(1)
        if self.config.use_gradient:
            self._resize_scales()
        self.name = f"layer_{QScheme.num_layers}"
        QScheme.num_layers += 1
        QScheme.layers.append(self)

    @property
    def config(self) -> QuantizationConfig:
        """The current configuration."""
        return self._config.now()

    def _resize_scales(self) -> None:
        """Give `scales` one element per sample of the training set."""
        if QScheme.num_samples <= 1:
            raise ValueError(
                "use_gradient needs the size of the training set, but `QScheme.num_samples` is "
                f"{QScheme.num_samples}: set it before layers are made"
            )
        if self.scales.numel() != QScheme.num_samples:
            self.scales = torch.zeros(QScheme.num_samples)

    def get_scale(self) -> Tensor | None:
        """Return the sensitivity of each sample of this step; None without `use_gradient`."""
        if not self.config.use_gradient:
            return None
        self._resize_scales()
        scale = self.scales[_batch()].clone()
        return torch.where(scale == 0, scale.mean() + 1e-9, scale)

    def set_scale(self, grad: Tensor) -> None:
        """Update `scales` by the gradient of the layer's output."""
        if not QScheme.update_scale:
            return
        squares = grad.detach().flatten(1).float().square().sum(1)
        if self.config.use_gradient:
            self._resize_scales()
            batch = _batch()
            self.scales[batch] = 0.5 * self.scales[batch] + 0.5 * squares.to(self.scales.device)
        else:
            self.scales = squares.mean()

    def observe(self, x: Tensor, channels: int) -> None:
        """Record the ranges of `x`, the input that the layer saves; `channels` is its channel dimension."""
        if x.dim() < 2 or not x.numel():
            return
        size = self.config.group_size
        extents = RAW.extents(x.detach(), size, 0)
        pixels = x[0].numel() // x.shape[channels]
        self.ranges = (extents[:, 1] - extents[:, 0]).square().sum() * size / pixels
        self.dim = x.numel()

    @property
    def C(self) -> Tensor | None:  # noqa: N802
        """Variance at 1 bit; None before the first forward."""
        if self.ranges is None:
            return None
        scale = self.scales.mean() if self.config.use_gradient else self.scales.sum()
        return self.locations / 4 / self.depthwise * self.ranges * scale.to(self.ranges.device)

    @staticmethod
    def allocate_perlayer(layers: Sequence[QScheme] | None = None) -> None:
        """Allocate bits to the observed schemes among `layers` (default: all).

        The average of each group is the configured one.
        """
        layers = list(QScheme.layers) if layers is None else layers
        for group in dict.fromkeys(layer.group for layer in layers):
            observed = [layer for layer in layers if layer.group == group and layer.C is not None]
            average = observed[0].config.bits(group) if observed else 0
            if not 1 <= average <= conf.MAX_BITS:
                continue
            errors = torch.stack([layer.C.cpu() for layer in observed if layer.C is not None]).tolist()
            allocated = allocate(errors, [layer.dim for layer in observed], average)
            for layer, bits in zip(observed, allocated, strict=True):
                layer.bits = bits

    def if_allocate_perlayer(self) -> None:
        """Allocate bits to all schemes, if the configuration asks for it and all have been observed."""
        if self.config.perlayer and all(layer.C is not None for layer in QScheme.layers):
            QScheme.allocate_perlayer()
            QBNScheme.allocate_perlayer()


class QBNScheme:
    """Bits of one batch norm: those of the linear layer or convolution before it, as in ActNN.

    `layers`: the existing schemes in order of creation.
    """

    layers: ClassVar[WeakList[QBNScheme]] = WeakList()

    def __init__(self, group: int = 0, config: QuantizationConfig | None = None) -> None:
        self._config = conf.for_new_layer() if config is None else config
        self.group = group
        self.bits = self.config.bits(group)
        linear_schemes = list(QScheme.layers)
        self.prev_linear = linear_schemes[-1] if linear_schemes else None
        QBNScheme.layers.append(self)

    @property
    def config(self) -> QuantizationConfig:
        """The current configuration."""
        return self._config.now()

    def copy_bits(self) -> None:
        """Copy the bits of the layer before; without one, 8."""
        self.bits = 8 if self.prev_linear is None else self.prev_linear.bits

    @staticmethod
    def allocate_perlayer() -> None:
        """Call `copy_bits` on every existing scheme."""
        for scheme in QBNScheme.layers:
            scheme.copy_bits()


def link_batch_norms(schemes: Iterable[QScheme | QBNScheme | None]) -> list[QScheme]:
    """Set `prev_linear` of every batch norm to the scheme before it; return the other schemes."""
    linear_schemes: list[QScheme] = []
    for scheme in schemes:
        if isinstance(scheme, QScheme):
            linear_schemes.append(scheme)
        elif scheme is not None:
            scheme.prev_linear = linear_schemes[-1] if linear_schemes else None
    return linear_schemes


def _batch() -> Tensor:
    if QScheme.batch is None:
        raise ValueError(
            "use_gradient needs the indices of the samples: set `QScheme.batch` in every step, "
            "for instance to what actnn.DataLoader yields beside the data"
        )
    return torch.as_tensor(QScheme.batch, dtype=torch.int64).cpu()
