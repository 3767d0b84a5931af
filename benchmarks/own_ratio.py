"""The noise ratio of a policy by plain arithmetic on gradients; it shares no code with mesa-tune.

Each parameter's squared error counts beside its own variance from batch to batch, and the mean is half by
elements, half by count. A matrix is so many parameters as its larger side is larger than its smaller, 16 at
most and of 64 elements at least, an embedding one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

FLOOR = 1e-3
"""A variance per element counts as at least this share of the mean."""


class OwnRatio:
    """Collects exact gradients and errors of a model's parameters, as lists of one tensor each."""

    def __init__(self, model: nn.Module) -> None:
        whole = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.cuts = [(0, 1) if parameter in whole else _cut(tuple(parameter.shape)) for parameter in trained]
        self.elements = self.parts([torch.ones_like(parameter) for parameter in trained])
        self.count, self.squares = 0, torch.zeros_like(self.elements)
        self.sums: list[Tensor] = [torch.zeros_like(parameter, dtype=torch.double) for parameter in trained]

    def parts(self, gradient: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of each part."""
        pairs = zip(gradient, self.cuts, strict=True)
        pieces = [piece for tensor, (dim, count) in pairs for piece in _pieces(tensor.double(), dim, count)]
        return torch.stack([piece.square().sum() for piece in pieces])

    def add(self, gradient: Sequence[Tensor]) -> None:
        """Add the exact gradient of a batch."""
        self.count += 1
        self.squares += self.parts(gradient)
        for total, part in zip(self.sums, gradient, strict=True):
            total.add_(part)

    def ratio(self, errors: Tensor) -> float:
        """Return the noise ratio of mean squared errors, by part."""
        own = self.own(errors)
        return float((own @ self.elements / self.elements.sum() + own.mean()) / 2)

    def own(self, errors: Tensor) -> Tensor:
        """Return the own ratio of each part."""
        scattered = (self.squares - self.parts(self.sums) / self.count) / (self.count - 1)
        floor = FLOOR * scattered.sum() / self.elements.sum() * self.elements
        return errors / scattered.maximum(floor)

    def worst(self, errors: Tensor) -> float:
        """Return the largest own ratio of a part of 64 elements or more."""
        return float(self.own(errors)[self.elements >= 64].max())


def _cut(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        return 0, 1
    small, large = sorted(shape)
    return shape.index(large), max(1, min(16, round(large / small), small * large // 64))


def _pieces(tensor: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
    return tensor.tensor_split(count, dim) if count > 1 else (tensor,)
