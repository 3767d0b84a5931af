"""How much each layer's stored copies matter to the gradient, from one iteration at the memory of training.

GACT runs three more iterations for every tensor. Here, in the backward of one, each call's backward is run
again with a little uniform noise on its stored tensors, in proportion to the range of each group of 256. What
changes in parameter gradients is final; what changes in input gradients is sent down the rest of the graph by
itself, from inside that backward, since a backward is linear in what enters it. Nothing is kept but numbers,
so a batch that just fits still fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from mesa_tune.engine.observer import Replay
from mesa_tune.policy.settings import MIN_ELEMENTS

GROUP = 256
AMPLITUDE = 1 / 16
"""Of the noise, in ranges: small enough for a gradient to be linear in it."""


@dataclass
class Group:
    """Layers that keep copies in common, and so must be stored alike: elements, and squared error."""

    layers: list[str]
    size: int
    error: float


@dataclass
class Estimate:
    """An observer of one iteration; `groups` afterwards says what each layer's noise does to the gradient."""

    parameters: list[nn.Parameter]
    copies: dict[int, tuple[int, list[str]]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    sending: bool = False
    wants_tensors: ClassVar[bool] = True

    def begin(self, layer: str | None, given: Any) -> None: ...

    def end(self, layer: str | None, output: Any) -> None: ...

    def asked(self, layer: str, tensors: Any) -> None: ...

    def stored(
        self, layer: str, lossy: Any, how: Any, parts: tuple[list[Tensor], ...], exact: Any, row: int
    ) -> None:
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
        if self.sending:
            return
        changed = [
            perturbed(tensor) if _is_coded(tensor, raw) else tensor
            for tensor, raw in zip(replay.lossy, replay.exact_inputs, strict=True)
        ]
        if all(new is old for new, old in zip(changed, replay.lossy, strict=True)):
            return
        with torch.no_grad():
            exact = replay.run(list(replay.lossy), replay.needs)
            other = replay.run(changed, replay.needs)
        edges = iter(replay.node.next_functions)  # the last belongs to the noise key
        places = [next(edges) if present else None for present in replay.present]
        found = [
            (edge, after - before)
            for edge, before, after in zip(places, exact, other, strict=False)
            if edge is not None and edge[0] is not None and before is not None and after is not None
        ]
        self.errors[replay.layer] = self.errors.get(replay.layer, 0.0) + self._weight(found)

    def _weight(self, changes: list[tuple[Any, Tensor]]) -> float:
        """The square of what `changes` at these edges come to in all parameter gradients."""
        total: dict[nn.Parameter, Tensor] = {}
        sent = []
        for edge, delta in changes:
            parameter = getattr(edge[0], "variable", None)
            if isinstance(parameter, nn.Parameter):
                total[parameter] = total[parameter] + delta if parameter in total else delta
            elif delta.any():
                sent.append((GradientEdge(edge[0], edge[1]), delta))
        for parameter, below in self._sent_down(sent):
            total[parameter] = total[parameter] + below if parameter in total else below
        return sum(_square(delta) for delta in total.values())

    def _sent_down(self, sent: list[tuple[GradientEdge, Tensor]]) -> list[tuple[nn.Parameter, Tensor]]:
        if not sent:
            return []
        self.sending = True
        try:
            found: Any = torch.autograd.grad(
                [edge for edge, _ in sent],
                self.parameters,
                [delta for _, delta in sent],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            self.sending = False
        pairs = zip(self.parameters, found, strict=True)
        return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]

    def groups(self) -> list[Group]:
        """Layers by the copies that they have in common, with their error under noise of one size everywhere.

        Layers whose copies are quantized; those that drop or keep one exact bit an element have no part.
        """
        found: list[Group] = []
        for size, layers in self.copies.values():
            new = [layer for layer in dict.fromkeys(layers) if layer in self.errors]
            common = [group for group in found if set(group.layers) & set(new)]
            merged = Group(new, size, 0.0)
            for group in common:
                merged.layers = list(dict.fromkeys(group.layers + merged.layers))
                merged.size += group.size
                found.remove(group)
            found += [merged] if new else []
        for group in found:
            group.error = sum(self.errors[layer] for layer in group.layers)
        return found


def _is_coded(tensor: Tensor, raw: bool) -> bool:
    return not raw and tensor.numel() > MIN_ELEMENTS and tensor.is_floating_point()


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
