"""The rows of a profile: saved tensors, layers, options to store them, and which layers share settings.

What is hard: settings that were not measured take their error from the nearest option of the same kind, and
are unknown without one (Rule 12).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from mesa_tune.files import typed
from mesa_tune.policy.settings import LayerSettings


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that the plain step saves for backward; `layers` are all that save it, the owner first."""

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
    """Bytes that every policy leaves exact: which function of which layer saves them, and why they stay."""

    function: str
    layer: str
    bytes: int
    why: str

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ExactEntry:
        return typed(ExactEntry, values)


NO_FORMULA, OUTSIDE = "no formula", "not saved through autograd"
REACHED_BY_NONE = (NO_FORMULA, OUTSIDE)
"""Reasons to stay exact that a new formula could remove."""

UNLISTED = -1
"""Index of a layer that no policy can name: everything that it saves always stays exact."""


@dataclass(frozen=True)
class Option:
    """Settings to store what a layer saves, and their price.

    `bytes`: what the layer then saves. Errors are relative squares, ‖ĝ − g‖² / ‖g‖² for the gradient, means
    over `batches`; None where unknown. `standard_error`: that of the mean; None with one batch. `measured`:
    True if the error was measured, False if it was inferred from another option. Storing exactly is an
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
    batches: int = 1

    @property
    def ms(self) -> float:
        """Milliseconds of encoding and decoding."""
        return self.encode_ms + self.decode_ms

    def averaged(self, other: Option) -> Option:
        """Return this option with the measurements of `other`, on one batch more, included."""
        count = self.batches
        error, spread = self.gradient_error, None
        if error is not None and other.gradient_error is not None:
            delta = other.gradient_error - error
            squares = (self.standard_error or 0.0) ** 2 * count * (count - 1) + delta**2 * count / (count + 1)
            error, spread = error + delta / (count + 1), math.sqrt(squares / (count * (count + 1)))
        return replace(
            self,
            tensor_error=self.tensor_error + (other.tensor_error - self.tensor_error) / (count + 1),
            gradient_error=error,
            standard_error=spread,
            encode_ms=min(self.encode_ms, other.encode_ms),
            decode_ms=min(self.decode_ms, other.decode_ms),
            batches=count + 1,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "settings": self.settings.to_dict()}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Option:
        return typed(Option, {**values, "settings": LayerSettings.from_dict(values["settings"])})


class LayerPrices(NamedTuple):
    """The options of a layer as far as they are measured, and the joint ratios of its tie."""

    options: tuple[Option, ...] = ()
    joint: tuple[float, ...] = ()

    @property
    def batches(self) -> float:
        """On how many batches they were measured; infinite if the layer can only store exactly."""
        if not self.options:
            return 0
        compressed = [option.batches for option in self.options if not option.settings.exact]
        return min(compressed, default=math.inf)

    def averaged(self, other: LayerPrices) -> LayerPrices:
        """Return these prices with those of `other`, on one batch more, included."""
        if not self.options:
            return other
        count = self.options[0].batches
        options = [old.averaged(new) for old, new in zip(self.options, other.options, strict=True)]
        ratios = [old + (new - old) / (count + 1) for old, new in zip(self.joint, other.joint, strict=True)]
        return LayerPrices(tuple(options), tuple(ratios))


class HasOptions:
    """Base of dataclasses with `options`: find the option nearest to some settings."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    options: tuple[Option, ...]

    @cached_property
    def positions(self) -> dict[LayerSettings, int]:
        """Position of each option, by its settings."""
        return {option.settings: position for position, option in enumerate(self.options)}

    def nearest(self, settings: LayerSettings) -> int | None:
        """Return the position of the option most similar to `settings`; None if there is none of its kind.

        If no option has these settings, only options whose error is known count, and measured ones come
        first. They may differ in level and group size, in nothing else. The nearest group size wins (the
        larger one in a tie, because its error is larger), then the nearest level.
        """
        if settings in self.positions:
            return self.positions[settings]
        candidates = [
            position
            for position, option in enumerate(self.options)
            if _kind(option.settings) == _kind(settings) and option.gradient_error is not None
        ]
        measured = [position for position in candidates if self.options[position].measured]
        return min(
            measured or candidates,
            key=lambda position: _distance(self.options[position].settings, settings),
            default=None,
        )

    def error(self, settings: LayerSettings) -> float | None:
        """Return the gradient error, scaled with 1 / (level − 1)² from the nearest option if not measured."""
        return self.error_at(self.nearest(settings), settings)

    def error_at(self, position: int | None, settings: LayerSettings) -> float | None:
        """Return what `error` does, given the position of the nearest option."""
        if position is None or (error := self.options[position].gradient_error) is None:
            return None
        if settings.drop:  # most of the error comes from the dropped elements, at every level
            return error
        level = self.options[position].settings.level
        return error * ((level - 1) / (settings.level - 1)) ** 2

    def ms(self, settings: LayerSettings) -> float | None:
        """Return the milliseconds of encoding and decoding with the nearest option; None if unknown."""
        return self.ms_at(self.nearest(settings))

    def ms_at(self, position: int | None) -> float | None:
        """Return what `ms` does, given the position of the nearest option."""
        return None if position is None else self.options[position].ms

    def encode_ms(self, settings: LayerSettings) -> float | None:
        """Return the milliseconds of encoding with the nearest option; None if unknown."""
        position = self.nearest(settings)
        return None if position is None else self.options[position].encode_ms

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "options": [option.to_dict() for option in self.options]}


@dataclass(frozen=True)
class LayerEntry(HasOptions):
    """A layer and its options.

    `bytes`: of all tensors that it saves; `own_bytes`: of those that it owns. `call_ms`: milliseconds that it
    adds to a step, if it compresses, besides encoding and decoding; below zero where its backward is faster
    than PyTorch's. None: unknown.
    """

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
    call_ms: float | None = None

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
    """Layers that share tensors and therefore get the same settings.

    Their gradient error under the option at position p is `joint[p]` times the sum of their own errors, or
    the sum itself where `joint` is shorter. Errors of layers that save the same rounded tensor are not
    independent.
    """

    layers: tuple[str, ...]
    joint: tuple[float, ...] = ()

    def ratio(self, position: int | None) -> float:
        """Return `joint` at an option's position; 1 where it is unknown."""
        return self.joint[position] if position is not None and position < len(self.joint) else 1.0

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Tie:
        return Tie(tuple(values["layers"]), tuple(float(ratio) for ratio in values["joint"]))


@dataclass(frozen=True)
class Derivation(HasOptions):
    """Options to store what `layers` (one, or several that share it) save while all `takers` derive.

    `sources`: all layers whose saved tensors the takers need. The gradient error of an option counts all
    backwards that the rounding reaches: those of `layers`, and of the takers that derive from them.
    """

    layers: tuple[str, ...]
    takers: tuple[str, ...]
    sources: tuple[str, ...]
    options: tuple[Option, ...]

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Derivation:
        names = {key: tuple(values[key]) for key in ("layers", "takers", "sources")}
        return Derivation(**names, options=tuple(Option.from_dict(option) for option in values["options"]))


_KIND = ("quant_groups", "ema_decay", "rounding", "drop", "allocation", "store")


def _kind(settings: LayerSettings) -> Any:
    """Return what settings must have in common for the error of one to tell that of another."""
    return settings.exact or tuple([getattr(settings, name) for name in _KIND])


def _distance(option: LayerSettings, wanted: LayerSettings) -> tuple[float, int, float]:
    group_size = comparable_group_size(option)
    return (
        round(abs(math.log2(group_size / comparable_group_size(wanted))), 9),
        -group_size,
        abs(math.log2((option.level - 1) / (wanted.level - 1))),
    )


def comparable_group_size(settings: LayerSettings) -> int:
    """Return the group size; for groups along channels, which span the batch, a size above all others."""
    return settings.group_size or 1 << 20


BITS = (1, 2, 3, 4, 6, 8)
GROUP_SIZES = (64, 256, 1024)
REFERENCE_GROUP = 256


def full_grid() -> list[LayerSettings]:
    """Return every combination of `BITS` and `GROUP_SIZES`."""
    return [LayerSettings(level=2**bits, group_size=size) for bits in BITS for size in GROUP_SIZES]


def fast_grid() -> list[LayerSettings]:
    """Return one option for each of `BITS`, in groups of 256 elements."""
    return [LayerSettings(level=2**bits, group_size=REFERENCE_GROUP) for bits in BITS]


def in_reference_groups(grid: list[LayerSettings]) -> list[LayerSettings]:
    """Return the options of more than 1 bit in reference groups; all options if there are none.

    Pricing derivations with all options took 100 s of a profile of 263 s on DeiT-Ti.
    """
    return [option for option in grid if option.group_size == REFERENCE_GROUP and option.bits > 1] or grid


_NO_NOISE = 1e-6
"""Batches whose gradients vary less than this are all the same: it is what float32 rounds away."""


@dataclass(frozen=True)
class Noise:
    """The minibatch's own noise: how much the gradients of whole steps vary from batch to batch.

    `relative`: Σ‖g_b − ḡ‖² / (n − 1) over mean ‖g_b‖². `scale`: ‖g‖² of the first batch, which errors are
    relative to, over mean ‖g_b‖².
    """

    relative: float
    scale: float

    def ratio(self, gradient_error: float | None) -> float | None:
        """Return mean ‖ĝ − g‖² over the noise; None if unknown, or if all batches are the same."""
        if gradient_error is None or self.relative < _NO_NOISE:
            return None
        return gradient_error * self.scale / self.relative
