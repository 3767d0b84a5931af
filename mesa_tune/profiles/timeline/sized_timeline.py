"""A timeline at one batch size: which bytes are alive in each slot, under any assignment of settings.

What is hard: a search asks this for thousands of policies. So everything that does not depend on the policy
is an array, prepared once, and a policy takes a few operations on whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mesa_tune.policy.settings import EXACT
from mesa_tune.profiles.prediction import GRADIENTS, SAVED, STATIC, WORKING, Peak
from mesa_tune.profiles.timeline.distinct import Assignment, DistinctSettings, Incidence
from mesa_tune.profiles.timeline.packed_sizes import case_shares, in_effect, kept_bytes, mixed, settings_bytes
from mesa_tune.profiles.timeline.step_arrays import Bytes, Flags, SizedSpan, SizedWork, SlotName, StepArrays

__all__ = ["SizedSpan", "SizedTimeline", "SizedWork", "SlotName", "StepBytes"]


class SizedTimeline(StepArrays):
    """A timeline at one batch size."""

    @cached_property
    def without_reruns(self) -> SizedTimeline:
        """The same step, in which no module runs again: with half of the spans, so in less time."""
        spans, sizes = [span for span in self.spans if not span.again], (self.batch_size, self.static_kinds)
        return SizedTimeline(*sizes, self.slots, (self.once, None), spans, self.traits, self.serving)

    def under(self, assignment: Assignment) -> StepBytes:
        """Return the bytes of the step under `assignment`."""
        return StepBytes(self, assignment)

    def live(self, assignment: Assignment) -> Bytes:
        """Return the bytes needed in each slot, static ones included; shape [slots]."""
        return self.under(assignment).live

    def peak_bytes(self, assignment: Assignment) -> int:
        """Return the most bytes needed at once in the step."""
        return self.under(assignment).peak_bytes

    def saved_bytes(self, assignment: Assignment) -> int:
        """Return the bytes of all spans that are alive when the forward ends; of several, the most."""
        return self.under(assignment).saved_bytes


class StepBytes:
    """The bytes of a step at one batch size under one assignment."""

    def __init__(self, sized: StepArrays, assignment: Assignment) -> None:
        self.sized, self.assignment = sized, assignment
        self.distinct = DistinctSettings.of(assignment, sized.names)
        traits, classes = sized.layer_classes
        # Few pairs of settings and traits occur: find the settings in effect for these, not for each layer.
        of_layer = self.distinct.positions * len(traits) + classes
        pairs = np.flatnonzero(np.bincount(of_layer))
        numbers = (divmod(pair, len(traits)) for pair in pairs.tolist())
        effective = [in_effect(self.distinct.values[number], traits[kind]) for number, kind in numbers]
        objects = {id(settings): settings for settings in effective}
        number = {key: position for position, key in enumerate(objects)}
        self.settings = list(objects.values())
        stored = np.empty(len(self.distinct.values) * len(traits), dtype=np.int64)
        stored[pairs] = [number[id(settings)] for settings in effective]
        self.stored = stored[of_layer]
        self.used = np.array([not settings.exact for settings in self.settings], dtype=np.bool_)[self.stored]

    @cached_property
    def spans(self) -> Bytes:
        """The bytes of each span; 0 if it is never alive."""
        sized, used, total = self.sized, self.used, self.sized.always + self._coded(settings_bytes)
        alive = sized.plain.any_pair(~used[sized.plain.layers] & self._runs(sized.plain))
        alive |= sized.beside.any_pair(used[sized.beside.layers] & self._runs(sized.beside))
        alive |= sized.whole.any_pair(self._runs(sized.whole))
        return np.asarray(total + np.where(alive, sized.sizes, 0), dtype=np.int64)

    @cached_property
    def kept(self) -> Bytes:
        """Those bytes of each span that stay from step to step."""
        if not any(settings.ema_decay for settings in self.settings):
            return np.zeros_like(self.sized.always)
        return self._coded(kept_bytes)

    def _coded(self, bytes_of: Callable[..., int]) -> Bytes:
        """Return the sums of these bytes of all packed copies of each span."""
        sized, total = self.sized, np.zeros_like(self.sized.always)
        stores = self.used[sized.coded.layers] & self._runs(sized.coded) & ~self.deriving
        rows, stored = sized.coded.rows[stores], self.stored[sized.coded.layers[stores]]
        sizes = sized.packed_sizes.under(self.settings, bytes_of)[stored, sized.packed_sizes.positions[rows]]
        # Layers with equal settings share a copy.
        copies, first = np.unique(rows * len(self.settings) + stored, return_index=True)
        np.add.at(total, copies // len(self.settings), sizes[first])
        return total

    @cached_property
    def inside(self) -> Flags:
        """Whether a module around each layer runs again; shape [layers]."""
        sized = self.sized
        if not sized.modules:
            return np.zeros(len(sized.names), dtype=np.bool_)
        flags = [*(name in self.reruns for name in sized.modules), False]
        return np.array(flags, dtype=np.bool_)[sized.blocks]

    @cached_property
    def reruns(self) -> set[str]:
        """The modules that run again."""
        settings = {name: self.assignment.get(name, EXACT) for name in self.sized.modules}
        return {name for name, used in settings.items() if used.store == "recompute" and not used.exact}

    def _runs(self, incidence: Incidence) -> Flags:
        """Return for each pair of span and layer whether the span is of the layer's only or second run."""
        same = self.inside[incidence.layers] == self.sized.spans_again[incidence.rows]
        return np.asarray(same, dtype=np.bool_)

    @cached_property
    def asks(self) -> Flags:
        """Whether each layer compresses and derives what it can; shape [layers]."""
        derives = self.distinct.flags(lambda settings: settings.store == "derive")
        return np.asarray(self.used & derives, dtype=np.bool_)

    @cached_property
    def deriving(self) -> Flags:
        """Whether the layer derives the span, for each pair of a packed span and its layer."""
        sized = self.sized
        if not self.asks.any():
            return np.zeros(len(sized.coded.rows), dtype=np.bool_)
        saves_levels = self.distinct.flags(lambda settings: settings.store == "levels")
        rebuilds = self.used & ~saves_levels
        missing = sized.sources.any_pair(~rebuilds[sized.sources.layers] | ~self._runs(sized.sources))
        deriving = (
            sized.can_derive
            & self.asks[sized.coded.layers]
            & self._runs(sized.coded)
            & ~missing[sized.coded.rows]
        )
        pairs, rows = sized.served
        before = None
        while before is None or (before != deriving).any():  # a layer that ends a chain leaves the one before
            before = deriving.copy()
            derived = sized.coded.any_pair(deriving)
            needed = np.bincount(pairs, weights=derived[rows], minlength=len(deriving)) > 0
            deriving &= needed | ~sized.serves
        return deriving

    @property
    def derivers(self) -> set[str]:
        """The layers that derive something."""
        return {self.sized.names[layer] for layer in self.sized.coded.layers[self.deriving].tolist()}

    @cached_property
    def links(self) -> Flags:
        """Whether each layer derives, or others derive from what it saves; shape [layers]."""
        sized, linked = self.sized, np.zeros(len(self.sized.names), dtype=np.bool_)
        linked[sized.coded.layers[self.deriving]] = True
        derived = sized.coded.any_pair(self.deriving)
        linked[sized.sources.layers[derived[sized.sources.rows]]] = True
        return linked

    @property
    def linked(self) -> frozenset[str]:
        """The layers that derive, and those from whose saved tensors they do."""
        return frozenset(self.sized.names[layer] for layer in np.flatnonzero(self.links).tolist())

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """The share of each of `CASES` in the work of each slot; shape [slots, cases]."""
        # By the settings asked for: a small layer's slot covers calls of hooks after it. But the layers whose
        # channels `quant_groups` does not divide are exact.
        values, used = self.distinct.values, self.used | self.sized.are_small
        shares = np.stack(
            [case_shares(settings, derives=linked) for linked in (False, True) for settings in values]
        )
        rows = np.append(self.distinct.positions * used + len(values) * self.links, 0)  # the first is EXACT
        return np.asarray(shares[rows[self.sized.slot_layers]])

    @cached_property
    def work(self) -> Bytes:
        """The bytes needed in each slot without static ones and spans; shape [slots]."""
        work = self._mixed(self.sized.once.live, self.sized.again and self.sized.again.live)
        in_slices = any(self.assignment[name].tile > 1 for name in self.reruns)
        return work + self._left if self.reruns and not in_slices else work

    @cached_property
    def _left(self) -> Bytes:
        """What modules leave for the first runs of later ones, beside the step of none or all; [slots].

        A module that does not run again leaves it for one that does, and the other way round. Not known of
        modules in slices.
        """
        sized = self.sized
        more, by_others, by_reruns = np.zeros(len(sized.modules) + 1, dtype=np.int64), 0, 0
        for module, left in sized.left:
            runs_again = sized.modules[module] in self.reruns
            more[module] = by_others if runs_again else -by_reruns
            by_others, by_reruns = by_others + left * (not runs_again), by_reruns + left * runs_again
        return more[sized.first_run]

    def _mixed(self, once: Bytes, again: Bytes | None) -> Bytes:
        """Return for each slot the bytes of its cases; `once`, `again`: those of each; [slots, cases]."""
        sizes = (
            once if again is None or not self.inside.any() else once + self.again[:, None] * (again - once)
        )
        return mixed(sizes, self.shares)

    @cached_property
    def again(self) -> NDArray[np.float64]:
        """Which part of the bytes of each slot is that of the step in which all modules run again; [slots].

        All or nothing for a layer inside a module; for the others, the share of modules that run again.
        """
        sized = self.sized
        outside = sized.blocks == len(sized.modules)
        share = len(self.reruns) / max(1, len(sized.modules))
        return np.append(np.where(outside, share, self.inside), share)[sized.slot_layers]

    @cached_property
    def live(self) -> Bytes:
        """The bytes needed in each slot, static ones included; shape [slots]."""
        changes = np.zeros(len(self.sized.slots) + 1, dtype=np.int64)
        births, deaths = self.sized.edges
        born = self.spans - self.kept
        np.add.at(changes, births, born)
        np.subtract.at(changes, deaths, born)
        always = self.sized.static + int(self.kept.sum())
        return np.asarray(always + self.work + np.cumsum(changes[:-1]), dtype=np.int64)

    @property
    def peak_bytes(self) -> int:
        """The most bytes needed at once in the step."""
        return int(self.live.max(initial=self.sized.static))

    @property
    def without_gradients(self) -> int:
        """The most bytes before the optimizer's step, without gradients of the step."""
        sized = self.sized
        before = np.array([slot.phase != "step" for slot in sized.slots], dtype=bool)
        alive = self.live - np.minimum(sized.once.gradients, self.work)
        return int(alive[before].max(initial=sized.static))

    @property
    def peak(self) -> Peak:
        """The first slot with the most bytes, and their kinds."""
        sized = self.sized
        if not sized.slots:
            return Peak(None, "forward", sized.static_kinds)
        index = int(self.live.argmax())
        slot, (births, deaths) = sized.slots[index], sized.edges
        alive = (births <= index) & (index < deaths)
        working = int(self.work[index])  # below 0: of what is saved, some was never written
        saved = int(np.where(alive, self.spans, self.kept).sum()) + min(0, working)
        work = sized.again if sized.again and self.again[index] == 1 else sized.once
        gradients = min(int(work.gradients[index]), max(0, working))
        born = {GRADIENTS: gradients, SAVED: saved, WORKING: max(0, working) - gradients}
        kinds = {
            kind: sized.static_kinds.get(kind, 0) + born.get(kind, 0) for kind in (*STATIC, SAVED, WORKING)
        }
        return Peak(slot.layer, slot.phase, kinds)

    @property
    def saved_bytes(self) -> int:
        """The bytes of all spans that are alive when the forward ends; of several, the most."""
        return int((self.sized.saved_after @ (self.spans - self.kept)).max() + self.kept.sum())
