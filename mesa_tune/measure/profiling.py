"""`mt.profile`: run the measurements of a profile, and save the profile between them.

What is hard: profiling takes minutes and changes the model. So a partial profile can be resumed, a batch that
does not fit in memory is halved, and the model, its optimizer and the random generators are restored.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from mesa_tune.errors import RunError
from mesa_tune.measure.draws import longest_batch, look
from mesa_tune.measure.errors.amplification import Amplifications
from mesa_tune.measure.errors.at_checkpoints import at_checkpoints
from mesa_tune.measure.errors.derivation import Reach, continued
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.errors.sensitivity import Sensitivity
from mesa_tune.measure.errors.sliced_noise import noise_of_steps
from mesa_tune.measure.fake_steps import traced_without_memory
from mesa_tune.measure.memory.meter import unless_out_of_memory
from mesa_tune.measure.memory.rows import Rows
from mesa_tune.measure.pricing import WHOLE_BITS, LayerPrices, Pricing, calibrated, calibration, interactions
from mesa_tune.measure.rerun_modules.blocks import whole
from mesa_tune.measure.rerun_modules.prices import BlockWatch, ModulePricing, module_options
from mesa_tune.measure.timing.heap import roomy_heap
from mesa_tune.measure.timing.kinds import timed_policies, timed_settings
from mesa_tune.measure.timing.step_time import StepTimer, with_times
from mesa_tune.measure.tracing import StepTracer, TracedWorkload, rebuilding, with_other_steps
from mesa_tune.notice import Progress, StatusLine, unnoticed, unshown
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.entries import REFERENCE_GROUP, Derivation, Option, full_grid, kind
from mesa_tune.profiles.intervals import LOW_BITS
from mesa_tune.profiles.other_entries import OtherStep
from mesa_tune.profiles.own_noise import AtCheckpoint, OwnNoise
from mesa_tune.profiles.profile import Profile
from mesa_tune.units import counted
from mesa_tune.workload.clock import clock_of
from mesa_tune.workload.instance.optimizers import advice
from mesa_tune.workload.preserve import preserved
from mesa_tune.workload.workload import Workload

SEEDS = 7
"""Batches of a full profile: one screens, six price.

With four of the latter, the upper end of the median interval of a small GPT was 3.7 times the lower, with six
2.6 times (`benchmarks/intervals.py`).
"""
SAVE_EVERY_S, SAVE_SHARE = 10.0, 0.02
"""A partial profile is saved after so many seconds, or more seldom: saving takes this share of the time."""
_INTERACTION_DRAWS = 3
_WATCHED_STEPS = 3
_CHECKPOINT_DRAWS = 3
_TIMED_STEPS = 30
"""About so many steps are timed, of models whose steps are slow."""


def profile(
    workload: Workload,
    *,
    options: Sequence[LayerSettings] | None = None,
    seeds: int = SEEDS,
    path: str | Path | None = None,
    timeout: float | None = None,
    progress: bool | Progress = False,
    save: Callable[[Profile], object] | None = None,
    enough: Callable[[Profile], bool] | None = None,
) -> Profile:
    """Measure what a step of `workload` saves for backward, and what each option to store it costs.

    `options`: the settings to try on each layer (default: the full grid; `[]`: bytes only); `seeds`: on how
    many batches, each with a rounding seed of its own. The first screens all options; the others price those
    that a solver could choose. With fewer than three no error has an interval. The profile is saved at
    `path`, or by `save`, as it grows; a partial one of the same workload and options is resumed. A batch that
    does not fit in memory is halved until it does, and `notes` say so. Where batches differ in length, the
    bytes are those of the longest of `DRAWS` draws, and `notes` say so; they also say if `batch` makes no
    equal batches under one seed. `timeout`: after so many seconds nothing further is measured that a profile
    can do without, and `notes` say so; a trace, one batch and the times of steps are always measured.
    `enough`: asked about the bytes, before options are priced; if it returns True, they are the profile,
    which stays partial. `progress`: show on standard error what is done (without a terminal once a minute),
    or what to call. The model, its optimizer and the random generators are restored bit for bit.

    Raise WorkloadError for a workload that cannot be trained, RunError for a file that cannot be written.
    """
    wanted = full_grid() if options is None else list(options)
    if seeds < 1:
        raise ValueError(f"`seeds >= 1` must hold, but got (seeds={seeds})")
    status = StatusLine()
    show = progress if callable(progress) else (status.progress if progress else unshown)
    model = workload.build()
    optimizer = workload.make_optimizer(model)
    end = math.inf if timeout is None else time.monotonic() + timeout
    try:
        return _Profiling(workload, model, optimizer, wanted, seeds, path, save, show, enough, end).run()
    finally:
        if progress is True:
            status.show("")


@dataclass
class _Profiling:
    workload: Workload
    model: nn.Module
    optimizer: Optimizer
    options: list[LayerSettings]
    seeds: int
    path: str | Path | None
    save: Callable[[Profile], object] | None
    show: Progress
    enough: Callable[[Profile], bool] | None
    end: float
    pricing: Pricing = field(init=False)
    watch: BlockWatch = field(init=False)
    draw: int = field(init=False)
    others: dict[OtherStep, Rows] = field(init=False)
    calibration: dict[int, float] = field(default_factory=dict)

    def run(self) -> Profile:
        """Return the profile at the wanted batch size, halved until memory suffices for every measurement."""
        self.wanted_batch_size = self.workload.batch_size
        self.again = rebuilding(self.workload, self.model)
        while True:
            profile = unless_out_of_memory(self._profiled)
            if profile is not None:
                return profile
            if self.workload.batch_size == 1:
                raise RunError(
                    f"out of memory on {self.workload.device} at batch size 1: not even one sample fits\n"
                    "use a machine with more memory or a smaller model; `--fast` needs no less"
                ) from MemoryError()
            self.workload = self.workload.with_batch_size(self.workload.batch_size // 2)

    def _profiled(self) -> Profile:
        # Tracing takes real optimizer steps; errors are measured on the restored model.
        with preserved(self.model, self.optimizer, self.again) as restore:
            traced = self._traced_profile(restore)
        del restore  # it refers to copies of the parameters
        if self.enough is not None and self.enough(traced):
            self._save(traced)
            return traced
        self.measured = self._resumed(traced)
        self.derivations: tuple[Derivation, ...] = ()
        try:
            with preserved(self.model, self.optimizer, self.again) as restore:
                with roomy_heap(traced.peak_bytes, self.workload.device):
                    complete = self._with_errors(traced)
                complete = self._timed(complete, restore, self.end - time.monotonic())
        except KeyboardInterrupt:
            self._save(self._assembled(traced, partial=True))
            raise
        self._save(complete)
        return complete

    def _with_errors(self, traced: Profile) -> Profile:
        """Return the profile with the options of all layers; times of steps are still missing."""
        if not self.options:
            self._measure_layers(traced, range(1))
            return self._assembled(traced, partial=False)
        traced = replace(traced, checkpoints=tuple(self._at_checkpoints()))
        traced = self._with_noise(traced)
        self._measure_layers(traced, range(self.seeds))
        if self._has_time(traced):
            self.derivations = tuple(self._derivations(traced))
        self.pricing.restore()
        if self._has_time(traced):
            traced = self._with_whole_steps(traced)
        if not self._has_time(traced):
            note = f"time was up: errors were measured on {counted(self.seeds, 'batch')}"
            traced = replace(traced, notes=(*traced.notes, note))
        return calibrated(self._assembled(traced, partial=False), self.calibration)

    def _has_time(self, traced: Profile) -> bool:
        """Return whether there is time left besides that which the times of steps take."""
        assert traced.step_ms is not None
        return time.monotonic() + _TIMED_STEPS * traced.step_ms / 1e3 < self.end

    @property
    def priced_on(self) -> range:
        """Numbers of the batches that make prices: all but the first, which screens, if there are others."""
        return range(1, self.seeds) or range(1)

    @property
    def _price_draws(self) -> list[int]:
        return [self.pricing.draws[number] for number in self.priced_on]

    def _with_noise(self, traced: Profile) -> Profile:
        """Return the profile with the noise of the batches."""
        clock, names = clock_of(self.workload.device), (*traced.timeline.modules, *traced.parts)
        self.watch = BlockWatch(self.model, names, clock, module_options(self.options))
        joint = JointError(self.workload, self.model)
        with self.watch.watching():
            joint.take_first_steps()
            for draw in range(_WATCHED_STEPS):
                joint.exact_gradient(draw)
        goes_on = partial(self._has_time, traced)
        noise = noise_of_steps(joint, fewest=self.seeds, show=self.show, goes_on=goes_on)
        self.pricing = replace(self.pricing, own=noise.own, slices=noise.slices)
        notes = (*traced.notes, *joint.notes, *noise.own.notes)
        return replace(traced, gradient_noise=noise.relative, parameters=noise.own.parameters, notes=notes)

    def _with_whole_steps(self, traced: Profile) -> Profile:
        """Return the profile with what whole gradients show: the floor of errors, and interaction."""
        own = self.pricing.own
        floor = JointError(self.workload, self.model, own=own).floor(self._price_draws[0])
        policies = {bits: policy for bits in (*LOW_BITS, WHOLE_BITS) for policy in self._uniform(bits)}
        measured: dict[int, list[float]] = {bits: [] for bits in policies}
        modules = ModulePricing(self.watch, whole(traced.timeline.modules))
        tiled, forwards = traced.tiled, self.workload.accumulation
        parts = ModulePricing(self.watch, traced.parts)
        draws = self._price_draws[:_INTERACTION_DRAWS]
        for number, draw in enumerate(draws):
            self.show(f"errors of whole policies, batch {number + 1} of {len(draws)}", number / len(draws))
            joint = JointError(self.workload, self.model, own=own)  # caches the exact gradient of this draw
            for bits, policy in policies.items():
                measured[bits] += [error.ratio for error in joint.errors(policy, [(draw, 0)])]
            if number == 0:
                modules.measure(joint, draw)
                parts.measure(joint, draw)
        priced = self._assembled(traced, partial=True)
        self.calibration = calibration(priced, policies, measured)
        priced = calibrated(priced, self.calibration)
        return replace(
            traced,
            error_floor=floor.ratio,
            modules=tuple(modules.entries(priced, forwards)),
            tiled=None if tiled is None else replace(tiled, modules=tuple(parts.entries(priced, forwards))),
            interaction=tuple(interactions(priced, policies, measured)),
        )

    def _at_checkpoints(self) -> Iterator[AtCheckpoint]:
        """Yield noise and the error of uniform 4 bits at each checkpoint; first, as a file may be wrong."""
        uniform = Policy.uniform(level=16)
        with preserved(self.model, None, self.again):
            for entry in at_checkpoints(self.workload, self.model, uniform, batches=_CHECKPOINT_DRAWS):
                self.show(f"gradient noise at {entry.checkpoint}", 0.0)
                yield entry

    def _uniform(self, bits: int) -> Iterator[Policy]:
        """Yield the uniform policy of an option with these bits, if there is one."""
        options = [option for option in self.options if _is_plain(option) and option.level == 2**bits]
        if options:
            option = min(options, key=lambda option: abs((option.group_size or 0) - REFERENCE_GROUP))
            yield Policy.uniform(option.level, group_size=option.group_size)

    def _traced_profile(self, restore: Callable[[], None]) -> Profile:
        self.show("tracing a step", 0.0)
        longest = longest_batch(self.workload)
        self.draw = longest.draw
        self.workload.take_step(self.model, longest.batch, self.optimizer)
        looked = look(self.workload, self.model, longest)
        self.workload = looked.workload
        step_ms = self._timer(restore).plain_ms(longest.batch, 3)
        tracer = StepTracer(self.workload, self.model, self.optimizer, restore)
        traced = traced_without_memory(tracer, longest, step_ms) or TracedWorkload(tracer, longest)
        self.pricing = Pricing(
            self.workload,
            self.model,
            self.options,
            traced.rows,
            traced.timeline,
            range(self.seeds),
            OwnNoise(()),
        )
        profile = traced.profile(step_ms, notes=(*self._notes(), *looked.notes), resume=self._request())
        profile, self.others = with_other_steps(profile, tracer, looked)
        return profile

    def _notes(self) -> tuple[str, ...]:
        """Return notes on a batch size that was halved, and on an optimizer that rounding disturbs."""
        size, wanted = self.workload.batch_size, self.wanted_batch_size
        halved = f"out of memory at batch size {wanted}: profiled at {size} instead"
        notes = None if size == wanted else halved, advice(self.optimizer)
        return tuple(filter(None, notes))

    def _measure_layers(self, traced: Profile, numbers: range) -> None:
        """Measure the options of the traced step's layers on batches, of others in steps that run them."""
        self._measure_options(traced, numbers)
        for step, rows in self.others.items():
            self.measured |= self.pricing.of_skipped(traced, step, rows, self.measured)

    def _measure_options(self, traced: Profile, numbers: range) -> None:
        """Measure the options of all groups of layers on batches, and save the partial profile regularly."""
        todo = [
            (number, group)
            for number in numbers
            for group in traced.groups
            if traced.skipped.isdisjoint(group)
            and any(self._prices(name).batches <= number for name in group)
        ]
        sensitivity: Sensitivity | None = None
        saved = start = time.monotonic()
        wait = SAVE_EVERY_S
        for count, (number, group) in enumerate(todo, 1):
            if self.options and (sensitivity is None or sensitivity.seed != number):
                if number and not self._has_time(traced):
                    self.seeds = number
                    break
                sensitivity = None  # frees the graph of the batch before
                sensitivity = self.pricing.record(number)
            earlier = {name: self.measured[name] for name in group if name in self.measured}
            for name, fresh in self.pricing.of_group(traced, group, sensitivity, earlier).items():
                self.measured[name] = self._prices(name).extended(fresh)
            now = time.monotonic()
            left = (now - start) / count * (len(todo) - count)
            part = f"batch {number} of {numbers[-1]}" if number else "the first batch"
            self.show(f"gradient errors on {part}, {left:.0f} s left of these", count / len(todo))
            if now - saved > wait or count == len(todo):
                self._save(self._assembled(traced, partial=True))
                saved = time.monotonic()
                wait = max(SAVE_EVERY_S, (saved - now) / SAVE_SHARE)

    def _derivations(self, traced: Profile) -> Iterator[Derivation]:
        """Yield the prices of what is stored while others derive from it."""
        if not any(span.sources for span in traced.timeline.kept):
            return
        self.show("errors of what is derived", 0.0)
        priced = self._assembled(traced, partial=True)
        for reach, options in self.pricing.of_derived(traced, self.priced_on[0]).items():
            continued_ = tuple([self._continued(option, priced, reach) for option in options])
            yield Derivation(reach.layers, reach.takers, reach.sources, continued_)

    def _continued(self, option: Option, priced: Profile, reach: Reach) -> Option:
        """Return an option of a derivation with errors on all batches."""
        layers = (priced.layer(name).like(option.settings) for name in reach.names)
        own = [like.price_ratios for like in layers if like is not None]
        return continued(option, own) if own and option.ratios else option

    def _timed(self, profile: Profile, restore: Callable[[], None], seconds: float) -> Profile:
        """Return the profile with the times of steps, if options were priced; see `StepTimer.times`."""
        settings = timed_settings(self.options)
        if settings is None:
            return profile
        with unnoticed():  # a layer may have calls for which the timed settings have no effect
            # On the traced batch: others may lack calls of it (losses that loop over targets).
            policies = timed_policies(profile, settings)
            times = self._timer(restore).times(policies, seconds, self.show, draw=self.draw)
        return with_times(profile, times, settings)

    def _timer(self, restore: Callable[[], None]) -> StepTimer:
        return StepTimer(self.workload, self.model, self.optimizer, restore, clock_of(self.workload.device))

    def _prices(self, name: str) -> LayerPrices:
        return self.measured.get(name, LayerPrices())

    def _assembled(self, traced: Profile, *, partial: bool) -> Profile:
        priced = ((layer, self._prices(layer.name)) for layer in traced.layers)
        layers = [replace(layer, options=one.options, shares=one.shares) for layer, one in priced]
        return replace(
            traced,
            layers=tuple(layers),
            ties=tuple([replace(tie, joint=self._prices(tie.layers[0]).joint) for tie in traced.ties]),
            derivations=self.derivations,
            partial=partial,
            amplifications=self.pricing.amplifications.rows if partial else (),
        )

    def _resumed(self, traced: Profile) -> dict[str, LayerPrices]:
        """Return what an interrupted run of the same request has measured."""
        if self.path is None or not Path(self.path).exists():
            return {}
        try:
            earlier = Profile.load(self.path)
        except RunError:
            return {}
        if not earlier.partial or earlier.resume != traced.resume:
            return {}
        self.pricing.amplifications.measured = Amplifications(earlier.amplifications).measured
        joint = {name: tie.joint for tie in earlier.ties for name in tie.layers}
        return {
            layer.name: LayerPrices(layer.options, joint.get(layer.name, ()), layer.shares)
            for layer in earlier.layers
            if layer.options
        }

    def _request(self) -> str:
        """Return a hash of everything that the measurements depend on."""
        options = [option.to_dict() for option in self.options]
        parts = [self.workload.description, options, self.seeds, torch.__version__]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _save(self, profile: Profile) -> None:
        if self.save is not None:
            self.save(profile)
        elif self.path is not None:
            profile.save(self.path)


def _is_plain(option: LayerSettings) -> bool:
    return bool(kind(option) == kind(LayerSettings()))
