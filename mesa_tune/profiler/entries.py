"""The rows of a profile: kept tensors, layers, the ways to store them, and which layers go together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mesa_tune.files import typed
from mesa_tune.policy.settings import LayerSettings


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that the plain step keeps for backward; `layers` are all that keep it, the owner first."""

    id: int
    owner: str
    layers: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> TensorEntry:
        parts = {"layers": tuple(values["layers"]), "shape": tuple(values["shape"])}
        return typed(TensorEntry, {**values, **parts})


@dataclass(frozen=True)
class ExactEntry:
    """Bytes that every policy leaves as PyTorch saves them: by which function of which layer, and why."""

    function: str
    layer: str
    bytes: int
    why: str

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ExactEntry:
        return typed(ExactEntry, values)


NO_FORMULA, OUTSIDE = "no formula", "not saved through autograd"
REACHED_BY_NONE = (NO_FORMULA, OUTSIDE)
"""Reasons for which bytes stay exact that a new formula could change."""

UNLISTED = -1
"""The index of a layer that no policy can name: nothing that it saves is ever stored in another way."""


@dataclass(frozen=True)
class Option:
    """One way to store what a layer keeps, and its price.

    `bytes`: what the layer then keeps. Errors are relative squares, ‖ĝ − g‖² / ‖g‖² for the gradient; None
    where unknown. `measured`: by running it, not inferred from another option. Storing exactly is an
    option, too.
    """

    settings: LayerSettings
    bytes: int
    tensor_error: float
    gradient_error: float | None
    standard_error: float | None
    measured: bool
    encode_ms: float
    decode_ms: float

    @property
    def ms(self) -> float:
        """Milliseconds of encoding and decoding."""
        return self.encode_ms + self.decode_ms

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "settings": self.settings.to_dict()}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Option:
        return typed(Option, {**values, "settings": LayerSettings.from_dict(values["settings"])})


class Ways:
    """Something with options: to find the one for some settings."""

    options: tuple[Option, ...]

    @cached_property
    def positions(self) -> dict[LayerSettings, int]:
        """Settings -> position among the options; of several ways to say exact, the one that is there."""
        return {option.settings: position for position, option in enumerate(self.options)}

    def nearest(self, settings: LayerSettings) -> int | None:
        """Position of the option most like `settings`; None where there is none.

        The same settings if they are there; else, among the options that compress and whose error is known
        (measured ones first), the nearest group size, of two equally near ones the larger, which errs more;
        then the nearest level. Groups along channels count as the largest group size.
        """
        if settings in self.positions:
            return self.positions[settings]
        known = [
            position
            for position, option in enumerate(self.options)
            if option.settings.exact == settings.exact and option.gradient_error is not None
        ]
        measured = [position for position in known if self.options[position].measured]
        return min(
            measured or known,
            key=lambda position: _distance(self.options[position].settings, settings),
            default=None,
        )

    def error(self, settings: LayerSettings) -> float | None:
        """The gradient error, scaled with 1 / (level − 1)² from the nearest option where not tried."""
        position = self.nearest(settings)
        if position is None or (error := self.options[position].gradient_error) is None:
            return None
        if settings.drop:  # most of the error is what is not there, at any level
            return error
        known = self.options[position].settings.level
        return error * ((known - 1) / (settings.level - 1)) ** 2

    def ms(self, settings: LayerSettings) -> float:
        """Milliseconds of encoding and decoding under the nearest option."""
        position = self.nearest(settings)
        return 0.0 if position is None else self.options[position].ms


@dataclass(frozen=True)
class LayerEntry(Ways):
    """A layer and its options. `bytes`: all that it keeps; `own_bytes`: tensors that it owns."""

    name: str
    tag: str
    index: int
    module: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    own_bytes: int
    shared_with: tuple[str, ...]
    options: tuple[Option, ...]

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "options": [option.to_dict() for option in self.options]}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> LayerEntry:
        parts = {
            "shape": tuple(values["shape"]),
            "shared_with": tuple(values["shared_with"]),
            "options": tuple(Option.from_dict(option) for option in values["options"]),
        }
        return typed(LayerEntry, {**values, **parts})


@dataclass(frozen=True)
class Tie:
    """Layers that share tensors and therefore get one setting.

    Their gradient error under the option at position p is `joint[p]` times the sum of their own errors
    there; 1 where `joint` is shorter. Errors of layers that keep the same rounded tensor are not
    independent.
    """

    layers: tuple[str, ...]
    joint: tuple[float, ...] = ()

    def ratio(self, position: int | None) -> float:
        """`joint` at an option's position; 1 where it is not known."""
        return self.joint[position] if position is not None and position < len(self.joint) else 1.0

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Tie:
        return Tie(tuple(values["layers"]), tuple(float(ratio) for ratio in values["joint"]))


@dataclass(frozen=True)
class Derivation(Ways):
    """What `layers` (one alone, or sharers) store while all `takers` make what they keep again.

    `sources`: all layers whose kept tensors that takes. `options` are the ways to store, with the gradient
    error of all backwards that the rounding gets into: own ones and those of the takers that derive from it.
    """

    layers: tuple[str, ...]
    takers: tuple[str, ...]
    sources: tuple[str, ...]
    options: tuple[Option, ...]

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "options": [option.to_dict() for option in self.options]}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Derivation:
        names = {key: tuple(values[key]) for key in ("layers", "takers", "sources")}
        return Derivation(**names, options=tuple(Option.from_dict(option) for option in values["options"]))


def _distance(known: LayerSettings, wanted: LayerSettings) -> tuple[bool, float, bool, float, int, float]:
    here, there = _group(known), _group(wanted)
    return (
        (known.drop > 0) != (wanted.drop > 0),
        abs(known.drop - wanted.drop),
        known.allocation != wanted.allocation,
        round(abs(math.log2(here / there)), 9),
        -here,
        abs(math.log2((known.level - 1) / (wanted.level - 1))),
    )


def _group(settings: LayerSettings) -> int:
    # Along channels a group spans the batch: larger than any group of consecutive elements that is tried.
    return settings.group_size or 1 << 20


BITS = (1, 2, 3, 4, 6, 8)


def full_grid() -> list[LayerSettings]:
    """Every combination of `BITS` and `GROUP_SIZES`."""
    return [LayerSettings(level=2**bits, group_size=size) for bits in BITS for size in GROUP_SIZES]


def fast_grid() -> list[LayerSettings]:
    """The bits alone, in groups of 256."""
    return [LayerSettings(level=2**bits, group_size=256) for bits in BITS]


GROUP_SIZES = (64, 256, 1024)


REFERENCE_GROUP = 256


def in_reference_groups(grid: list[LayerSettings]) -> list[LayerSettings]:
    """The options of more than 1 bit whose errors need no other to be scaled by, if there are any.

    On DeiT-Ti what is derived took 100 s of a profile of 263 s with all options.
    """
    return [option for option in grid if option.group_size == REFERENCE_GROUP and option.bits > 1] or grid
