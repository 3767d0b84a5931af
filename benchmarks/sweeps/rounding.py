"""The control: the plain operator with its inputs rounded.

An operator whose gradient has a pole or a jump near its inputs is badly conditioned: rounding the inputs does
to its gradient what storing them in fewer bits does. That is no defect of the storing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor

from benchmarks.sweeps.steps import Program, Step, attempt

Rounding = Callable[[Tensor, int, torch.Generator], Tensor]


def by_digits(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """`x` rounded stochastically to as many significant bits as `level` numbers take."""
    bits = (level - 1).bit_length()
    mantissa, exponent = torch.frexp(x)
    noise = torch.rand(x.shape, generator=generator)
    return torch.ldexp(torch.floor(mantissa * 2**bits + noise) / 2**bits, exponent)


def by_range(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """`x` rounded stochastically to `level` values between its ends, as a quantizer does."""
    numbers = x[x.isfinite()]
    if numbers.numel() == 0:
        return x
    low, high = numbers.min(), numbers.max()
    unit = ((high - low) / (level - 1)).clamp(min=torch.finfo(x.dtype).tiny)
    noise = torch.rand(x.shape, generator=generator)
    return (low + unit * torch.floor((x - low) / unit + noise)).clamp(low, high)


ROUNDINGS: tuple[Rounding, ...] = (by_digits, by_range)


def controls(program: Program, rounding: Rounding, level: int) -> Iterator[Step | None]:
    """Plain steps with inputs rounded, seed by seed; None where PyTorch refuses the rounded inputs."""
    for seed in count():
        generator = torch.Generator().manual_seed(seed)

        def rounded(x: Tensor, generator: torch.Generator = generator) -> Tensor:
            return torch.where(x.isfinite(), rounding(x, level, generator), x)

        yield attempt(program.changed(rounded))
