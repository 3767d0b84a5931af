"""Memory through one training step under any policy, without running it.

The hard part is that a policy changes more than sizes. A layer that compresses frees PyTorch's tensor only
where every other keeper of its storage compresses too; sharers of equal settings pay for one packed copy,
of unequal ones for several; and encoding and decoding have working memory of their own at other moments
than the plain step. So the step is a row of slots, the kept things are spans over slots, each with its own
rule for being alive, and every size is known at two batch sizes, which gives all others on a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mesa_tune.codecs import CODECS, Spec, fitting_size, memory_bytes
from mesa_tune.errors import BudgetError
from mesa_tune.policy.settings import MIN_ELEMENTS, LayerSettings

Pair = tuple[int, int]
Assignment = Mapping[str, LayerSettings]
"""Layer name -> settings; a layer that is not in it is stored exactly."""

PHASES: Final = ("forward", "backward", "step")
KINDS: Final = ("coded", "side", "plain", "always")


@dataclass(frozen=True)
class Slot:
    """A moment of the step: most bytes alive besides static and kept things, at the two batch sizes.

    `exact` where `layer` is stored exactly, `packed` where it is compressed (encode temporaries and decoded
    copies included); equal where there is no layer. `derived` where it makes tensors again from what others
    keep, or others do from what it keeps; None: as `packed`.
    """

    layer: str | None
    phase: str
    exact: Pair
    packed: Pair
    derived: Pair | None = None


@dataclass(frozen=True)
class Kept:
    """A thing alive in slots `first` to `last`, both included, if its kind says so.

    `coded`: `size` elements; a packed copy for each distinct settings among its compressed layers, or, up
    to `min_elements` elements, `whole` bytes once. `side`: `size` bytes that its compressed layer
    keeps exactly. `plain`: `size` bytes that PyTorch keeps, while at least one of its layers is exact;
    `itemsize` those of an element.
    `always`: `size` bytes, whatever the policy. `samples`: the extent of a coded tensor's first dimension.
    `sources`: the layers from whose kept tensors a coded one can be made again, if all of them compress; it
    then costs nothing for a layer (other than those) with `store: derive`.
    `extents`: for each layer, how many elements decide whether its call compresses, or, of a plain thing,
    lets go of it: up to `min_elements` it does not. `whole`: the bytes that a coded tensor of so few elements
    holds, maybe as a view; 0 where a plain thing stays for it; None: `size * itemsize`.
    """

    kind: str
    layers: tuple[str, ...]
    size: Pair
    itemsize: int
    first: int
    last: int
    samples: Pair = (1, 1)
    sources: tuple[str, ...] = ()
    extents: tuple[Pair, ...] = ()
    whole: Pair | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, but got {self.kind!r}")


@dataclass(frozen=True)
class Timeline:
    """One training step, traced at two batch sizes; every size is a pair, in the order of `batch_sizes`.

    `static`: weights, gradients that exist when the step begins, optimizer state, buffers, batch. `hooked`:
    layers stored by hooks, which never get fewer than 256 levels. `serving`: layers that derive what they
    keep only if others derive from them, too; else they keep something else (an activation its derivative).
    `rows`: by layer, the elements of a row where its groups end with rows.
    """

    batch_sizes: Pair
    static: Pair
    slots: tuple[Slot, ...]
    kept: tuple[Kept, ...]
    hooked: tuple[str, ...] = ()
    min_elements: int = MIN_ELEMENTS
    serving: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)

    def saved_bytes(self, assignment: Assignment, batch_size: int | None = None) -> int:
        """Bytes of all kept things alive when the forward ends."""
        return self.at(batch_size).saved_bytes(assignment)

    def live(self, assignment: Assignment, batch_size: int | None = None) -> NDArray[np.int64]:
        """Bytes alive in each slot, static ones included; shape [slots]."""
        return self.at(batch_size).live(assignment)

    def peak_bytes(self, assignment: Assignment, batch_size: int | None = None) -> int:
        """The highest number of bytes alive in the step."""
        return self.at(batch_size).peak_bytes(assignment)

    def at(self, batch_size: int | None = None) -> SizedTimeline:
        """The timeline at one batch size (default: the first traced one).

        BudgetError where the size was not traced and two equal traced sizes give no line to follow.
        """
        wanted = self.batch_sizes[0] if batch_size is None else batch_size
        if wanted not in self._known:
            self._known[wanted] = SizedTimeline(self, wanted)
        return self._known[wanted]

    @cached_property
    def _known(self) -> dict[int, SizedTimeline]:
        return {}

    def with_scraps(self) -> list[str]:
        """The layers stored by hooks some of whose tensors are too small to be encoded at the first batch
        size: each may be a view, and so hold a larger storage.
        """
        small = (item for item in self.kept if item.kind == "coded" and 0 < item.size[0] <= self.min_elements)
        return sorted({layer for item in small for layer in item.layers} & set(self.hooked))

    def scaled(self, pair: Pair, batch_size: int) -> int:
        """A size at `batch_size`: on the line through the pair, in whole units, never below 0."""
        low, high = self.batch_sizes
        if batch_size == low:
            return pair[0]
        if low == high:
            raise BudgetError(
                f"batch size {batch_size}: the profile was traced at batch size {low} alone, so it cannot be "
                f"planned for\nprofile again with --batch-size {batch_size}, or plan for {low}"
            )
        return max(0, pair[0] + round((pair[1] - pair[0]) * (batch_size - low) / (high - low)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "batch_sizes": self.batch_sizes,
            "static": self.static,
            "slots": [vars(slot) for slot in self.slots],
            "kept": [vars(item) for item in self.kept],
            "hooked": self.hooked,
            "min_elements": self.min_elements,
            "serving": self.serving,
            "rows": self.rows,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Timeline:
        """The timeline that `to_dict` made `values` of. KeyError, TypeError, ValueError for others."""
        return Timeline(
            batch_sizes=_pair(values["batch_sizes"]),
            static=_pair(values["static"]),
            slots=tuple(_slot(**slot) for slot in values["slots"]),
            kept=tuple(_kept(**item) for item in values["kept"]),
            hooked=tuple(values["hooked"]),
            min_elements=int(values["min_elements"]),
            serving=tuple(values.get("serving", ())),
            rows={layer: int(row) for layer, row in values.get("rows", {}).items()},
        )


class SizedTimeline:
    """A timeline at one batch size: sizes as arrays, ready to be summed under many assignments."""

    def __init__(self, timeline: Timeline, batch_size: int) -> None:
        self.timeline = timeline
        self.batch_size = batch_size
        self.static = timeline.scaled(timeline.static, batch_size)
        self.exact = np.array(
            [timeline.scaled(slot.exact, batch_size) for slot in timeline.slots], dtype=np.int64
        )
        self.packed = np.array(
            [timeline.scaled(slot.packed, batch_size) for slot in timeline.slots], dtype=np.int64
        )
        self.derived = np.array(
            [timeline.scaled(slot.derived or slot.packed, batch_size) for slot in timeline.slots],
            dtype=np.int64,
        )
        self.sizes = [timeline.scaled(item.size, batch_size) for item in timeline.kept]
        self.small = self._small()
        self.kept = [self._decided(item) for item in timeline.kept]
        self.derivable = [
            item
            for item, size in zip(self.kept, self.sizes, strict=True)
            if item.sources and size > timeline.min_elements
        ]
        self.forward_end = max(
            (n for n, slot in enumerate(timeline.slots) if slot.phase == "forward"), default=-1
        )
        self._hooked = frozenset(timeline.hooked)
        self._serving = frozenset(timeline.serving)

    def _small(self) -> frozenset[str]:
        """Layers all of whose calls are too small to compress: they go PyTorch's way, whatever the policy."""
        largest: dict[str, int] = {}
        for item, size in zip(self.timeline.kept, self.sizes, strict=True):
            counts = self._counts(item) or [size] * len(item.layers)
            if item.kind == "coded" or (item.kind == "side" and item.extents):
                for name, count in zip(item.layers, counts, strict=True):
                    largest[name] = max(largest.get(name, 0), count)
        return frozenset(name for name, count in largest.items() if count <= self.timeline.min_elements)

    def _counts(self, item: Kept) -> list[int]:
        return [self.timeline.scaled(extent, self.batch_size) for extent in item.extents]

    def _decided(self, item: Kept) -> Kept:
        """`item` as it is at this batch size: calls that are too small keep what PyTorch keeps."""
        large = [count > self.timeline.min_elements for count in self._counts(item)]
        if all(large):
            return item
        if item.kind == "plain":
            return replace(item, kind="always")
        layers = tuple(layer for layer, flag in zip(item.layers, large, strict=True) if flag)
        return replace(item, layers=layers)

    def live(self, assignment: Assignment) -> NDArray[np.int64]:
        """Bytes alive in each slot, static ones included; shape [slots]."""
        used = self.compressed(assignment)
        changes = [0] * (len(self.timeline.slots) + 1)
        for item, size in zip(self.kept, self.sizes, strict=True):
            count = self.kept_bytes(item, size, used)
            changes[item.first] += count
            changes[item.last + 1] -= count
        kept = np.cumsum(np.array(changes[:-1], dtype=np.int64))
        return np.asarray(self.static + self.work(assignment) + kept, dtype=np.int64)

    def work(self, assignment: Assignment) -> NDArray[np.int64]:
        """Bytes alive in each slot besides static and kept things; shape [slots]."""
        # By what was asked for: a slot reaches to the next layer's, over calls with settings of their own.
        asked = {name for name, settings in assignment.items() if not settings.exact}
        links = self.links(self.compressed(assignment))
        packs, derives = (
            np.array([slot.layer in names for slot in self.timeline.slots], dtype=bool)
            for names in (asked, links)
        )
        return np.where(derives, self.derived, np.where(packs, self.packed, self.exact))

    def links(self, used: Mapping[str, LayerSettings]) -> set[str]:
        """The layers that make kept tensors again, and those from whose they do."""
        found: set[str] = set()
        for item in self.derivable:
            derivers = self.derivers(item, used)
            found |= {*derivers, *item.sources} if derivers else set()
        return found

    def derivers(self, item: Kept, used: Mapping[str, LayerSettings]) -> list[str]:
        """The keepers of `item`, one of `derivable`, that make it again instead of storing it."""
        if not item.sources or any(source not in used for source in item.sources):
            return []
        return [
            layer
            for layer in item.layers
            if layer in used and used[layer].store == "derive" and layer not in item.sources
            if layer not in self._serving or self._serves(layer, item, used)
        ]

    def _serves(self, layer: str, item: Kept, used: Mapping[str, LayerSettings]) -> bool:
        """Whether a later tensor than `item` is derived from what `layer` keeps."""
        later = (one for one in self.derivable if one.first > item.first and layer in one.sources)
        return any(self.derivers(one, used) for one in later)

    def peak_bytes(self, assignment: Assignment) -> int:
        """The highest number of bytes alive in the step."""
        return int(self.live(assignment).max(initial=self.static))

    def saved_bytes(self, assignment: Assignment) -> int:
        """Bytes of all kept things alive when the forward ends."""
        used = self.compressed(assignment)
        pairs = zip(self.kept, self.sizes, strict=True)
        return sum(self.kept_bytes(item, size, used) for item, size in pairs if self.is_saved(item))

    def is_saved(self, item: Kept) -> bool:
        """True if `item`, where alive, is alive between forward and backward."""
        return item.first <= self.forward_end < item.last

    def compressed(self, assignment: Assignment) -> dict[str, LayerSettings]:
        """The layers that do not store exactly, with the settings that take effect."""
        return {
            name: used
            for name, settings in assignment.items()
            if name not in self.small and not (used := self._used(name, settings)).exact
        }

    def _used(self, name: str, settings: LayerSettings) -> LayerSettings:
        return settings.hooked if name in self._hooked else settings

    def kept_bytes(self, item: Kept, size: int, used: Mapping[str, LayerSettings]) -> int:
        """Bytes of `item`, `size` large at this batch size, while it is alive; 0 where it never is."""
        if item.kind == "coded":
            return self._coded_bytes(item, size, used)
        if item.kind == "plain":
            return size if any(layer not in used for layer in item.layers) else 0
        if item.kind == "side":
            return size if any(layer in used for layer in item.layers) else 0
        return size

    def _coded_bytes(self, item: Kept, size: int, used: Mapping[str, LayerSettings]) -> int:
        is_small = size <= self.timeline.min_elements
        derivers = [] if is_small else self.derivers(item, used)
        distinct = {
            within(stored_as(used[layer]), self.timeline.rows.get(layer, 0))
            for layer in item.layers
            if layer in used and layer not in derivers
        }
        if is_small:
            return self._whole(item, size) if distinct else 0
        samples = self.timeline.scaled(item.samples, self.batch_size)
        return sum(settings_bytes(size, settings, item.itemsize, samples) for settings in distinct)

    def _whole(self, item: Kept, size: int) -> int:
        """Bytes that a coded tensor holds if it stays as it is."""
        if item.whole is None:
            return size * item.itemsize
        return self.timeline.scaled(item.whole, self.batch_size)


@lru_cache(maxsize=1 << 12)
def stored_as(settings: LayerSettings) -> LayerSettings:
    """How a layer stores what it has to store itself."""
    return replace(settings, store="quantize") if settings.store == "derive" else settings


@lru_cache(maxsize=1 << 12)
def within(settings: LayerSettings, row: int) -> LayerSettings:
    """How a layer stores rows of `row` elements if its groups end where these do; 0: they do not."""
    if settings.group_size is None or not row:
        return settings
    return replace(settings, group_size=fitting_size(settings.group_size, row))


@lru_cache(maxsize=1 << 16)
def settings_bytes(elements: int, settings: LayerSettings, itemsize: int = 4, samples: int = 1) -> int:
    """Bytes on the device of a packed tensor of this many elements, `samples` along its first dimension.

    What its codec remembers from step to step counts, too.
    """
    spec = Spec.of(settings, 0)
    if spec is None:
        return elements * itemsize
    shape = (samples, elements // samples) if samples and elements % samples == 0 else (1, elements)
    return CODECS[spec.codec].packed_bytes(shape, spec, itemsize) + memory_bytes(shape, spec)


def _pair(values: Any) -> Pair:
    first, second = values
    return int(first), int(second)


def _slot(layer: str | None, phase: str, exact: Any, packed: Any, derived: Any = None) -> Slot:
    return Slot(layer, phase, _pair(exact), _pair(packed), None if derived is None else _pair(derived))


def _kept(
    kind: str,
    layers: Any,
    size: Any,
    itemsize: int,
    first: int,
    last: int,
    samples: Any = (1, 1),
    sources: Any = (),
    extents: Any = (),
    whole: Any = None,
) -> Kept:
    return Kept(
        kind,
        tuple(layers),
        _pair(size),
        int(itemsize),
        int(first),
        int(last),
        _pair(samples),
        tuple(sources),
        tuple(map(_pair, extents)),
        None if whole is None else _pair(whole),
    )
