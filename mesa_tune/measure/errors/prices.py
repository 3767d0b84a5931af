"""Prices of options: which of them are measured, and how the others follow.

What is hard: of each option that is measured a backward runs again, and there are 25. But the error of a
gradient is in proportion to that of the stored tensor. On a digits ViT, errors inferred so from those near 3
bits were beside measured ones 0 to 1 % too low on average at 3 to 8 bits, whatever the group size, with a
standard deviation of 6 %, and 5 % too low at 2 bits; from batch to batch errors differ by 45 %. So one option
of each kind is measured on a batch, and besides it one of 1 bit and one of 2 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from mesa_tune.measure.errors.recorded import Draw
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.entries import REFERENCE_GROUP, comparable_group_size, in_proportion


@dataclass(frozen=True)
class Price:
    """Price of an option: squared errors and milliseconds. `ratio`, `bias`: see `Option`."""

    tensor_error: float
    gradient_error: float
    ratio: float
    measured: bool
    encode_ms: float
    decode_ms: float
    bias: float | None = None

    def followed_by(self, draw: Draw) -> Price:
        """Return the price of an option with the tensor error and the times of `draw`."""
        ratio = draw.tensor_error / self.tensor_error if self.tensor_error else 0.0
        return replace(
            self,
            tensor_error=draw.tensor_error,
            gradient_error=ratio * self.gradient_error,
            ratio=ratio * self.ratio,
            measured=False,
            encode_ms=draw.encode_ms,
            decode_ms=draw.decode_ms,
            bias=None if self.bias is None else ratio * self.bias,
        )


def can_follow(draw: Draw, leader: Draw) -> bool:
    """Return whether the tensor error of `leader`, in proportion to which `draw` errs, is above zero."""
    return leader.tensor_error > 0 or draw.tensor_error == 0


def leaders(options: Sequence[LayerSettings], bits: int) -> dict[LayerSettings, LayerSettings]:
    """Return for each option the one that it follows: of those with errors in proportion, the `nearest`.

    Options that leave out elements follow themselves, because no other option's error is similar.
    """
    found = nearest(options, bits, in_proportion)
    return {option: option if option.omits else found[in_proportion(option)] for option in options}


def nearest(
    options: Sequence[LayerSettings], bits: int, common: Callable[[LayerSettings], Hashable]
) -> dict[Hashable, LayerSettings]:
    """Return of all options with the same `common` value the nearest to `bits` in groups of 256."""

    def distance(option: LayerSettings) -> tuple[float, int]:
        return abs(math.log2(comparable_group_size(option) / REFERENCE_GROUP)), abs(option.bits - bits)

    found: dict[Hashable, LayerSettings] = {}
    for option in sorted(options, key=distance):
        found.setdefault(common(option), option)
    return found


def joint_ratio(draws: Sequence[Draw]) -> float | None:
    """Return the layers' joint error over the sum of their own errors; None if not measured."""
    own = [float(draw.total[1]) for draw in draws if draw.total is not None]
    joint = draws[0].joint
    if joint is None or len(own) < len(draws):
        return None if len(draws) > 1 else 1.0
    return float(joint[1]) / sum(own) if sum(own) else 1.0


def filled(joint: Sequence[float | None], options: Sequence[LayerSettings]) -> list[float]:
    """Return `joint` with each None replaced by the ratio of the measured option with the nearest bits."""
    pairs = list(zip(options, joint, strict=True))
    measured = [(option.bits, ratio) for option, ratio in pairs if ratio is not None]
    if not measured:
        return []
    return [
        min(measured, key=lambda pair: abs(pair[0] - option.bits))[1] if ratio is None else ratio
        for option, ratio in pairs
    ]
