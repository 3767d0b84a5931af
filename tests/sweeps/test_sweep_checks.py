"""The sweep's checks find each kind of fault, and find none where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.sweeps.checks import FaultError, Reference, UnfitError, check
from benchmarks.sweeps.steps import Lifted, Program


@dataclass(frozen=True)
class Damaged(Program):
    """A program whose converted module is another function."""

    damaged: Callable[..., Any] = torch.mul

    def converted(self, level: int) -> nn.Module:
        return Lifted(self.damaged)


class Backward(torch.autograd.Function):
    """x · y, whose gradient another function changes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.change = change
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        return ctx.change(grads[0] * y), ctx.change(grads[0] * x), None


def _with(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: Backward.apply(x, y, change)  # type: ignore[no-untyped-call]


_noise = torch.Generator().manual_seed(2)


def _noisy(size: float) -> Callable[[Tensor, Tensor], Tensor]:
    return _with(lambda grad: grad * (1 + size * torch.randn(grad.shape, generator=_noise)))


def _mutating(x: Tensor, y: Tensor) -> Tensor:
    torch.rand(1)
    return x * y


def _raising(x: Tensor, y: Tensor) -> Tensor:
    raise RuntimeError("on purpose")


def _program(function: Callable[..., Any], damaged: Callable[..., Any], *args: Tensor) -> Damaged:
    inputs = args or tuple(torch.randn(8, 8) for _ in range(2))
    leaves = tuple(each.requires_grad_() for each in inputs)
    return Damaged(partial(Lifted, function), leaves, {}, lambda output: output, damaged=damaged)


FAULTS = {
    "forward differs": lambda x, y: x * y + 1e-6,
    "random state or buffers differ": _mutating,
    "raises RuntimeError: on purpose": _raising,
    "not finite": _with(lambda grad: grad * torch.nan),
    "error 2": _noisy(0.15),
    "biased at level 256": _with(lambda grad: 1.01 * grad),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_fault_is_found(cause: str) -> None:
    reference = Reference.of(_program(torch.mul, FAULTS[cause]))
    with pytest.raises(FaultError, match=cause):
        check(reference, 256)


def test_missing_gradient_is_found() -> None:
    with pytest.raises(FaultError, match="not finite"):
        check(Reference.of(_program(torch.mul, lambda x, y: x.detach() * y)), 256)


def test_small_unbiased_error_is_none() -> None:
    assert 1e-5 < check(Reference.of(_program(torch.mul, _noisy(0.01))), 256) < 1e-3
    assert check(Reference.of(_program(torch.mul, torch.mul)), 256) == 0.0


class Near(torch.autograd.Function):
    """1 / x, whose backward uses x off by up to 0.002."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.reciprocal()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        near = x + 0.002 * (2 * torch.rand(x.shape, generator=_noise) - 1)
        gradient: Tensor = -grads[0] / near.square()
        return gradient


def test_error_near_a_pole_is_that_of_rounded_inputs() -> None:
    x = torch.tensor([0.01, 0.013, 1.0, 1.5, 2.0])
    program = _program(torch.reciprocal, Near.apply, x)
    assert check(Reference.of(program), 256) > 0.01  # 64 / 255² is 0.001


def test_plain_without_gradient_cannot_be_compared() -> None:
    x = torch.full((4, 4), -1.0)
    with pytest.raises(UnfitError, match="no finite gradient"):
        Reference.of(_program(torch.sqrt, torch.sqrt, x))
