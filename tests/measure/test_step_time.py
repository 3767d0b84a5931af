"""What layers add to the time of a step: on a clock that stands still but where the test advances it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.engine import function, rematerialize, storage
from mesa_tune.engine.observer import watch
from mesa_tune.engine.storage import Packing
from mesa_tune.measure.fake_steps import PolicyTracer
from mesa_tune.measure.timing import step_meter, step_time
from mesa_tune.measure.timing.kinds import PACKED, TIMES_COMPRESSED, Kind, timed_policies, timed_settings
from mesa_tune.measure.timing.option_times import smoothed
from mesa_tune.measure.timing.step_meter import StepMeter
from mesa_tune.measure.timing.step_time import (
    Spans,
    StepTimer,
    StepTimes,
    Turn,
    spread_of,
    summarized,
    with_times,
)
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.entries import LayerEntry
from mesa_tune.profiles.own_noise import OwnNoise
from mesa_tune.workload.clock import clock_of
from mesa_tune.workload.preserve import preserved
from tests.builders import ViT, known, mean, workload
from tests.synthetic import DERIVING, GRID, NORM, deriving, synthetic_profile

pytestmark = pytest.mark.usefixtures("without_variants")

MODULE, STORE, RESTORE = 10.0, 2.0, 3.0
FOUR = LayerSettings(level=16, group_size=256)
HALVES = (Kind.HALF, Kind.OTHER_HALF)
POLICIES = {Kind.EXACT: mt.Policy(()), **dict.fromkeys(HALVES, mt.Policy.uniform(level=16))}


class _Clock:
    """Advances only when it is told to."""

    def __init__(self) -> None:
        self.passed = 0.0

    def now(self) -> float:
        return self.passed

    def ms(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]


class _Mlp(nn.Module):
    """Two linear layers around a tanh, in a forward that takes `MODULE` milliseconds."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clocks = [clock]  # not in an attribute: a second run would put back the time that it takes
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Any:
        self.clocks[0].passed += MODULE
        return self.second(self.first(x).tanh())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """A clock on which packing a tensor takes `STORE`, and restoring it `RESTORE` milliseconds."""
    clock = _Clock()
    store, restore = storage.store, rematerialize.saved_tensor

    def slow_store(tensor: Any, packing: Packing, *others: Any, **options: Any) -> Any:
        clock.passed += STORE if packing.packed else 0
        return store(tensor, packing, *others, **options)

    def slow_restore(parts: Any, packing: Packing, spec: Any) -> Any:
        clock.passed += RESTORE if packing.packed else 0
        return restore(parts, packing, spec)

    monkeypatch.setattr(function, "store", slow_store)
    monkeypatch.setattr(function, "saved_tensor", slow_restore)
    return clock


@pytest.fixture
def timer(clock: _Clock) -> Iterator[StepTimer]:
    with timing(lambda: _Mlp(clock), clock) as timer:
        yield timer


@contextmanager
def timing(build: Callable[[], nn.Module], clock: _Clock) -> Iterator[StepTimer]:
    """Time steps of the model that `build` returns."""
    work = workload(build, lambda n: torch.randn(n, 64), mean, batch_size=64)
    model = work.build()
    optimizer = work.make_optimizer(model)
    with preserved(model, optimizer) as restore:
        yield StepTimer(work, model, optimizer, restore, clock)


def test_each_layer_adds_what_it_stores_and_restores(timer: StepTimer) -> None:
    times = timer.times(POLICIES, 0.0)
    assert (times.plain, times.routing) == (MODULE, 0.0)
    assert times.added == {"first": 0.0, "tanh.0": STORE + RESTORE, "second": STORE + RESTORE}


def test_the_model_is_plain_and_unobserved_after_timing(timer: StepTimer) -> None:
    timer.times(POLICIES, 0.0)
    assert watch.returned is None
    assert timer.model.forward.__func__ is _Mlp.forward  # type: ignore[attr-defined]
    assert timer.plain_ms(timer.workload.make_batch(), 3) == MODULE


def test_a_meter_times_steps_in_turn_and_leaves_the_model_as_it_was(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_meter, "clock_of", lambda _: clock)
    model = _Mlp(clock)
    work = workload(lambda: model, lambda n: torch.randn(n, 64), mean, batch_size=64)
    meter = StepMeter(work, OwnNoise(()), PolicyTracer(work, 64, 1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    times = meter.step_times([mt.Policy(()), mt.Policy.uniform(level=16)], 3)
    assert times == [[MODULE, MODULE + 2 * (STORE + RESTORE)]] * 3
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.forward.__func__ is _Mlp.forward  # type: ignore[attr-defined]


def test_no_turn_begins_when_the_time_is_over(timer: StepTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(step_time, "summarized", lambda turns: counted.append(len(turns)))
    monkeypatch.setattr(step_time, "TURNS", 3)
    for seconds in (0.0, 3600.0):
        timer.times({Kind.EXACT: mt.Policy(())}, seconds)
    monkeypatch.setattr(step_time, "spread_of", lambda turns: 0.1 * (len(turns) < 5))
    timer.times({Kind.EXACT: mt.Policy(())}, 3600.0)  # until its turns agree
    assert counted == [1, 3, 5]


def test_the_spread_is_what_turns_leave_uncertain() -> None:
    assert summarized([slowed(), slowed(2.0), slowed(1.5)]).spread == pytest.approx(
        0.0
    )  # it is slower, and steady
    unsteady = [slowed(added=added) for added in (1.0, 9.0, 17.0, 25.0)]
    # The packed steps take 1.2 to 3.6 times plain's; all other kinds the same in each turn.
    assert spread_of(
        [{kind: each[kind] for kind in (Kind.PLAIN, *HALVES)} for each in unsteady]
    ) == pytest.approx(0.5 * (25.0 - 1.0) / 10.0 / 2.0)


def test_options_take_no_longer_than_steps_allow() -> None:
    """Options that were timed on a busier machine than steps make no policy faster than plain."""
    profile = synthetic_profile()
    busy = [
        replace(
            layer,
            options=tuple(
                replace(option, encode_ms=90.0 * option.encode_ms, decode_ms=90.0 * option.decode_ms)
                for option in layer.options
            ),
        )
        for layer in profile.layers
    ]
    added = {layer.name: 0.25 * layer.shape[-1] for layer in profile.layers}
    timed = with_times(replace(profile, layers=tuple(busy)), StepTimes(50.0, 2.0, added, spread=0.2), FOUR)
    for settings in dict.fromkeys(option.settings for layer in profile.layers for option in layer.options):
        every = dict.fromkeys((layer.name for layer in profile.layers), settings)
        predicted = timed.predict_assignment(every).step_ms
        assert predicted is None or predicted > 0.85 * 50.0
    assert timed.time_spread == 0.2


def test_slow_steps_have_one_turn(timer: StepTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[Turn] = []
    shown: list[str] = []
    monkeypatch.setattr(step_time, "SLOW_MS", 0.0)
    monkeypatch.setattr(step_time, "summarized", turns.extend)
    timer.times({Kind.EXACT: mt.Policy(())}, 3600.0, lambda text, share: shown.append(text))
    assert [set(turn) for turn in turns] == [{Kind.PLAIN, Kind.EXACT, Kind.CUT}]
    assert shown == ["step times, 3 kinds of steps", "step times, turn 1 of 1"]


def test_only_steps_of_layers_that_compress_are_cut(
    timer: StepTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[Turn] = []
    monkeypatch.setattr(step_time, "summarized", turns.extend)
    timer.times(POLICIES, 0.0)
    cut = {kind for kind, spans in turns[0].items() if spans.keys() != {None}}
    assert cut == {Kind.CUT, *HALVES}


def turn(plain: float, exact: Spans, packed: Spans, missed: float = 0.0) -> Turn:
    """Return the turn of steps that take as long as their spans; both halves of the layers take the same.

    `missed`: what the packed steps take beyond their layers' spans.
    """
    halves = {**packed, None: packed.get(None, 0.0) + missed}
    whole: Spans = {None: sum(exact.values())}
    return {Kind.PLAIN: {None: plain}, Kind.EXACT: whole, Kind.CUT: exact, **dict.fromkeys(HALVES, halves)}


def slowed(speed: float = 1.0, added: float = 1.0) -> Turn:
    """Return a plain step of 10 ms, with 2 ms of routing, and `added` by one layer, on a slower machine."""
    exact: Spans = {None: 8.0 * speed, "fc": 4.0 * speed}
    return turn(10.0 * speed, exact, {**exact, "fc": (4.0 + added) * speed})


BUSY: list[tuple[float, ...]] = [(), (3.0,), (), (1.5,), ()]


@pytest.mark.parametrize("turns", [BUSY, [(), (1.0, 50.0), ()]], ids=["busy", "disturbed"])
def test_a_busy_machine_or_one_disturbed_turn_changes_nothing(turns: list[tuple[float, ...]]) -> None:
    times = summarized([slowed(*each) for each in turns])
    assert times.plain == 10.0
    assert times.routing == pytest.approx(2.0)
    assert times.added == {"fc": pytest.approx(1.0)}


def test_a_model_that_is_one_layer_has_a_time() -> None:
    times = summarized([turn(6.0, {"": 6.0}, {"": 8.0})])
    assert times.added == {"": pytest.approx(2.0)}


def test_layers_share_what_spans_miss_of_whole_steps_by_their_time() -> None:
    times = summarized([turn(6.0, {"fc": 4.0, "act": 2.0}, {"fc": 6.0, "act": 2.0}, missed=1.0)])
    assert times.added == {"fc": pytest.approx(2.0 + 0.75), "act": pytest.approx(0.25)}


def test_cutting_takes_no_time() -> None:
    """Cut steps take 1 ms longer, and so does the exact one that layers are compared with."""
    steps = turn(6.0, {"fc": 5.0, "act": 2.0}, {"fc": 7.0, "act": 2.0})
    times = summarized([{**steps, Kind.EXACT: {None: 6.5}}])
    assert times.routing == pytest.approx(0.5)
    assert times.added == {"fc": pytest.approx(2.0), "act": pytest.approx(0.0)}


def test_the_thread_clock_counts_no_time_in_which_the_thread_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 1.5, 1.75])
    monkeypatch.setattr(time, "thread_time", lambda: next(moments))
    device_clock = clock_of("cpu")
    assert device_clock.ms([device_clock.now() for _ in range(3)]) == [500.0, 250.0]


def test_steps_are_timed_under_the_option_nearest_to_four_bits() -> None:
    assert timed_settings(GRID) == FOUR
    dropping = LayerSettings(level=16, drop=0.5)
    two = LayerSettings(level=4, group_size=64)
    assert timed_settings([dropping, two]) == two
    assert timed_settings([]) is None


def test_a_layer_that_costs_its_neighbours_time_adds_it() -> None:
    """Beside a layer that compresses alone, another one that stores exactly takes 3 ms longer."""
    pairs = [(4.0, 2.0), (5.0, 4.0), (5.0, 5.0), (4.0, 4.0)]
    times_of = zip((Kind.CUT, Kind.ALL, *HALVES), pairs, strict=True)
    spans: dict[Kind, Spans] = {kind: {None: 8.0, "fc": fc, "act": act} for kind, (fc, act) in times_of}
    times = summarized([{Kind.PLAIN: {None: 14.0}, Kind.EXACT: {None: 14.0}, **spans}])
    shares = {"fc": 1.0, "act": (2.0 + 3.0 + 2.0) / 2}  # of the 3 ms that both add to one step
    assert times.added == pytest.approx({name: 3.0 * ms / 4.5 for name, ms in shares.items()})
    assert times.overlap == pytest.approx((4.0 + 2.0) - 3.0 - 1.5)


def test_halves_overlap_by_half_of_what_all_layers_add_at_most() -> None:
    def overlap(every: float, half: float) -> float:
        whole = {Kind.PLAIN: 40.0, Kind.EXACT: 42.0, Kind.CUT: 42.0, Kind.ALL: 42.0 + every}
        whole |= dict.fromkeys(HALVES, 42.0 + half)
        return summarized([{kind: {None: ms} for kind, ms in whole.items()}]).overlap

    assert [overlap(8.0, half) for half in (3.0, 5.0, 7.0)] == pytest.approx([0.0, 2.0, 4.0])
    assert overlap(-1.0, 1.0) == 0.0


def test_each_layer_compresses_in_as_many_timed_steps_but_those_that_hooks_store() -> None:
    profile = synthetic_profile()
    policies = timed_policies(profile, FOUR)
    assignments = [profile.assignment(policies[kind]) for kind in PACKED]
    for group in profile.groups:
        compressing = [sum(not assigned[name].exact for assigned in assignments) for name in group]
        hooked = set(group) <= set(profile.timeline.hooked)
        assert compressing == [0 if hooked else TIMES_COMPRESSED] * len(group)
    assert len(set(map(str, assignments))) == len(assignments)


def test_a_prediction_under_the_timed_settings_is_what_was_measured() -> None:
    profile = synthetic_profile()
    added = {layer.name: 0.25 * layer.shape[-1] for layer in profile.layers}  # alike layers take equal times
    timed = with_times(profile, StepTimes(50.0, 2.0, added), FOUR)
    for layer in timed.layers:
        if layer.name not in profile.timeline.hooked:
            predicted = timed.predict_assignment({layer.name: FOUR}).step_ms
            shared = known(timed.layer("blocks.0.q").like(FOUR))
            copied = shared.encode_ms if layer.name.endswith((".k", ".v")) else 0.0
            assert predicted == pytest.approx(52.0 + added[layer.name] + (copied or 0.0))


def test_a_step_in_which_layers_derive_is_timed_too(timer: StepTimer) -> None:
    times = timer.times(POLICIES, 0.0)
    assert times.deriving == {}
    also = {**POLICIES, Kind.DERIVING: POLICIES[Kind.HALF]}
    assert timer.times(also, 0.0).deriving == times.added


def test_a_step_in_which_blocks_run_again_is_timed_too(timer: StepTimer, clock: _Clock) -> None:
    assert timer.times(POLICIES, 0.0).rerun is None
    again = mt.Policy(()).rerunning({"0": replace(FOUR, store="recompute")})
    with timing(lambda: nn.Sequential(_Mlp(clock), _Mlp(clock)), clock) as two:
        times = two.times({Kind.EXACT: mt.Policy(()), Kind.RERUN: again}, 0.0)
    assert (times.plain, times.rerun) == (2 * MODULE, MODULE)


def test_what_deriving_adds_counts_where_layers_derive() -> None:
    profile = deriving(synthetic_profile(), 1.0)
    assert Kind.DERIVING in timed_policies(profile, FOUR)
    added = {layer.name: 0.25 * layer.shape[-1] for layer in profile.layers}
    slower = {name: ms + 3.0 * (name in DERIVING) for name, ms in added.items()}
    timed = with_times(profile, StepTimes(50.0, 2.0, added, deriving=slower), FOUR)
    derive = replace(FOUR, store="derive")
    names = (NORM, *DERIVING)
    predicted = timed.predict_assignment(dict.fromkeys(names, derive)).step_ms
    assert predicted == pytest.approx(52.0 + sum(slower[name] for name in names))
    assert timed.predict_assignment({NORM: FOUR}).step_ms == pytest.approx(52.0 + added[NORM])
    again = mt.Profile.from_dict(timed.to_dict())
    assert again.predict_assignment(dict.fromkeys(names, derive)).step_ms == predicted
    assert Kind.DERIVING not in timed_policies(synthetic_profile(), FOUR)


def test_layers_with_one_copy_encode_once() -> None:
    profile = synthetic_profile()
    q, k = profile.layer("blocks.0.q"), profile.layer("blocks.0.k")
    eight = LayerSettings()

    def added(assignment: dict[str, LayerSettings]) -> float:
        return (profile.predict_assignment(assignment).step_ms or 0.0) - profile.plain_ms(profile.batch_size)

    other, encoding = added({k.name: FOUR}), known(q.like(FOUR)).encode_ms
    assert encoding
    assert added({q.name: FOUR, k.name: FOUR}) == pytest.approx(added({q.name: FOUR}) + other - encoding)
    assert added({q.name: eight, k.name: FOUR}) == pytest.approx(added({q.name: eight}) + other)


def test_layers_that_were_not_timed_make_an_unknown_prediction() -> None:
    profile = with_times(synthetic_profile(), StepTimes(50.0, 2.0, {}), FOUR)
    assert profile.predict_assignment({"head": FOUR}).step_ms is None
    assert profile.predict_assignment({}).step_ms == 52.0


def test_a_profile_knows_the_times_of_its_layers() -> None:
    work = workload(lambda: ViT(width=32, depth=1))
    profile = mt.profile(work, options=[FOUR], seeds=1)
    assert profile.predict(mt.Policy.uniform(level=4)).step_ms is not None
    assert mt.profile(work, options=()).predict(mt.Policy(())).step_ms is None


def test_one_disturbed_time_of_an_option_counts_for_little() -> None:
    """Layers of a tag take times of the same proportions; one that does not was disturbed."""
    profile = synthetic_profile()

    def timed(layer: LayerEntry, ms: float) -> LayerEntry:
        options = (replace(one, encode_ms=ms * one.settings.bits, decode_ms=ms) for one in layer.options)
        return replace(layer, tag="fc", options=tuple(options))

    layers = [timed(layer, elements) for elements, layer in enumerate(profile.layers, 1)]
    disturbed = replace(layers[2].options[1], encode_ms=100.0)
    options = (layers[2].options[0], disturbed, *layers[2].options[2:])
    found = smoothed([*layers[:2], replace(layers[2], options=options), *layers[3:]])
    for layer, expected in zip(found, layers, strict=True):
        for option, right in zip(layer.options, expected.options, strict=True):
            assert option.encode_ms == pytest.approx(right.encode_ms)
            assert option.decode_ms == pytest.approx(right.decode_ms)


def test_alike_layers_take_their_mean_time() -> None:
    profile = synthetic_profile()
    added = {layer.name: float(number) for number, layer in enumerate(profile.layers)}
    timed = with_times(profile, StepTimes(50.0, 2.0, added), FOUR)
    blocks = [timed.layer(f"blocks.{number}.q") for number in range(2)]
    assert blocks[0].call_ms == blocks[1].call_ms
    before, after = (
        sum(one.call_ms or 0.0 for one in some.layers)
        for some in (with_times(profile, StepTimes(50.0, 2.0, dict.fromkeys(added, 0.0)), FOUR), timed)
    )
    hooked = profile.timeline.hooked
    compressing = [layer for layer in profile.layers if layer.name not in hooked and len(layer.options) > 1]
    assert after - before == pytest.approx(sum(added[layer.name] for layer in compressing))
