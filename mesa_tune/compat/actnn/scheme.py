"""ActNN's schemes: how many bits a layer has, and how much each of its samples matters."""

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


class Living(Generic[Item]):
    """A list of objects that does not keep them alive."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Item]] = []

    def append(self, item: Item) -> None:
        """Adds `item`, at the end."""
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
    """A linear layer's or a convolution's bits: `bits` on average over its samples.

    `layers` are the schemes that exist, in the order of their making. `num_samples` (of the training set),
    `batch` (the indices of the samples of this step) and `update_scale` are the class's, as ActNN's users set
    them; they count where `config.use_gradient` is on. What a scheme learns is its own: `scales` (squared
    norms of samples' gradients, averaged over time) and `C`, the variance that its stored copies bring into
    the weight's gradient at one bit (ActNN, section 4.1).
    """

    num_samples: ClassVar[int] = 1
    num_layers: ClassVar[int] = 0
    batch: ClassVar[Any] = None
    update_scale: ClassVar[bool] = True
    layers: ClassVar[Living[QScheme]] = Living()

    def __init__(
        self,
        layer: Any = None,
        group: int = 0,
        num_locations: int = 1,
        depthwise_groups: int = 1,
        config: QuantizationConfig | None = None,
    ) -> None:
        """`num_locations`: elements of the kernel; `depthwise_groups`: its groups. `layer` is not used."""
        self._config = conf.for_new_layer() if config is None else config
        self.group = group
        self.bits = self.config.bits(group)
        self.locations = num_locations
        self.depthwise = depthwise_groups
        self.watching = True
        self.dim = 0
        self.ranges: Tensor | None = None
        self.scales = torch.zeros(1)
        if self.config.use_gradient:
            self._tell_samples_apart()
        self.name = f"layer_{QScheme.num_layers}"
        QScheme.num_layers += 1
        QScheme.layers.append(self)

    @property
    def config(self) -> QuantizationConfig:
        """The configuration that counts now."""
        return self._config.now()

    def _tell_samples_apart(self) -> None:
        """Makes room for a scale of each sample of the training set."""
        if QScheme.num_samples <= 1:
            raise ValueError(
                "use_gradient needs the size of the training set, but `QScheme.num_samples` is "
                f"{QScheme.num_samples}: set it before layers are made"
            )
        if self.scales.numel() != QScheme.num_samples:
            self.scales = torch.zeros(QScheme.num_samples)

    def get_scale(self) -> Tensor | None:
        """How much each sample of this step matters; None where samples are not told apart."""
        if not self.config.use_gradient:
            return None
        self._tell_samples_apart()
        scale = self.scales[_batch()].clone()
        return torch.where(scale == 0, scale.mean() + 1e-9, scale)

    def set_scale(self, grad: Tensor) -> None:
        """Notes the gradient of the layer's output."""
        if not QScheme.update_scale:
            return
        squares = grad.detach().flatten(1).float().square().sum(1)
        if self.config.use_gradient:
            self._tell_samples_apart()
            batch = _batch()
            self.scales[batch] = 0.5 * self.scales[batch] + 0.5 * squares.to(self.scales.device)
        else:
            self.scales = squares.mean()

    def observe(self, x: Tensor, channels: int) -> None:
        """Notes the ranges of what the layer saves, x, whose channels are dimension `channels`."""
        if x.dim() < 2 or not x.numel():
            return
        size = self.config.group_size
        ends = RAW.extents(x.detach(), size, 0)
        pixels = x[0].numel() // x.shape[channels]
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
    def allocate_perlayer(layers: Sequence[QScheme] | None = None) -> None:
        """Gives those of `layers` (default: all) that have been observed their bits.

        The average of each group is the configured one.
        """
        layers = list(QScheme.layers) if layers is None else layers
        for group in dict.fromkeys(layer.group for layer in layers):
            known = [layer for layer in layers if layer.group == group and layer.C is not None]
            average = known[0].config.bits(group) if known else 0
            if not 1 <= average <= conf.MOST_BITS:
                continue
            errors = torch.stack([layer.C.cpu() for layer in known if layer.C is not None]).tolist()
            bits = allocate(errors, [layer.dim for layer in known], average)
            for layer, given in zip(known, bits, strict=True):
                layer.bits = given

    def if_allocate_perlayer(self) -> None:
        """Gives all schemes their bits, if the configuration asks for it and all have been observed."""
        if self.config.perlayer and all(layer.C is not None for layer in QScheme.layers):
            QScheme.allocate_perlayer()
            QBNScheme.allocate_perlayer()


class QBNScheme:
    """A batch norm's bits: those of the linear layer or convolution before it, as in ActNN.

    `layers` are the schemes that exist, in the order of their making.
    """

    layers: ClassVar[Living[QBNScheme]] = Living()

    def __init__(self, group: int = 0, config: QuantizationConfig | None = None) -> None:
        self._config = conf.for_new_layer() if config is None else config
        self.group = group
        self.bits = self.config.bits(group)
        before = list(QScheme.layers)
        self.prev_linear = before[-1] if before else None
        QBNScheme.layers.append(self)

    @property
    def config(self) -> QuantizationConfig:
        """The configuration that counts now."""
        return self._config.now()

    def follow(self) -> None:
        """Takes over the bits of the layer before; without one, 8."""
        self.bits = 8 if self.prev_linear is None else self.prev_linear.bits

    @staticmethod
    def allocate_perlayer() -> None:
        """Every scheme that exists takes over the bits of the layer before."""
        for scheme in QBNScheme.layers:
            scheme.follow()


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
