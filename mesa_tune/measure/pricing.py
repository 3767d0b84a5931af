"""Prices of the options of layers, on one batch of a workload after the other.

What is hard: each price takes time. So the first batch screens all options, and the others measure only those
that a solver could choose. Among so many options some look good by chance on the first batch, and are chosen
for it. So the first batch chooses, and only the others make the price.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mesa_tune.free_memory import free_memory
from mesa_tune.measure.errors.amplification import Amplifications, is_measured
from mesa_tune.measure.errors.derivation import DerivableStep, DerivationObserver, DerivedTensor, Reach
from mesa_tune.measure.errors.noise import Parts
from mesa_tune.measure.errors.prices import Price
from mesa_tune.measure.errors.recorded import TRIES
from mesa_tune.measure.errors.sensitivity import Sensitivity
from mesa_tune.measure.errors.step_gradient import StepEnded, StepRoots
from mesa_tune.measure.memory.rows import Rows
from mesa_tune.measure.memory.step_trace import TensorKey
from mesa_tune.measure.memory.trace import observing
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.entries import Derivation, LayerEntry, Option, above_one_bit, kind
from mesa_tune.profiles.intervals import LOW_BITS, fitted_interaction
from mesa_tune.profiles.other_entries import OtherStep
from mesa_tune.profiles.own_noise import OwnNoise, Shares
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.memory_model import Timeline
from mesa_tune.workload.batches import select
from mesa_tune.workload.checkpoints import without_checkpoints
from mesa_tune.workload.session import RawConversion, Session, session
from mesa_tune.workload.workload import Workload

_ROOM = 3
"""Where so many times a step's peak are free, a recorded step may take twice as much."""

WHOLE_BITS = 4
"""Bits of the uniform policy that calibrates prices."""
Priced = TypeVar("Priced", LayerEntry, Derivation)


class LayerPrices(NamedTuple):
    """The options of a layer as far as they are measured; for each of them, the joint ratio of its tie.

    `shares`: see `LayerEntry`.
    """

    options: tuple[Option, ...] = ()
    joint: tuple[float, ...] = ()
    shares: Shares = ()

    @property
    def batches(self) -> float:
        """On how many batches they were measured; infinite if the layer can only store exactly."""
        if not self.options:
            return 0
        return max((option.batches for option in self.options if not option.settings.exact), default=math.inf)

    def extended(self, other: LayerPrices) -> LayerPrices:
        """Return these prices with those of `other`, some of the same options on one batch more, included."""
        if not self.options:
            return other
        positions = {option.settings: position for position, option in enumerate(other.options)}
        options, ratios = list(self.options), list(self.joint)
        for index, option in enumerate(self.options):
            position = positions.get(option.settings)
            if position is not None and not option.settings.exact:
                options[index] = option.extended(other.options[position])
            if position is not None and index < len(ratios) and position < len(other.joint):
                # The first batch is no part of the errors that the ratio applies to.
                ratios[index] += (other.joint[position] - ratios[index]) / max(1, option.batches)
        return LayerPrices(tuple(options), tuple(ratios), self.shares or other.shares)


@dataclass(frozen=True)
class Pricing:
    """Measures prices on a traced workload, beside the parameters' `own` noise.

    `draws`: of the batches, of which the first screens. `slices`: see `Noise`. `moved`: parameters with their
    values, where the step that is recorded has moved them between its backwards.
    """

    workload: Workload
    model: nn.Module
    options: list[LayerSettings]
    rows: Rows
    timeline: Timeline
    draws: Sequence[int]
    own: OwnNoise
    amplifications: Amplifications = field(default_factory=Amplifications)
    slices: int = 1
    moved: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    def restore(self) -> None:
        """Put back what the recorded step has moved; its graph is then of no use."""
        _put_back(self.moved)
        self.moved.clear()

    def record(self, number: int, producers: Collection[str] = (), batch: Any = None) -> Sensitivity:
        """Record the exact step on the batch of this number, and on a slice of it; `batch`: if it is at hand.

        `producers` save in it what they save when others derive from them.
        """
        first, *others = self._micro_batches(number)
        batch = self.workload.make_batch(draw=first) if batch is None else batch
        sensitivity = self._recorded(number, producers, batch, others)
        if self.slices > 1 and not producers and not self.moved:
            size = self.workload.batch_size
            part = select(batch, slice(0, size // self.slices), size)
            sensitivity.slice = self._recorded(number, (), part, ())
        return sensitivity

    def _recorded(
        self, number: int, producers: Collection[str], batch: Any, others: Iterable[int]
    ) -> Sensitivity:
        self.restore()
        # Times are the least over batches, and the first of them is not in the cache.
        tries = TRIES if number == bool(producers) else 1
        sensitivity = Sensitivity(
            Parts(self.model),
            self.own,
            number,
            splits=number == 1 and not producers,
            screens=number == 0 and len(self.draws) > 1,
            tries=tries,
            at_once=free_memory(self.workload.device)[0] > _ROOM * self.timeline.peak_bytes({}),
        )
        running = session(self.model, Policy.parse(""), kind=RawConversion)
        with running as raw, observing(sensitivity.recording):
            for conversion in (raw.conversion, raw.losses):
                conversion.producers.update(producers)
            # The gradient is the same with checkpoints, but each backward would start from a second forward.
            with self.workload.same_random_state(), without_checkpoints():
                self.model.zero_grad()
                roots = self._roots(raw, batch)
        sensitivity.record(*roots, self._losses(others))
        return sensitivity

    def _micro_batches(self, number: int) -> range:
        count = self.workload.accumulation
        return range(self.draws[number] * count, (self.draws[number] + 1) * count)

    def _roots(self, raw: Session, batch: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forwards of a step; return what its backwards start from, with the gradients of these."""
        if self.workload.step is None:
            with raw.forward():
                loss = self.workload.compute_loss(self.model, batch)
            self._require_no_gradients()
            return [loss], [torch.ones_like(loss)]
        stepper = self.workload.function_stepper(self.workload.make_optimizer(self.model))
        parameters = list(self.model.parameters())
        before = [(parameter, parameter.detach().clone()) for parameter in parameters]
        calls = StepRoots(self.workload, parameters)
        stepper.run(self.model, batch, raw.forward, calls, updates=False, retain=True)
        if not calls.moving:
            return calls.outputs, calls.gradients
        # The optimizer steps by the gradient of the last backward (SAM). That is recorded where the weights
        # are then, so the step ends there.
        self.moved.extend(before)
        _put_back(before)
        last = StepRoots(self.workload, parameters, ends_after=calls.backwards)
        with suppress(StepEnded):
            stepper.run(self.model, batch, raw.forward, last, updates=False, retain=True)
        return last.outputs, last.gradients

    def _losses(self, draws: Iterable[int]) -> Iterator[Tensor]:
        for draw in draws:
            with self.workload.same_random_state(), without_checkpoints():
                yield self.workload.compute_loss(self.model, self.workload.make_batch(draw=draw))

    def _require_no_gradients(self) -> None:
        """Raise WorkloadError if the loss itself has computed gradients of the parameters."""
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise self.workload.step_error(
                "calls backward() itself, so the gradient of the step is not that of what it returns",
                "return the sum of the losses; for micro-batches set ACCUMULATION, or define step() instead",
            )

    def of_group(
        self,
        traced: Profile,
        group: tuple[str, ...],
        sensitivity: Sensitivity | None,
        earlier: Mapping[str, LayerPrices],
    ) -> dict[str, LayerPrices]:
        """Return the prices of each layer of a group on the recorded batch.

        With the prices of an `earlier` batch, only those options are priced that one of the layers could use.
        """
        entries = {name: traced.layer(name) for name in group}
        grid = self._grid(group)
        if sensitivity is None or not grid:
            return {name: LayerPrices((_exact(entry),), ()) for name, entry in entries.items()}
        if earlier:
            wanted = frozenset[LayerSettings]().union(*map(candidates, (p.options for p in earlier.values())))
            grid = [option for option in grid if option in wanted]
            if not grid:
                return {}
        due = is_measured(sensitivity.seed, traced.groups.index(group), len(traced.groups))
        inferred = self.amplifications.inferred(sensitivity.seed, group, due=due)
        sensitivity.amplifications.update(inferred)
        joint_of_slice = sensitivity.amplify(group, grid) if due else []
        prices, joint = sensitivity.prices(group, grid)
        known = {key: value for key, value in sensitivity.amplifications.items() if key[0] in group}
        measured = {key: value for key, value in known.items() if key not in inferred}
        self.amplifications.add(sensitivity.seed, measured)
        return {
            name: LayerPrices(
                (*self._options(entry, grid, prices[name]), _exact(entry)),
                tuple(joint or joint_of_slice),
                sensitivity.shares.get(name, ()),
            )
            for name, entry in entries.items()
        }

    def of_skipped(
        self, traced: Profile, step: OtherStep, rows: Rows, known: Mapping[str, LayerPrices]
    ) -> Iterator[tuple[str, LayerPrices]]:
        """Yield prices of the layers that `step` adds, times its share, under the options of those alike."""
        workload = replace(self.workload, random_state=step.random_state)
        own = replace(
            self, workload=workload, rows=rows, draws=[step.draw], slices=1, amplifications=Amplifications()
        )
        sensitivity = own.record(0) if self.options else None
        for group in (group for group in traced.groups if set(group) <= set(step.layers)):
            entries = [traced.layer(name) for name in group]
            like = {one.name: known[name] for one in entries if (name := one.stored_like or "") in known}
            prices = own.of_group(traced, group, sensitivity, like)
            for one in entries:
                found = prices.get(one.name, LayerPrices((_exact(one),)))
                yield one.name, found._replace(options=tuple([o.times(step.share) for o in found.options]))

    def of_derived(self, traced: Profile, number: int) -> dict[Reach, list[Option]]:
        """Return the options for what is stored while others derive from it, on the batch of this number.

        All other layers store exactly.
        """
        batch = self.workload.make_batch(draw=self._micro_batches(number)[0])
        derived = self._derived_tensors(batch)
        producers = {name for tensor in derived.values() for name in tensor.recipe.layers()}
        sensitivity = self.record(number, producers, batch)
        sensitivity.amplifications.update(self.amplifications.at(number))
        step = DerivableStep(sensitivity.recording.replays, derived)
        prices: dict[Reach, list[Option]] = {}
        for reach in step.reaches(traced.groups):
            grid = above_one_bit(self._grid(reach.layers))
            entry = traced.layer(reach.layers[0])
            found = sensitivity.together(step.calls(reach), grid)
            options = self._options(entry, grid, found)
            prices[reach] = [replace(option, screened=False) for option in options]
        return prices

    def _grid(self, group: tuple[str, ...]) -> list[LayerSettings]:
        """Return the options for a group: for hooks those of 8 bits; none if nothing can be compressed."""
        if not self.rows.can_be_stored(group):
            return []
        on_cpu = self.workload.device == "cpu"  # has nowhere to offload to
        options = [option for option in self.options if not (on_cpu and option.store == "offload")]
        if all(name in self.rows.hooked for name in group):
            return [option for option in options if option.bits == 8 and not option.omits]
        if not self.rows.may_leave_out_rows(group):
            options = [option for option in options if option.rows == 1]
        if not self.rows.may_have_levels(group):
            options = [option for option in options if option.store != "levels"]
        return options

    def _options(self, entry: LayerEntry, grid: list[LayerSettings], prices: list[Price]) -> Iterator[Option]:
        for settings, price in zip(grid, prices, strict=True):
            yield Option(
                settings=settings,
                bytes=self.rows.bytes(entry.name, settings),
                tensor_error=price.tensor_error,
                # Running ranges take steps to differ from those of the tensor at hand, which were priced.
                gradient_error=None if settings.ema_decay else price.gradient_error,
                ratios=() if settings.ema_decay else (price.ratio,),
                measured=price.measured,
                encode_ms=price.encode_ms,
                decode_ms=price.decode_ms,
                bias=price.bias,
            )

    def _derived_tensors(self, batch: Any) -> dict[TensorKey, DerivedTensor]:
        """Return the tensors that are derived on `batch` if all layers derive what they can."""
        observer, policy = DerivationObserver(), Policy.uniform(level=16, store="derive")
        stepper = self.workload.stepper(self.workload.make_optimizer(self.model))
        # Without checkpoints, each tensor is stored once, in the order of the recorded step.
        with session(self.model, policy) as running, without_checkpoints():
            stepper.prepare(self.model, batch, running.forward)
            with self.workload.same_random_state(), observing(observer):
                stepper.prepare(self.model, batch, running.forward)
        return observer.derived


def _put_back(values: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    with torch.no_grad():
        for parameter, value in values:
            parameter.copy_(value)


def _exact(entry: LayerEntry) -> Option:
    return Option(EXACT, entry.bytes, 0.0, 0.0, (0.0,), True, 0.0, 0.0)


def candidates(options: Sequence[Option]) -> frozenset[LayerSettings]:
    """Return the settings that a solver could choose, with and without fixed levels (`--forbid levels`)."""
    quantized = [option for option in options if option.settings.store != "levels"]
    return _hull(options) | _hull(quantized)


def _hull(options: Sequence[Option]) -> frozenset[LayerSettings]:
    """Return the lower convex hull of bytes and log of the noise ratio.

    Ratios are those of the first batch, so that a resumed profile has the same. Exact storage is left out.
    """
    hull: list[tuple[float, float, LayerSettings]] = []
    for bytes_, ratio, option in sorted(
        ((option.bytes, option.ratios[0], option) for option in options if option.ratios),
        key=lambda item: item[:2],
    ):
        if option.settings.exact or (hull and hull[-1][1] <= _log(ratio)):
            continue
        point = (float(bytes_), _log(ratio), option.settings)
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return frozenset(settings for _, _, settings in hull)


def _log(ratio: float) -> float:
    return math.log(max(ratio, 1e-30))


def _is_above(first: Any, middle: Any, last: Any) -> bool:
    """Return whether the middle point lies on the chord of its neighbours, or above it."""
    chord = (last[1] - first[1]) * (middle[0] - first[0])
    return bool((middle[1] - first[1]) * (last[0] - first[0]) >= chord)


def interactions(
    priced: Profile, policies: Mapping[int, Policy], measured: Mapping[int, Sequence[float]]
) -> Iterator[tuple[int, float]]:
    """Yield bits and the interaction at them: the ratio of a policy, by batch, beside the sum of prices."""
    for bits in policies.keys() & LOW_BITS:
        units = _units(priced, policies[bits], len(measured[bits]))
        factor = fitted_interaction(units, fmean(measured[bits]))
        if factor:
            yield bits, factor


def _units(priced: Profile, policy: Policy, batches: int) -> list[float]:
    """Return the ratio of each group of layers, its mean over so many batches; none if one is unknown."""
    assignment = priced.assignment(policy)
    active = priced.active(assignment)
    units = [priced.cost_of(map(priced.layer, group), assignment, active).ratios for group in priced.groups]
    known = [fmean(unit[:batches]) for unit in units if unit is not None]
    return known if len(known) == len(units) else []


def calibration(
    priced: Profile, policies: Mapping[int, Policy], measured: Mapping[int, Sequence[float]]
) -> dict[int, float]:
    """Return by bits the factors with which prices predict the ratios `measured` on their batches.

    At `LOW_BITS` only where sums of prices are too high: what they miss is interaction.
    """
    sums = {bits: sum(_units(priced, policies[bits], len(ratios))) for bits, ratios in measured.items()}
    factors = {bits: fmean(measured[bits]) / total for bits, total in sums.items() if total > 0}
    factors = {bits: factor for bits, factor in factors.items() if 0 < factor < math.inf}  # nor NaN
    common = factors.get(WHOLE_BITS, 1.0)
    low = {bits: min(common, factors.get(bits, common)) for bits in LOW_BITS}
    return {WHOLE_BITS: common, **low}


def calibrated(priced: Profile, factors: Mapping[int, float]) -> Profile:
    """Return the profile with `factors` times the errors of layers, by bits; modules were measured whole."""
    if not factors:
        return priced
    layers, derivations = _times(priced.layers, factors), _times(priced.derivations, factors)
    return replace(priced, layers=layers, derivations=derivations)


def _times(entries: Iterable[Priced], factors: Mapping[int, float]) -> tuple[Priced, ...]:
    def factor(settings: LayerSettings) -> float:
        is_plain = kind(settings) == kind(LayerSettings())
        return factors.get(settings.bits if is_plain else WHOLE_BITS, factors[WHOLE_BITS])

    return tuple(
        replace(one, options=tuple([each.times(factor(each.settings)) for each in one.options]))
        for one in entries
    )
