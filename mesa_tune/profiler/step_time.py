"""What each layer adds to the time of a training step when it compresses.

What is hard: a layer adds less time than a step varies by. So steps are cut into spans. A span ends where a
routed call returns, or where the backward of one begins. Spans of the same layer are compared: of a step that
stores exactly, and of steps that compress. These steps and a plain one are taken in turn, and times are
relative to the plain step, because the machine's speed changes. All spans together are the step, so what a
layer costs its surroundings (caches, memory, Python) counts, too. That depends on its neighbours: a step that
compresses half of its layers takes longer than the mean of those that compress all and none. So there are
steps that compress either half, besides one that compresses all.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mesa_tune.engine.observer import watch
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, MIN_ELEMENTS, LayerSettings
from mesa_tune.profiler.entries import REFERENCE_GROUP, LayerEntry, comparable_group_size
from mesa_tune.profiler.profile import Profile
from mesa_tune.workload.boundaries import StepEvents
from mesa_tune.workload.clock import Clock, Mark
from mesa_tune.workload.session import Session
from mesa_tune.workload.step import Context
from mesa_tune.workload.workload import Workload

FEWEST, MOST = 4, 16
"""Numbers of timed turns; another turn before them plans the calls."""

SHARE = 0.1
"""Turns take this share of the profile's time, as far as `FEWEST` and `MOST` let them."""

TIMES_COMPRESSED = 2
"""In how many of the steps under `timed_policies` each layer compresses."""

Spans = dict[str | None, float]
"""Milliseconds of one step by layer. None: the rest of the step."""


class Turn(NamedTuple):
    """Steps taken one after the other: the plain one, converted with every layer exact, and compressing.

    `packed`: steps under each of the `timed_policies`.
    """

    plain: Spans
    exact: Spans
    packed: Sequence[Spans]


class StepTimes(NamedTuple):
    """Milliseconds of the plain step, and what is added to it.

    `routing`: by converting the model, with every layer exact; `added`: by each layer that compresses.
    """

    plain: float
    routing: float
    added: Mapping[str, float]


@dataclass(frozen=True)
class StepTimer:
    """Times steps of a model in turn; `restore` restores its parameters, so that all steps are the same."""

    workload: Workload
    model: nn.Module
    optimizer: Optimizer
    restore: Callable[[], None]
    clock: Clock

    def plain_ms(self, batch: Any, steps: int) -> float:
        """Return the median milliseconds of the plain step over `steps`, after another one."""
        return statistics.median([_total(self._plain(batch)) for _ in range(steps + 1)][1:])

    def times(self, policies: Sequence[Policy], seconds: float) -> StepTimes:
        """Return the times of steps, those that compress under `policies`; take about `seconds` for it."""
        batch = self.workload.make_batch()
        exact, *packed = (
            Session.of(self.model, chosen, min_elements=MIN_ELEMENTS) for chosen in (Policy(()), *policies)
        )
        turns: list[Turn] = []
        stop = time.monotonic() + seconds
        while len(turns) <= FEWEST or (len(turns) <= MOST and time.monotonic() < stop):
            plain, unpacked = self._plain(batch), self._converted(exact, batch)
            turns.append(Turn(plain, unpacked, [self._converted(session, batch) for session in packed]))
        return summarized(turns[1:])

    def _plain(self, batch: Any) -> Spans:
        return self._step(batch, nullcontext)

    def _converted(self, session: Session, batch: Any) -> Spans:
        with session.installed():
            return self._step(batch, session.forward)

    def _step(self, batch: Any, forward: Callable[[], Context]) -> Spans:
        self.restore()
        stepper = self.workload.stepper(self.optimizer)
        with self.workload.same_random_state():
            cutter = _Cutter(self.clock)
            with cutter.cutting():
                stepper.run(self.model, batch, forward, cutter)
            return cutter.spans()


def summarized(turns: Sequence[Turn]) -> StepTimes:
    """Return medians over turns; everything but the plain step relative to the plain step of its turn."""
    totals = [_total(turn.plain) for turn in turns]
    plain = statistics.median(totals)

    def added(ms: Callable[[Turn], float]) -> float:
        return plain * statistics.median(ms(turn) / total for turn, total in zip(turns, totals, strict=True))

    layers = dict.fromkeys(
        name for turn in turns for spans in turn.packed for name in spans if name is not None
    )
    return StepTimes(
        plain,
        added(lambda turn: _total(turn.exact)) - plain,
        {name: added(partial(_difference, name)) for name in layers},
    )


def _difference(name: str, turn: Turn) -> float:
    exact = turn.exact.get(name, 0.0)
    return sum(spans.get(name, 0.0) - exact for spans in turn.packed) / TIMES_COMPRESSED


def _total(spans: Spans) -> float:
    return sum(spans.values())


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
        self._cut(None)

    def _cut(self, layer: str | None, backward: bool = False, output: Any = None) -> None:
        end = self.clock.now()
        node = _node(output)
        if node is not None:
            node.register_prehook(lambda _: self._cut(layer, True))
        self.cuts.append(_Cut(layer, backward, end, self.clock.now()))

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Cut where routed calls of the body return, and where their backwards begin."""
        before, watch.returned = watch.returned, lambda layer, output: self._cut(layer, False, output)
        try:
            yield
        finally:
            watch.returned = before

    def backward_ended(self) -> None:
        """Begin a span that belongs to no layer: the optimizer's step."""
        self._cut(None)

    def spans(self) -> Spans:
        """End the last span; return the time of all."""
        self._cut(None)
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


def timed_settings(options: Sequence[LayerSettings]) -> LayerSettings | None:
    """Return the option under which steps are timed: the nearest to 4 bits in groups of 256.

    Return None if there is no option.
    """
    plain = [option for option in options if not option.drop and option.store == "quantize"]
    return min(plain or options, key=_distance, default=None)


def _distance(option: LayerSettings) -> tuple[float, int]:
    return abs(math.log2(comparable_group_size(option) / REFERENCE_GROUP)), abs(option.bits - 4)


def timed_policies(profile: Profile, settings: LayerSettings) -> list[Policy]:
    """Return the policies of timed steps: `settings` for all layers, and for either half.

    Layers that share tensors are in the same half. Those stored by hooks stay exact: hooks work between
    routed calls, so their time would count for other layers.
    """
    groups = profile.groups
    half = {name for group in random.Random(0).sample(groups, len(groups) // 2) for name in group}
    return [
        _compressing(profile, settings, chosen)
        for chosen in (lambda name: True, half.__contains__, lambda name: name not in half)
    ]


def _compressing(profile: Profile, settings: LayerSettings, chosen: Callable[[str], bool]) -> Policy:
    """Return the policy that gives `settings` to the `chosen` layers but those stored by hooks."""
    hooked = profile.timeline.hooked
    return Policy.from_assignments(
        (
            layer.tag,
            layer.index,
            layer.name,
            settings if chosen(layer.name) and layer.name not in hooked else EXACT,
        )
        for layer in profile.layers
    )


def with_times(profile: Profile, times: StepTimes, settings: LayerSettings) -> Profile:
    """Return the profile with these times, measured under `settings`."""
    hooked = profile.timeline.hooked
    return replace(
        profile,
        step_ms=times.plain,
        routing_ms=times.routing,
        layers=tuple(
            replace(layer, call_ms=_call_ms(layer, times, settings, hooked)) for layer in profile.layers
        ),
    )


def _call_ms(
    layer: LayerEntry, times: StepTimes, settings: LayerSettings, hooked: Sequence[str]
) -> float | None:
    """Return what `layer` adds to a step besides encoding and decoding; None if unknown."""
    always_exact = all(option.settings.exact for option in layer.options)
    if layer.name in hooked or always_exact:  # hooks do nothing else
        return 0.0
    added, position = times.added.get(layer.name), layer.positions.get(settings)
    if added is None or position is None:
        return None
    return added - layer.options[position].ms
