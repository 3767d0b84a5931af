"""Gradients of whole steps that are all held, and the gradient noise ratio from them by plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn

import mesa_tune as mt


def gradients_of(
    work: mt.Workload, draws: Iterable[int], policy: mt.Policy | None = None, seed: int = 0
) -> Tensor:
    """The gradients of steps without random numbers, one in each row: plain, or rounded by a seed."""
    net, rows = work.build(), []
    for draw in draws:
        net.zero_grad()
        rounding = 1_000_003 * draw + seed
        if policy is not None:
            mt.convert(net, policy, seed=rounding)
        for index in range(work.accumulation):
            micro = rounding + 1_000_000_007 * index
            storing = nullcontext() if policy is None else mt.compress_saved(policy, seed=micro)
            with storing:
                loss = work.compute_loss(net, work.make_batch(draw=draw * work.accumulation + index))
            loss.backward()
        rows.append(flat([parameter.grad for parameter in net.parameters()]))
        if policy is not None:
            mt.revert(net)
    return torch.stack(rows)


def flat(gradient: Iterable[Tensor | None]) -> Tensor:
    """The gradient in one row, of those parameters that have one."""
    return torch.cat([part.flatten() for part in gradient if part is not None]).double()


class OwnByHand:
    """The own noise of the parameters of `model`: variances of `table`, which has a gradient in each row."""

    def __init__(self, model: nn.Module, table: Tensor) -> None:
        self.part = parts_of(model)
        self.elements = torch.bincount(self.part).double()
        self.variances = self.sums(table.var(0))
        floor = float(self.variances.sum() / self.elements.sum()) / 1000
        self.noise = self.variances.maximum(floor * self.elements)

    def sums(self, values: Tensor) -> Tensor:
        """The sum over each part."""
        return torch.bincount(self.part, weights=values)

    def own(self, change: Tensor) -> Tensor:
        """The own ratio of each part for a change of the gradient."""
        return self.sums(change.square()) / self.noise

    def ratio(self, change: Tensor) -> float:
        """The noise ratio of a change: half of it by elements, half by parts."""
        own = self.own(change)
        return float((self.elements @ own) / self.elements.sum() + own.mean()) / 2

    def mean_ratio(self, changes: Tensor) -> float:
        """The mean noise ratio of changes, one in each row."""
        return float(np.mean([self.ratio(change) for change in changes]))


def parts_of(model: nn.Module) -> Tensor:
    """The part of each element, of linear layers and norms: a matrix has so many as it has squares."""
    numbers, count, seen = list[Tensor](), 0, set[nn.Parameter]()
    for module in model.modules():
        cuts = torch.zeros(0, dtype=torch.long)
        for parameter in module.parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            shape = tuple(parameter.shape)
            if len(shape) == 2:
                pieces = np.array_split(np.arange(max(shape)), _pieces(*sorted(shape)))
                cuts = torch.tensor([n for n, piece in enumerate(pieces) for _ in piece])
                own = cuts[:, None] if shape[0] == len(cuts) else cuts
            else:
                own = cuts if shape == cuts.shape else torch.zeros(shape, dtype=torch.long)
            numbers.append(own.expand(shape).flatten() + count)
            count = int(numbers[-1].max()) + 1
    return torch.cat(numbers)


def _pieces(small: int, large: int) -> int:
    """As many as there are squares, 16 at most, and of 64 elements at least."""
    return max(1, min(16, round(large / small), small * large // 64))
