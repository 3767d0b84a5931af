"""What has to hold for a program: the same forward, and a gradient that is finite, near and unbiased."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from benchmarks.sweeps.rounding import ROUNDINGS, Rounding, by_range, controls
from benchmarks.sweeps.steps import FAILURES, Program, Step, attempt, finite_where, flat, same, step

SPREAD = 64.0
"""Allowed ratio of range² / 4 to the mean square of the stored numbers: 3 for uniform numbers, about 9 for
256 normal ones. A linear backward then has a relative squared error of at most `SPREAD` / (level - 1)², as
each element has a variance of at most (range / (level - 1))² / 4."""
AS_MUCH = 10.0
"""Errors within this factor of the control's are its own: both are means of heavy-tailed numbers."""
FLOOR = 1e-8
"""Relative squared error that float32 itself makes, and the shorter step of a group that holds NaN or Inf."""
BIAS = 0.1
"""Part of the error that may be bias squared."""
FEW, SOME, MANY = 3, 16, 128
"""Rounding seeds: to see whether anything is rounded, to measure the error, to be sure of a bias."""


class UnfitError(Exception):
    """PyTorch itself has no gradient here that anything could be compared with."""


class FaultError(Exception):
    """A program is broken; the text is the cause."""


@dataclass(frozen=True)
class Reference:
    """A program's plain step, and its gradient as one vector."""

    program: Program
    right: Step
    gradient: Tensor

    @staticmethod
    def of(program: Program) -> Reference:
        """The plain step of `program`; `UnfitError` where it raises, differs by run or is nowhere finite."""
        try:
            module = program.plain()
            right, second = step(program, module), step(program, module)
        except FAILURES as error:
            raise UnfitError("plain raises") from error
        gradient = flat(right, right)
        if gradient.numel() == 0:
            raise UnfitError("plain has no finite gradient")
        if not (same(second.outputs, right.outputs) and torch.equal(flat(second, right), gradient)):
            raise UnfitError("plain is not deterministic")
        return Reference(program, right, gradient)

    def error(self, found: Tensor) -> float:
        """‖ĝ − g‖² / ‖g‖²; infinite where it is not a number."""
        difference, scale = float((found - self.gradient).square().sum()), float(self.gradient.square().sum())
        ratio = difference / scale if scale else difference
        return ratio if math.isfinite(ratio) else math.inf


class Runs:
    """Gradients of a program by rounding seed, run as they are asked for."""

    def __init__(self, reference: Reference, gradients: Iterator[Tensor]) -> None:
        self.reference = reference
        self._gradients = gradients
        self._errors: list[float] = []
        self._sum = torch.zeros_like(reference.gradient)

    def error(self, count: int) -> float:
        """The mean error of the first `count` seeds, or of as many as were run."""
        for gradient in islice(self._gradients, max(0, count - len(self._errors))):
            self._errors.append(self.reference.error(gradient))
            self._sum += gradient
        return sum(self._errors) / len(self._errors)

    def bias(self, count: int) -> float:
        """Relative squared bias, without what the variance of the mean of `count` gradients adds to it."""
        error = self.error(count)
        of_mean = self.reference.error(self._sum / len(self._errors))
        return of_mean - (error - of_mean) / (len(self._errors) - 1)


def check(reference: Reference, level: int) -> float:
    """The mean error of the converted program at `level`.

    `FaultError` where something does not hold, `UnfitError` where plain cannot say.
    """
    ours = Runs(reference, _steps(reference, reference.program.converted(level)))
    if ours.error(FEW) == 0.0:
        return 0.0
    error = ours.error(SOME)
    if error > SPREAD / (level - 1) ** 2:
        _compare(ours, level)
    if FLOOR < error < math.inf and ours.bias(SOME) > BIAS * error:
        _check_bias(ours, level)
    return error


def _steps(reference: Reference, module: nn.Module) -> Iterator[Tensor]:
    """Gradients of step after step; NaN in all of it where a gradient is not finite that plain has."""
    right = reference.right
    while True:
        found = _converted_step(reference.program, module)
        if not same(found.outputs, right.outputs):
            _require_determinism(reference)
            raise FaultError("forward differs")
        if not same(found.state, right.state):
            raise FaultError("random state or buffers differ")
        yield _gradient(reference, found)


def _require_determinism(reference: Reference) -> None:
    """`UnfitError` where plain's own outputs differ by run: some of LAPACK's depend on addresses."""
    module = reference.program.plain()
    between = []  # so that no run has the addresses of another
    for size in range(MANY):
        between.append(torch.empty(size))
        if not same(step(reference.program, module).outputs, reference.right.outputs):
            raise UnfitError("plain is not deterministic")


def _converted_step(program: Program, module: nn.Module) -> Step:
    """A step of `module`; `FaultError` where it raises."""
    try:
        return step(program, module)
    except FAILURES as error:
        text = str(error).strip().partition("\n")[0]
        raise FaultError(f"raises {type(error).__name__}: {text}") from error


def _compare(ours: Runs, level: int) -> None:
    """`FaultError` where the error is much more than what rounding the inputs does.

    Errors near a pole are heavy-tailed, so a mean over few seeds that is too large is measured again.
    """
    rounded = [Runs(ours.reference, _rounded(ours.reference, rounding, level)) for rounding in ROUNDINGS]
    for count in (SOME, MANY):
        error = ours.error(count)
        if error <= AS_MUCH * max(each.error(count) for each in rounded):
            return
        if error == math.inf:
            raise FaultError("not finite")
    raise FaultError(f"error {ours.error(MANY):.1e} at level {level}")


def _rounded(reference: Reference, rounding: Rounding, level: int) -> Iterator[Tensor]:
    """Gradients of the plain program with its inputs rounded; NaN where PyTorch refuses them."""
    for each in controls(reference.program, rounding, level):
        yield _gradient(reference, each)


def _gradient(reference: Reference, found: Step | None) -> Tensor:
    """The gradient of `found` where plain has one; all NaN where it is missing or not finite there."""
    right = reference.right
    if found is None or not finite_where(found, right):
        return reference.gradient * math.nan
    return flat(found, right)


def _check_bias(ours: Runs, level: int) -> None:
    """`FaultError` where part of the error is the same for all seeds, and it is not so of rounded inputs."""
    if ours.bias(MANY) <= BIAS * ours.error(MANY) or not (level == 256 or is_affine(ours.reference)):
        return
    rounded = Runs(ours.reference, _rounded(ours.reference, by_range, level))
    if ours.bias(MANY) > AS_MUCH * rounded.bias(MANY):
        raise FaultError(f"biased at level {level}")


def is_affine(reference: Reference) -> bool:
    """Whether the plain gradient is an affine function of the inputs, so that unbiased copies of them give an
    unbiased gradient.
    """
    ends = [_moved(reference, sign) for sign in (1, -1)]
    bend = (ends[0] + ends[1] - 2 * reference.gradient).norm()
    return bool(bend <= 1e-3 * (ends[0] - ends[1]).norm())


def _moved(reference: Reference, sign: int) -> Tensor:
    """The plain gradient with each input moved by about 1 % of itself in one of two opposite directions."""
    generator = torch.Generator().manual_seed(0)

    def moved(x: Tensor) -> Tensor:
        return x + sign * 0.01 * x * torch.randn(x.shape, generator=generator)

    return _gradient(reference, attempt(reference.program.changed(moved)))
