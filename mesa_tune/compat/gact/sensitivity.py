"""Sensitivity of the gradient to each layer's stored tensors, measured in one iteration.

GACT runs three more iterations per tensor. Here one backward is enough: the backward of each call is run
again with a little uniform noise on its stored tensors, in proportion to the range of each group of 256
elements. A change of a parameter gradient is counted as it is. A change of an input gradient is propagated
alone through the rest of the graph, from inside the call's backward; that is exact, because a backward is
linear in the gradient that enters it.

What is hard is memory: only numbers outlive a call, so a batch that just fits in training still fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from mesa_tune.engine.observer import Observer, Replay
from mesa_tune.policy.settings import MIN_ELEMENTS

GROUP = 256
AMPLITUDE = 1 / 16
"""Width of the noise in units of the group's range: small enough for a gradient to be linear in it."""


@dataclass
class Group:
    """Layers that share stored copies and so get the same bits; their elements and squared error."""

    layers: list[str]
    size: int
    error: float


@dataclass
class Estimate(Observer):
    """Observer of one iteration; afterwards `groups` returns the gradient error of each layer's noise."""

    parameters: list[nn.Parameter]
    copies: dict[int, tuple[int, list[str]]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    propagating: bool = False
    wants_tensors = True

    def stored(
        self,
        layer: str,
        lossy: Any,
        how: Any,
        parts: tuple[list[Tensor], ...],
        exact: Any,
        row: int,
        valued: bool = False,
    ) -> None:
        """Record which copies a call has stored; calls with the same storage share a copy."""
        for tensor, stored in zip(lossy, parts, strict=True):
            if len(stored) > 1:
                storage = stored[0].untyped_storage()._cdata
                self.copies.setdefault(storage, (tensor.numel(), []))[1].append(layer)

    def backward(self, replay: Replay) -> None:
        """Measure the effect of noise on a call whose backward begins."""
        if self.propagating:
            return
        noisy = [
            perturbed(tensor) if _is_quantized(tensor, raw) else tensor
            for tensor, raw in zip(replay.lossy, replay.exact_inputs, strict=True)
        ]
        if all(new is old for new, old in zip(noisy, replay.lossy, strict=True)):
            return
        with torch.no_grad():
            exact_gradients = replay.run(list(replay.lossy), replay.needs)
            perturbed_gradients = replay.run(noisy, replay.needs)
        edges = iter(replay.node.next_functions)  # the last belongs to the noise key
        input_edges = [next(edges) if present else None for present in replay.present]
        changes = [
            (edge, after - before)
            for edge, before, after in zip(input_edges, exact_gradients, perturbed_gradients, strict=False)
            if edge is not None and edge[0] is not None and before is not None and after is not None
        ]
        self.errors[replay.layer] = self.errors.get(replay.layer, 0.0) + self._squared_error(changes)

    def _squared_error(self, changes: list[tuple[Any, Tensor]]) -> float:
        """Return the squared norm of the change of all parameter gradients, from `changes` at graph edges."""
        total: dict[nn.Parameter, Tensor] = {}
        inner = []
        for edge, delta in changes:
            parameter = getattr(edge[0], "variable", None)
            if isinstance(parameter, nn.Parameter):
                total[parameter] = total[parameter] + delta if parameter in total else delta
            elif delta.any():
                inner.append((GradientEdge(edge[0], edge[1]), delta))
        for parameter, delta in self._propagated(inner):
            total[parameter] = total[parameter] + delta if parameter in total else delta
        return sum(_square(delta) for delta in total.values())

    def _propagated(self, changes: list[tuple[GradientEdge, Tensor]]) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the changes of parameter gradients that `changes` at inner graph edges cause."""
        if not changes:
            return []
        self.propagating = True
        try:
            gradients: Any = torch.autograd.grad(
                [edge for edge, _ in changes],
                self.parameters,
                [delta for _, delta in changes],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            self.propagating = False
        pairs = zip(self.parameters, gradients, strict=True)
        return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]

    def groups(self) -> list[Group]:
        """Return the layers grouped by shared copies, with their error under noise of equal relative width.

        Only layers with quantized copies are included, not those that drop or that save exact bits.
        """
        groups: list[Group] = []
        for size, layers in self.copies.values():
            new = [layer for layer in dict.fromkeys(layers) if layer in self.errors]
            merged = Group(new, size, 0.0)
            for group in [group for group in groups if set(group.layers) & set(new)]:
                merged.layers = list(dict.fromkeys(group.layers + merged.layers))
                merged.size += group.size
                groups.remove(group)
            groups += [merged] if new else []
        for group in groups:
            group.error = sum(self.errors[layer] for layer in group.layers)
        return groups


def _is_quantized(tensor: Tensor, raw: bool) -> bool:
    return not raw and tensor.numel() > MIN_ELEMENTS and tensor.is_floating_point()


def perturbed(x: Tensor) -> Tensor:
    """Add uniform noise to `x`, `AMPLITUDE` times its group's range wide; equal sizes get equal noise."""
    flat = x.reshape(-1)
    padding = -flat.numel() % GROUP
    rows = torch.cat([flat, flat[-1:].expand(padding)]).view(-1, GROUP)
    generator = torch.Generator(x.device).manual_seed(flat.numel())
    noise = torch.rand(rows.shape, generator=generator, device=x.device, dtype=torch.float32) - 0.5
    width = (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) * AMPLITUDE
    return (rows + noise.to(x.dtype) * width).view(-1)[: flat.numel()].view(x.shape)


def _square(tensor: Tensor) -> float:
    return tensor.float().square().sum(dtype=torch.float64).item()
