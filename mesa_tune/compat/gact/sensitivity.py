"""How much each layer's stored copies matter to the gradient, from one iteration at the memory of training.

GACT runs three more iterations for every tensor. Here, in the backward of one, each call's backward is run
again with a little uniform noise on its stored tensors, in proportion to the range of each group of 256. What
changes in parameter gradients is final. What changes in an input gradient travels on through the graph: it is
taken to be worth its share in the whole gradient that arrives at the same place, times the gradients of all
parameters from there on. Nothing is kept but numbers, so a batch that just fits still fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.functional.apply import Replay
from mesa_tune.settings import MIN_ELEMENTS

GROUP = 256
AMPLITUDE = 1 / 16
"""Of the noise, in ranges: small enough for a gradient to be linear in it."""


@dataclass
class _Travelling:
    """A difference of an input gradient: its square, and the square of all that arrives where it arrives."""

    layer: str
    square: float
    after: int
    arriving: float = 0.0


@dataclass
class Group:
    """Layers that keep copies in common, and so must be stored alike: elements, and squared error."""

    layers: list[str]
    size: int
    error: float


@dataclass
class Estimate:
    """An observer of one iteration; `groups` afterwards says what each layer's noise does to the gradient."""

    copies: dict[int, tuple[int, list[str]]] = field(default_factory=dict)
    local: dict[str, float] = field(default_factory=dict)
    travelling: list[_Travelling] = field(default_factory=list)
    final: list[float] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)

    def begin(self, layer: str | None, given: Any) -> None: ...

    def end(self, layer: str | None, output: Any) -> None: ...

    def kept(self, layer: str, lossy: Any, kept: Any, parts: tuple[list[Tensor], ...], exact: Any) -> None:
        """A call has stored its tensors; equal parts are copies in common."""
        for tensor, stored in zip(lossy, parts, strict=True):
            if len(stored) > 1:
                place = stored[0].untyped_storage()._cdata
                self.copies.setdefault(place, (tensor.numel(), []))[1].append(layer)

    def saved(self, layer: str, tensor: Tensor) -> None: ...

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        return tensor

    def backward(self, replay: Replay) -> None:
        """A call's backward begins: its noise is weighed."""
        coded = [
            not raw and tensor.numel() > MIN_ELEMENTS and tensor.is_floating_point()
            for raw, tensor in zip(replay.raw, replay.lossy, strict=True)
        ]
        changed = [
            perturbed(tensor) if chosen else tensor
            for tensor, chosen in zip(replay.lossy, coded, strict=True)
        ]
        with torch.no_grad():
            exact = replay.run(list(replay.lossy), replay.needs)
            other = replay.run(changed, replay.needs) if any(coded) else exact
        if any(coded):
            self.local.setdefault(replay.layer, 0.0)
        edges = iter(replay.node.next_functions[1:])  # the first belongs to the noise key
        for present, before, after in zip(replay.present, exact, other, strict=False):
            edge = next(edges) if present else None
            if edge is not None and edge[0] is not None and before is not None and after is not None:
                self._weigh(replay.layer, edge, before, after)

    def _weigh(self, layer: str, edge: Any, before: Tensor, after: Tensor) -> None:
        difference = 0.0 if after is before else _square(after - before)
        if isinstance(getattr(edge[0], "variable", None), nn.Parameter):
            self.final.append(_square(before))
            if layer in self.local:
                self.local[layer] += difference
        elif difference:
            entry = _Travelling(layer, difference, len(self.final))
            self.travelling.append(entry)
            self.handles.append(edge[0].register_prehook(_Arrival(entry, edge[1])))

    def groups(self) -> list[Group]:
        """Layers by the copies that they have in common, with their error under noise of one size everywhere.

        Layers whose copies are quantized; those that drop or keep one exact bit an element have no part.
        """
        errors = self.errors()
        found: list[Group] = []
        for size, layers in self.copies.values():
            new = [layer for layer in dict.fromkeys(layers) if layer in errors]
            common = [group for group in found if set(group.layers) & set(new)]
            merged = Group(new, size, 0.0)
            for group in common:
                merged.layers = list(dict.fromkeys(group.layers + merged.layers))
                merged.size += group.size
                found.remove(group)
            found += [merged] if new else []
        for group in found:
            group.error = sum(errors[layer] for layer in group.layers)
        return found

    def errors(self) -> dict[str, float]:
        """Squared error of the whole gradient by layer."""
        for handle in self.handles:
            handle.remove()
        found = dict(self.local)
        for entry in self.travelling:
            below = sum(self.final[entry.after :])
            found[entry.layer] += entry.square / entry.arriving * below if entry.arriving else 0.0
        return found


@dataclass
class _Arrival:
    """Notes the square of what arrives at a node, once."""

    entry: _Travelling
    place: int

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[self.place]
        if grad is not None and not self.entry.arriving:
            self.entry.arriving = _square(grad)


def perturbed(x: Tensor) -> Tensor:
    """`x` with uniform noise on every element, `AMPLITUDE` of its group's range wide; always the same."""
    flat = x.reshape(-1)
    short = -flat.numel() % GROUP
    rows = torch.cat([flat, flat[-1:].expand(short)]).view(-1, GROUP)
    generator = torch.Generator(x.device).manual_seed(flat.numel())
    noise = torch.rand(rows.shape, generator=generator, device=x.device, dtype=torch.float32) - 0.5
    span = (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) * AMPLITUDE
    return (rows + noise.to(x.dtype) * span).view(-1)[: flat.numel()].view(x.shape)


def _square(tensor: Tensor) -> float:
    return tensor.float().square().sum(dtype=torch.float64).item()
