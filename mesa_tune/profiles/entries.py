"""The rows of a profile: saved tensors, layers, options to store them, and which layers share settings.

What is hard: settings that were not measured take their error from the nearest option of the same kind, and
are unknown without one (Rule 12).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from mesa_tune.files import typed
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.intervals import DOUBT, Ratios, interval, scaled
from mesa_tune.profiles.own_noise import Shares, shares_from


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

    `bytes`: what the layer then saves. `ratios`: the gradient noise ratio (`OwnNoise`) on each batch, with a
    rounding seed of its own; none if unknown. If `screened`, the first of them chose the options that have
    more, and is no part of their price. `gradient_error`: mean ‖ĝ − g‖² / ‖g‖² on the batches of the price;
    it is only shown. `bias`: the noise ratio of the mean of ĝ − g over rounding seeds, a part of the ratio;
    None where it was not measured. `measured`: True if a change of the layer's input gradients went through
    the graph, False if the error was inferred from such a change under other settings. `decode_ms`: of an
    option that leaves out rows, with what its backward takes longer than that of all rows; below zero if
    less. Storing exactly is an option, too.
    """

    settings: LayerSettings
    bytes: int
    tensor_error: float
    gradient_error: float | None
    ratios: Ratios
    measured: bool
    encode_ms: float
    decode_ms: float
    bias: float | None = None
    screened: bool = True

    @property
    def price_ratios(self) -> Ratios:
        """Ratios without the first, if it screened: luck chose too. If it is the only one, with it."""
        return self.ratios[self.screened :] or self.ratios

    @property
    def noise_ratio(self) -> float | None:
        """Mean of the `price_ratios`; None if unknown."""
        return statistics.fmean(self.price_ratios) if self.ratios else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the gradient error over batches and rounding; None if unknown or priced on one batch."""
        return scaled(interval(self.price_ratios, DOUBT), self.gradient_error, self.noise_ratio)

    @property
    def provenance(self) -> str:
        """`measured`, `inferred` or `unknown`."""
        return ("measured" if self.measured else "inferred") if self.ratios else "unknown"

    @property
    def batches(self) -> int:
        """On how many batches the error was measured or inferred, the first included."""
        return len(self.ratios)

    @property
    def ms(self) -> float:
        """Milliseconds of encoding and decoding."""
        return self.encode_ms + self.decode_ms

    def scale(self, settings: LayerSettings) -> float:
        """Return the factor from the error of this option to that of another level."""
        if settings.omits:  # elements that are not stored make most of the error at every level
            return 1.0
        return ((self.settings.level - 1) / (settings.level - 1)) ** 2

    def times(self, factor: float) -> Option:
        """Return this option with `factor` times its errors."""
        return replace(
            self,
            gradient_error=None if self.gradient_error is None else factor * self.gradient_error,
            ratios=tuple([factor * ratio for ratio in self.ratios]),
            bias=None if self.bias is None else factor * self.bias,
        )

    def extended(self, other: Option) -> Option:
        """Return this option with the measurements of `other`, on one batch more, included."""
        count, priced = self.batches, max(0, self.batches - self.screened)
        error = other.gradient_error
        if priced and error is not None and self.gradient_error is not None:
            error = self.gradient_error + (error - self.gradient_error) / (priced + 1)
        return replace(
            self,
            tensor_error=self.tensor_error + (other.tensor_error - self.tensor_error) / (count + 1),
            gradient_error=error,
            ratios=(*self.ratios, *other.ratios),
            measured=self.measured or other.measured,
            encode_ms=min(self.encode_ms, other.encode_ms),
            decode_ms=min(self.decode_ms, other.decode_ms),
            bias=self.bias if other.bias is None else other.bias,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; `seeds`: number of rounding seeds, one more where `bias` is known."""
        derived = ("noise_ratio", "interval", "provenance", "batches")
        return {
            **{key: value for key, value in vars(self).items() if key != "measured"},
            "settings": self.settings.to_dict(),
            **{name: getattr(self, name) for name in derived},
            "seeds": self.batches + (self.bias is not None),
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Option:
        parts = {name: values[name] for name in _OPTION_VALUES}
        settings, ratios = LayerSettings.from_dict(values["settings"]), tuple(map(float, values["ratios"]))
        if any(not math.isfinite(ratio) for ratio in ratios):
            raise ValueError(f"ratios are {ratios}, not finite")
        measured = values["provenance"] != "inferred"
        parts |= {"measured": measured, "screened": values.get("screened", True)}
        return typed(Option, {**parts, "settings": settings, "ratios": ratios})


_OPTION_VALUES = ("bytes", "tensor_error", "gradient_error", "encode_ms", "decode_ms", "bias")


class HasOptions:
    """Base of dataclasses with `options`: find the option nearest to some settings."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    options: tuple[Option, ...]

    @cached_property
    def positions(self) -> dict[LayerSettings, int]:
        """Position of each option, by its settings."""
        return {option.settings: position for position, option in enumerate(self.options)}

    @cached_property
    def complete(self) -> list[Option]:
        """Each option with its ratios on all batches that price options.

        Those of an option that was left out after the first batch follow the most similar one that was not.
        """
        count = max((option.batches for option in self.options), default=0)
        return [
            option if option.batches in (0, count) else _following(option, self.priced)
            for option in self.options
        ]

    @property
    def priced(self) -> list[Option]:
        """The options that were priced on all batches, without exact storage."""
        options = [option for option in self.options if not option.settings.exact]
        count = max((option.batches for option in options), default=0)
        return [option for option in options if option.batches == count]

    def nearest(self, settings: LayerSettings) -> int | None:
        """Return the position of the option most similar to `settings`; None if there is none of its kind.

        If no option has these settings, only options whose error is known count. They may differ in level and
        group size, in nothing else. The nearest group size wins (the larger one in a tie, because its error
        is larger), then the nearest level.
        """
        if settings in self.positions:
            return self.positions[settings]
        candidates = [
            position
            for position, option in enumerate(self.options)
            if kind(option.settings) == kind(settings) and option.ratios
        ]
        return min(
            candidates,
            key=lambda position: _distance(self.options[position].settings, settings),
            default=None,
        )

    def like(self, settings: LayerSettings) -> Option | None:
        """Return the nearest option, its errors scaled with 1 / (level − 1)²; None if they are unknown."""
        position = self.nearest(settings)
        if position is None or not self.options[position].ratios:
            return None
        return self.complete[position].times(self.options[position].scale(settings))

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "options": [option.to_dict() for option in self.options]}


@dataclass(frozen=True)
class LayerEntry(HasOptions):
    """A layer and its options.

    `bytes`: of all tensors that it saves; `own_bytes`: of those that it owns. `call_ms`: milliseconds that it
    adds to a step, if it compresses, besides encoding and decoding; below zero where its backward is faster
    than PyTorch's. None: unknown. `share`: of the steps that were looked at, those in which its module runs.
    `stored_like`: the layer whose settings it gets where the traced step skips it. Then it owns no bytes of
    this step, and its noise ratios are what they are in the steps that run it, times their share.
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
    shares: Shares = ()
    share: float = 1.0
    stored_like: str | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each option: of the layer, of its settings, and its price."""
        columns = ("name", "tag", "index", "module", "dtype", "own_bytes", "share")
        layer = {**{column: getattr(self, column) for column in columns}, "layer_bytes": self.bytes}
        for option in self.options:
            values, settings = option.to_dict(), option.settings
            price = {key: value for key, value in values.items() if key not in ("settings", "ratios")}
            names = ("level", "bits", "group_size", "exact")
            yield {
                **layer,
                "settings": settings.label,
                **{name: getattr(settings, name) for name in names},
                **price,
            }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> LayerEntry:
        parts = {
            "shape": tuple(values["shape"]),
            "shared_with": tuple(values["shared_with"]),
            "options": tuple(Option.from_dict(option) for option in values["options"]),
            "shares": shares_from(values.get("shares", ())),
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
    `call_ms`: milliseconds that all of them add to a step besides what they add if they store.
    """

    layers: tuple[str, ...]
    takers: tuple[str, ...]
    sources: tuple[str, ...]
    options: tuple[Option, ...]
    call_ms: float = 0.0

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Derivation:
        names = {key: tuple(values[key]) for key in ("layers", "takers", "sources")}
        options = tuple(Option.from_dict(option) for option in values["options"])
        return Derivation(**names, options=options, call_ms=float(values.get("call_ms", 0.0)))


_PROPORTIONAL_BITS = 3
_KIND = ("quant_groups", "ema_decay", "rounding", "drop", "rows", "allocation", "store")


def kind(settings: LayerSettings) -> Any:
    """Return what settings must have in common for the error of one to tell that of another."""
    return settings.exact or tuple([getattr(settings, name) for name in _KIND])


def _following(option: Option, priced: Sequence[Option]) -> Option:
    """Return `option`, known on the first batch only, with errors in proportion to those of one of `priced`.

    They are proportional to the errors of the tensors, which are sums over many elements and hardly vary. The
    option's own error on the first batch varies, and it may have been left out because that was high.
    """
    same = [other for other in priced if in_proportion(other.settings) == in_proportion(option.settings)]
    nearest = min(same or priced, key=lambda other: _distance(other.settings, option.settings)[::-2])
    if same and nearest.tensor_error:
        scale = option.tensor_error / nearest.tensor_error
    else:
        scale = option.ratios[0] / nearest.ratios[0] if nearest.ratios[0] else 1.0
    like = nearest.times(scale)
    return replace(option, gradient_error=like.gradient_error, ratios=like.ratios, screened=like.screened)


def in_proportion(settings: LayerSettings) -> Any:
    """Return what options have in common whose errors are in proportion to those of the stored tensors."""
    return kind(settings), min(settings.bits, _PROPORTIONAL_BITS)


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
SAMPLED = ((3, 0.25), (2, 0.25), (2, 0.1))
"""Bits and share of rows: 0.8, 0.5 and 0.2 bits per element. More rows err more than 2 bits of all rows."""

FIXED_BITS = (1, 2, 3, 4)
"""Bits per element of the derivative of an activation as one of a few fixed values."""


def full_grid() -> list[LayerSettings]:
    """Return every combination of `BITS` and `GROUP_SIZES`, `SAMPLED`, and fixed levels in `FIXED_BITS`."""
    every = [LayerSettings(level=2**bits, group_size=size) for bits in BITS for size in GROUP_SIZES]
    every += [LayerSettings(level=2**bits, store="levels") for bits in FIXED_BITS]
    return every + [LayerSettings(level=2**bits, rows=share) for bits, share in SAMPLED]


def fast_grid() -> list[LayerSettings]:
    """Return one option for each of `BITS`, in groups of 256 elements."""
    return [LayerSettings(level=2**bits, group_size=REFERENCE_GROUP) for bits in BITS]


def above_one_bit(grid: list[LayerSettings]) -> list[LayerSettings]:
    """Return the options of more than 1 bit; the grid if there are none."""
    # What others derive from has all rows, and is no derivative.
    grid = [option for option in grid if option.rows == 1 and option.store != "levels"]
    return [option for option in grid if option.bits > 1] or grid
