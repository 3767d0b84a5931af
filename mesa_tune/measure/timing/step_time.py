"""What each layer adds to the time of a training step when it compresses.

What is hard: a layer adds less time than a step varies by. So steps are cut into spans. A span ends where a
routed call returns, or where the backward of one begins. Spans of the same layer are compared: of a step that
stores exactly, and of steps that compress. All spans together are the step, so what a layer costs its
surroundings (caches, memory, Python) counts, too. That depends on its neighbours: a step that compresses half
of its layers takes longer than the mean of those that compress all and none. So there are steps that
compress either half, besides one that compresses all: layers share what all add, and the `overlap` says what
half of them adds beyond half of that. Other work on the machine only makes spans longer, and a short span
often escapes it: so all kinds of steps are taken in turn, and the first quartile of each time
counts. For seconds the whole machine may be slower: so a turn's times count relative to its plain step.
Quartiles of spans add up to less than a step (to 0.28 of a plain step where 0.37 was measured): so the
layers share what is missing of the steps as a whole. Cutting takes time: so steps that are cut are compared
with an exact step that is cut, too.

A machine that others use is never the same in two steps. So where turns differ, there are more of them; what
remains uncertain is the `spread` of all predicted times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mesa_tune.engine.observer import watch
from mesa_tune.measure.timing.deriving import with_deriving_times
from mesa_tune.measure.timing.heap import steady_heap
from mesa_tune.measure.timing.kinds import PACKED, TIMES_COMPRESSED, Kind, sampled_settings
from mesa_tune.measure.timing.option_times import form, means, smoothed
from mesa_tune.measure.timing.sampling import with_sampled_times
from mesa_tune.notice import Progress, unshown
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import MIN_ELEMENTS, LayerSettings
from mesa_tune.profiles.entries import LayerEntry
from mesa_tune.profiles.other_entries import with_rerun_times
from mesa_tune.profiles.prediction import unsteady
from mesa_tune.profiles.profile import Profile
from mesa_tune.workload.boundaries import StepEvents
from mesa_tune.workload.clock import Clock, Mark
from mesa_tune.workload.session import Session
from mesa_tune.workload.workload import Workload

TURNS, MOST_TURNS = 3, 6
"""Numbers of timed turns, after one that plans the calls: on a steady machine, and at most."""

_STEADY = 0.05
"""Spread of times at which no further turn is needed."""

SLOW_MS = 1000.0
"""Steps that take longer have one turn: they last too long for short disturbances to count."""

Spans = dict[str | None, float]
"""Milliseconds of one step by layer. None: the rest of the step."""

_SAMPLED = (Kind.MOST_ROWS, Kind.FEWEST_ROWS)
_SAVED = 0.1
"""Share of a plain step that compressing all layers saves at most besides encoding and decoding."""

_CUT = (Kind.CUT, *PACKED, Kind.DERIVING, *_SAMPLED)
_UNOBSERVED = StepEvents()

Turn = Mapping[Kind, Spans]
"""Spans of a step of each kind; of those that are not cut, one span that belongs to no layer."""


class StepTimes(NamedTuple):
    """Milliseconds of the plain step, and what is added to it.

    `routing`: by converting the model, with every layer exact; `added`: by each layer that compresses;
    `deriving`: likewise, where all derive what they can, empty if none can; `sampled`: likewise, by kinds of
    steps that leave out rows; `slices`: by losses that have slices; `rerun`: by all blocks that run again;
    `parts`: by all parts of blocks that run in slices. These three: None if there are none. `overlap`: what
    two halves of the layers add to steps of their own beyond what all add to one. `spread`: see `spread_of`.
    """

    plain: float
    routing: float
    added: Mapping[str, float]
    deriving: Mapping[str, float] = MappingProxyType({})
    slices: float | None = None
    rerun: float | None = None
    overlap: float = 0.0
    sampled: Mapping[Kind, Mapping[str, float]] = MappingProxyType({})
    parts: float | None = None
    spread: float = 0.0


@dataclass(frozen=True)
class StepTimer:
    """Times steps of a model in turn; `restore` restores its parameters before each turn."""

    workload: Workload
    model: nn.Module
    optimizer: Optimizer
    restore: Callable[[], None]
    clock: Clock

    def plain_ms(self, batch: Any, steps: int) -> float:
        """Return the median milliseconds of the plain step over `steps`, after another one."""
        self.restore()
        return statistics.median([self._step_ms(batch) for _ in range(steps + 1)][1:])

    @steady_heap()
    def in_turn(self, policies: Sequence[Policy], rounds: int) -> list[list[float]]:
        """Return the milliseconds of `rounds` rounds of steps, one under each policy in every round."""
        batch, sessions = self.workload.make_batch(), [self._session(policy) for policy in policies]
        times = []
        for _ in range(rounds):
            self.restore()
            times.append([self._step_ms(batch, session) for session in sessions])
        return times

    @steady_heap()
    def times(
        self, policies: Mapping[Kind, Policy], seconds: float, show: Progress = unshown, *, draw: int = 0
    ) -> StepTimes:
        """Return the times of steps under `policies` on the batch `draw`.

        After so many seconds no further turn begins.
        """
        batch, end = self.workload.make_batch(draw=draw), time.monotonic() + seconds
        sessions = {kind: self._session(policy) for kind, policy in policies.items()}
        sessions[Kind.CUT] = sessions[Kind.EXACT]
        show(f"step times, {len(sessions) + 1} kinds of steps", 0.0)
        plain = self._turn(batch, sessions)[Kind.PLAIN][None]  # this also plans the calls
        count, turns = (1 if plain > SLOW_MS else TURNS), list[Turn]()
        while not turns or (len(turns) < count and time.monotonic() < end):
            show(f"step times, turn {len(turns) + 1} of {count}", len(turns) / count)
            turns.append(self._turn(batch, sessions))
            if TURNS <= len(turns) == count < MOST_TURNS and spread_of(turns) > _STEADY:
                count += 1
        return summarized(turns)

    def _turn(self, batch: Any, sessions: Mapping[Kind, Session]) -> Turn:
        self.restore()
        turn: dict[Kind, Spans] = {Kind.PLAIN: {None: self._step_ms(batch)}}
        for kind, session in sessions.items():
            is_cut = kind in _CUT
            turn[kind] = self._spans(batch, session) if is_cut else {None: self._step_ms(batch, session)}
        return turn

    def _session(self, policy: Policy) -> Session:
        return Session.of(self.model, policy, min_elements=MIN_ELEMENTS)

    def _spans(self, batch: Any, session: Session) -> Spans:
        cutter = _Cutter(self.clock)
        self._step_ms(batch, session, cutter)
        return cutter.spans()

    def _step_ms(self, batch: Any, session: Session | None = None, cutter: _Cutter | None = None) -> float:
        """Take a step, of the plain model without a session; return its milliseconds."""
        stepper = self.workload.stepper(self.optimizer)
        installed, forward = (
            (session.installed(), session.forward) if session else (nullcontext(), nullcontext)
        )
        cutting = cutter.cutting() if cutter else nullcontext()
        with installed, self.workload.same_random_state(), cutting:
            start = self.clock.now()
            stepper.run(self.model, batch, forward, cutter or _UNOBSERVED)
            return self.clock.ms([start, self.clock.now()])[0]


def summarized(turns: Sequence[Turn]) -> StepTimes:
    """Return first quartiles over turns, and their differences; of whole steps, medians over turns."""
    wholes = [{kind: sum(spans.values()) for kind, spans in turn.items()} for turn in turns]
    plain = _quartile([ms[Kind.PLAIN] for ms in wholes])
    paces = [plain / ms[Kind.PLAIN] for ms in wholes]
    whole = {
        kind: statistics.median([pace * ms[kind] for pace, ms in zip(paces, wholes, strict=True)])
        for kind in wholes[0]
    }
    more = {kind: ms - whole[Kind.CUT if kind in _CUT else Kind.EXACT] for kind, ms in whole.items()}

    def added(*kinds: Kind) -> dict[str, float]:
        cut = [[turn[kind] for kind in (Kind.CUT, *kinds)] for turn in turns]
        return _added(cut, paces, sum(more[kind] for kind in kinds))

    packed = added(*[kind for kind in PACKED if kind in whole])
    return StepTimes(
        plain,
        whole[Kind.EXACT] - plain,
        _together({name: ms / TIMES_COMPRESSED for name, ms in packed.items()}, more.get(Kind.ALL)),
        added(Kind.DERIVING) if Kind.DERIVING in whole else {},
        more.get(Kind.TILED),
        more.get(Kind.RERUN),
        _overlap(more),
        {kind: added(kind) for kind in _SAMPLED if kind in whole},
        more.get(Kind.SLICED),
        spread_of(turns),
    )


def spread_of(turns: Sequence[Turn]) -> float:
    """Return by which share of a plain step the times of steps are uncertain, in the median of all kinds.

    That is the width of the middle half of turns, over the root of their number. Times count relative to the
    plain step of their turn, as in `summarized`. 0 for one turn, which tells nothing.
    """
    ratios = [
        [sum(turn[kind].values()) / turn[Kind.PLAIN][None] for turn in turns]
        for kind in turns[0]
        if kind is not Kind.PLAIN
    ]
    widths = [np.subtract(*np.quantile(each, (0.75, 0.25))) for each in ratios]
    return float(np.median(widths)) / math.sqrt(len(turns))


def _together(added: Mapping[str, float], every: float | None) -> Mapping[str, float]:
    """Return `added` in the same proportions with the sum `every`: what all layers add to one step."""
    total = sum(added.values())
    factor = every / total if every is not None and every > 0 < total else 1.0
    return {name: factor * ms for name, ms in added.items()}


def _overlap(more: Mapping[Kind, float]) -> float:
    """Return the `overlap` of steps that take so much longer than exact ones.

    It is at most half of what all layers add: above, the last layer that compresses would save time.
    """
    every = more.get(Kind.ALL, 0.0)
    halves = more.get(Kind.HALF, 0.0) + more.get(Kind.OTHER_HALF, 0.0)
    return min(max(0.0, halves - every), max(0.0, every / 2))


def _added(turns: Sequence[Sequence[Spans]], paces: Sequence[float], whole: float) -> dict[str, float]:
    """Return what each layer adds to steps in which it compresses, the sum over the kinds of these steps.

    `turns`: of each an exact step, and one of each kind. `paces`: how much faster than each turn the machine
    is when it is at its fastest. `whole`: what steps of all kinds take longer than exact ones. What spans
    miss of it belongs to layers by their share of time.
    """
    layers = dict.fromkeys(
        name for _, *packed in turns for spans in packed for name in spans if name is not None
    )
    times = {
        name: [
            _quartile([spans.get(name, 0.0) * pace for spans, pace in zip(steps, paces, strict=True)])
            for steps in zip(*turns, strict=True)
        ]
        for name in layers
    }
    added = {name: sum(ms - exact for ms in packed) for name, (exact, *packed) in times.items()}
    missed = (whole - sum(added.values())) / max(1e-9, sum(sum(packed) for _, *packed in times.values()))
    return {name: added[name] + missed * sum(packed) for name, (_, *packed) in times.items()}


def _quartile(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.25))


class _Cut(NamedTuple):
    """The end of a span, and the beginning of the next one: the time between belongs to none.

    `layer`: whose call returns, or whose backward begins.
    """

    layer: str | None
    backward: bool
    end: Mark
    begin: Mark


class _Cutter(StepEvents):
    """Cuts one step into spans."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.cuts: list[_Cut] = []

    def _cut(self, layer: str | None, backward: bool = False, output: Any = None) -> None:
        end = self.clock.now()
        node = _node(output)
        if node is not None:
            node.register_prehook(lambda _: self._cut(layer, True))
        self.cuts.append(_Cut(layer, backward, end, self.clock.now()))

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Cut where routed calls of the body return, where their backwards begin, and around the body."""
        self._cut(None)
        before, watch.returned = watch.returned, lambda layer, output: self._cut(layer, False, output)
        try:
            yield
        finally:
            watch.returned = before
            self._cut(None)

    def backward_ended(self) -> None:
        """Begin a span that belongs to no layer: the optimizer's step."""
        self._cut(None)

    def spans(self) -> Spans:
        """Return the time of all spans."""
        marks = [mark for cut in self.cuts for mark in (cut.end, cut.begin)][1:-1]
        spans: Spans = defaultdict(float)
        for (first, second), ms in zip(pairwise(self.cuts), self.clock.ms(marks)[::2], strict=True):
            spans[_layer_of(first, second)] += ms
        return spans


def _node(output: Any) -> Any:
    """Return the autograd node of the first tensor in `output` that has one."""
    leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)
    nodes = (leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor))
    return next((node for node in nodes if node is not None), None)


def _layer_of(first: _Cut, second: _Cut) -> str | None:
    """Return the layer of the span between two cuts: its backward has begun, or its call returns."""
    if first.backward:
        return first.layer
    return None if second.backward else second.layer


def with_times(profile: Profile, times: StepTimes, settings: LayerSettings) -> Profile:
    """Return the profile with these times, measured under `settings`, and smoother times of options."""
    hooked, layers = profile.timeline.hooked, paced(smoothed(profile.layers), times, settings)
    # A search must not choose among equal blocks by what other work on the machine did to some of them.
    alike = means([_call_ms(one, times, settings, hooked) for one in layers], map(form, layers))
    layers = [replace(one, call_ms=ms) for one, ms in zip(layers, alike, strict=True)]
    shares, tiled = sampled_settings(profile), profile.tiled
    if tiled is not None:
        parts = with_rerun_times(tiled.modules, times.parts, settings.bits)
        tiled = replace(tiled, added_ms=times.slices if tiled.losses else 0.0, modules=parts)
    layers = with_sampled_times(layers, {shares[kind]: ms for kind, ms in times.sampled.items()})
    return replace(
        profile,
        step_ms=times.plain,
        routing_ms=times.routing,
        overlap_ms=times.overlap,
        time_spread=times.spread,
        notes=(*profile.notes, *unsteady(times.spread)),
        tiled=tiled,
        layers=tuple(layers),
        derivations=tuple(with_deriving_times(profile, layers, times.deriving, settings)),
        modules=with_rerun_times(profile.modules, times.rerun, settings.bits),
    )


def paced(layers: Sequence[LayerEntry], times: StepTimes, settings: LayerSettings) -> list[LayerEntry]:
    """Return the layers with times of options that are no longer than steps allow.

    Options are timed alone, and some time before steps. Compressing saves a step `_SAVED` of its time at most
    (memory that is not read). So where encoding and decoding in steps under `settings` add up to more than
    what these steps take longer and this, the machine was slower when options were timed, and all of them are
    as much shorter.
    """
    alone = sum(
        layer.options[position].ms
        for layer in layers
        if layer.name in times.added and (position := layer.positions.get(settings)) is not None
    )
    most = max(0.0, sum(times.added.values()) + _SAVED * times.plain)
    if alone <= most:
        return list(layers)
    return [
        replace(
            layer,
            options=tuple(
                replace(
                    option,
                    encode_ms=option.encode_ms * most / alone,
                    decode_ms=option.decode_ms * most / alone,
                )
                for option in layer.options
            ),
        )
        for layer in layers
    ]


def _call_ms(
    layer: LayerEntry, times: StepTimes, settings: LayerSettings, hooked: Sequence[str]
) -> float | None:
    """Return what `layer` adds to a step besides encoding and decoding; None if unknown."""
    always_exact = all(option.settings.exact for option in layer.options)
    if layer.name in hooked or always_exact or layer.stored_like:  # hooks do nothing else
        return 0.0
    added, position = times.added.get(layer.name), layer.positions.get(settings)
    if added is None or position is None:
        return None
    return added - layer.options[position].ms
