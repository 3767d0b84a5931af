"""Fake steps of a workload under a policy, traced at any batch size: the bytes of the real step.

What is hard: reserved memory depends on what happened before. So for CUDA the simulated allocator sees the
weights, a first step, and the second one, which is traced. Each batch size starts with a model of its own, so
that no size depends on which others were asked before.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mesa_tune.errors import MesaTuneError
from mesa_tune.measure.cuda.allocator import AllocatorMeter
from mesa_tune.measure.cuda.cuda_model import cuda_functions, update_all_at_once
from mesa_tune.measure.draws import FURTHER, LongestBatch, longest_batch
from mesa_tune.measure.memory.meter import Meter, tensors_in
from mesa_tune.measure.memory.step_trace import StepTrace
from mesa_tune.measure.memory.traced_steps import UNATTRIBUTED
from mesa_tune.measure.parallel import Parallelization
from mesa_tune.measure.tracing import StepTracer, Tags, TracedWorkload
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.profiles.other_entries import OtherStep
from mesa_tune.profiles.prediction import GRADIENTS, SAVED, WORKING, Peak
from mesa_tune.profiles.profile import Profile
from mesa_tune.workload.fake import FakeWorkload, fake_copy, faked
from mesa_tune.workload.preserve import preserved
from mesa_tune.workload.session import session
from mesa_tune.workload.user_code import explaining
from mesa_tune.workload.workload import Workload

SLOW_MS = 300.0
"""Real steps that take longer are traced without memory, unless fake ones take longer still."""
_SAME = 0.003
"""Share of a plain step's bytes by which a fake one may differ."""
_ALIKE = 0.001
"""Share of its peak by which a moment of a fake step may differ from that of a real one."""


@dataclass(frozen=True)
class PolicyStep:
    """A traced step: the bytes before it by kind, and the most that it needs.

    `reserved`: on CUDA what an allocator reserves for it; on the CPU the peak. `libraries`: what oneDNN keeps
    of it, on the CPU.
    """

    kinds: Mapping[str, int]
    peak: int
    reserved: int
    libraries: int
    trace: StepTrace
    tags: Tags

    @property
    def static(self) -> int:
        """The bytes before the step."""
        return sum(self.kinds.values())

    @property
    def tensors(self) -> int:
        """The most bytes of tensors alone."""
        return self.static + self.trace.tensor_peak()

    @property
    def at_peak(self) -> Peak:
        """The slot with the most bytes, and their kinds."""
        slot = max(self.trace.slots, key=lambda slot: slot.high)
        saved = sum(
            lifetime.bytes
            for number, lifetime in self.trace.lifetimes.items()
            if lifetime.birth <= slot.moment < lifetime.death and self.trace.is_saved(number)
        )
        left = self.peak - self.static
        born = {SAVED: min(saved, left), WORKING: max(0, left - saved)}
        return Peak(slot.layer, slot.phase, {**self.kinds, **born})

    def rows(self) -> list[tuple[str, str, int, int]]:
        """Return layer, tag, number of tensors and bytes of what each layer owns when the forward ends."""
        owners = _owners(self.trace)
        sizes: dict[str, list[int]] = {}
        for number, lifetime in self.trace.lifetimes.items():
            if self.trace.is_counted(number) and number not in self.trace.losses:
                sizes.setdefault(owners.get(number, UNATTRIBUTED), []).append(lifetime.bytes)
        return [
            (layer, self.tags.get(layer, ("other", 0))[0], len(each), sum(each))
            for layer, each in sizes.items()
        ]


def _owners(trace: StepTrace) -> dict[int, str]:
    """Return the layer that owns each storage."""
    owners = {number: item.layers[0] for number, item in trace.plain.items()} | trace.side
    for item in trace.coded.values():
        owners.update(dict.fromkeys(item.parts, item.layers[0]))
    return owners


@dataclass(frozen=True)
class FakeSteps:
    """The steps of `fake` under `policy`, as on the CPU, or as CUDA's kernels and allocator would.

    `parallel`: the model is wrapped for several processes, and the steps are those of the first one.
    """

    fake: FakeWorkload
    policy: Policy
    cuda: bool
    parallel: Parallelization | None = None
    _known: dict[tuple[int, int | None], PolicyStep] = field(default_factory=dict, compare=False)

    def at(self, batch_size: int, length: int | None = None) -> PolicyStep:
        """Return the step at this batch size, and length of samples; each is traced once."""
        sizes = batch_size, length or self.fake.length
        if sizes not in self._known:
            self._known[sizes] = self._traced(replace(self.fake, batch_size=sizes[0], length=sizes[1]))
        return self._known[sizes]

    def _traced(self, fake: FakeWorkload) -> PolicyStep:
        with ExitStack() as stack:
            stack.enter_context(fake.faking())
            if self.cuda:
                stack.enter_context(cuda_functions())
            model, batch = fake.build(), longest_batch(fake).batch
            meter = Meter()
            if self.parallel is not None:
                model = stack.enter_context(self.parallel.wrapped(model, meter))
            older = chain(model.parameters(), model.buffers(), tensors_in(batch))
            outer = AllocatorMeter() if self.cuda else Meter()
            outer.count_older(older, meter.live_storages())
            stack.enter_context(outer)
            optimizer = fake.make_optimizer(model)
            if self.cuda:
                update_all_at_once(optimizer)
            first = 0
            for _ in range(1 if self.parallel is None else 2):  # DDP orders its buckets in one of the first
                before = outer.live_bytes
                with session(model, self.policy, min_elements=MIN_ELEMENTS) as running:
                    outer.reset_peak()
                    own = outer.live_bytes - before
                    with fake.same_random_state():
                        fake.stepper(optimizer).run(model, batch, running.forward)
                first = max(first, outer.peak - own)
            tracer = StepTracer(fake, model, optimizer, model.zero_grad)
            trace, tags = tracer.trace(batch, self.policy, second=True, min_elements=MIN_ELEMENTS)
            gc.collect()
            kinds = tracer.static_bytes(batch)
            kinds[GRADIENTS] += meter.live_since(0, without=tracer.static(batch))  # DDP's buckets
        if isinstance(outer, AllocatorMeter):
            served = outer.allocator
            return PolicyStep(kinds, served.peak_allocated, served.reserved, 0, trace, tags)
        peak = max(first, sum(kinds.values()) + trace.peak())
        return PolicyStep(kinds, peak, peak, trace.libraries.nbytes, trace, tags)


@dataclass
class PolicyTracer:
    """Traces the steps of a workload under any policy at one batch size, as on the CPU.

    On fake tensors, if those of a plain step take `plain_peak`, as real ones do. Else the step is a real one,
    the second of two; so it is for the workload of a running script, whose functions must not meet fake
    tensors. What cannot be faked may decide by values (experts): the step is the dearest of `FURTHER` more
    batches, and of `others`, which run other layers. `fits`: the largest batch size of which real steps fit.
    """

    workload: Workload
    batch_size: int
    plain_peak: int
    fits: int = 0
    others: tuple[OtherStep, ...] = ()

    @staticmethod
    def of(workload: Workload, profile: Profile, batch_size: int) -> PolicyTracer:
        """Return the tracer that believes fake steps which take what the profile says."""
        plain = profile.timeline.at(batch_size).peak_bytes({})
        workload = replace(workload, random_state=profile.random_state)
        return PolicyTracer(workload, batch_size, plain, profile.batch_size, profile.others)

    def trace(self, policy: Policy) -> PolicyStep | None:
        """Return the step under `policy`; None on a GPU, and where neither kind of step is possible."""
        if self.workload.device != "cpu":
            return None
        if self._is_believed:
            return self._faked(policy)
        return self._real(policy) if self.batch_size <= self.fits else None

    @cached_property
    def _is_believed(self) -> bool:
        if self.workload.path is None or self.others:
            return False
        plain = self._faked(Policy.parse(""))
        return plain is not None and abs(plain.peak / self.plain_peak - 1) <= _SAME

    def _faked(self, policy: Policy) -> PolicyStep | None:
        fake, real = FakeWorkload.of(self.workload), self._model
        try:
            fake = replace(fake, model=lambda: fake_copy(fake.mode, real))
            return FakeSteps(fake, policy, cuda=False).at(self.batch_size)
        except (MesaTuneError, RuntimeError):
            return None

    def _real(self, policy: Policy) -> PolicyStep:
        return max((self._real_on(policy, *draw) for draw in self._draws), key=lambda step: step.peak)

    def _real_on(self, policy: Policy, workload: Workload, batch: Any) -> PolicyStep:
        model = self._model
        optimizer = workload.make_optimizer(model)
        with preserved(model, optimizer) as restore:
            with workload.same_random_state():
                workload.take_step(model, batch, optimizer)  # makes the optimizer's state
            tracer = StepTracer(workload, model, optimizer, restore)
            trace, tags = tracer.trace(batch, policy, second=True, min_elements=MIN_ELEMENTS)
            kinds = tracer.static_bytes(batch)
        kinds[GRADIENTS] += trace.static_gradients
        peak = sum(kinds.values()) + trace.peak()
        return PolicyStep(kinds, peak, peak, trace.libraries.nbytes, trace, tags)

    @cached_property
    def _workload(self) -> Workload:
        same = self.workload.batch_size == self.batch_size
        return self.workload if same else self.workload.with_batch_size(self.batch_size)

    @cached_property
    def _draws(self) -> list[tuple[Workload, Any]]:
        """The longest batch, other batches if plain steps on these take other bytes, and `others`."""
        longest, work = longest_batch(self._workload), self._workload
        draws = [(work, longest.batch), *((work, batch) for _, batch in longest.further(work, FURTHER))]
        peaks = {self._real_on(Policy.parse(""), *draw).peak for draw in draws}
        others = [
            (replace(work, random_state=step.random_state), work.make_batch(draw=step.draw))
            for step in self.others
        ]
        return [*(draws if len(peaks) > 1 else draws[:1]), *others]

    @cached_property
    def _model(self) -> nn.Module:
        """The model with real tensors, which fake ones copy: a file may load weights."""
        return self.workload.build()


def traced_without_memory(tracer: StepTracer, longest: LongestBatch, step_ms: float) -> TracedWorkload | None:
    """Return the traced steps of a workload on the CPU from fake tensors; None where these are no help.

    That is where a real step, of `step_ms`, is faster than a fake one, and where two steps that are traced
    for real, a plain one and one at 4 bits, take other bytes.
    """
    if tracer.workload.device != "cpu" or step_ms < SLOW_MS:
        return None
    fake = FakeWorkload.of(tracer.workload)
    try:
        with fake.faking():
            with explaining("copy.deepcopy(model)"):
                model = fake_copy(fake.mode, tracer.model)
            optimizer = fake.make_optimizer(model)
            batch = tree_map_only(Tensor, lambda tensor: faked(fake.mode, tensor), longest.batch)
            with fake.same_random_state():
                fake.take_step(model, batch, optimizer)
            begin = time.thread_time()
            fake.take_step(model, batch, optimizer)
            if 1e3 * (time.thread_time() - begin) > step_ms:
                return None
            fakes = StepTracer(fake, model, optimizer, model.zero_grad)
            policies = (Policy.parse(""), Policy.uniform(level=16))
            traces = [fakes.trace(batch, policy)[0] for policy in policies]
        pairs = zip(traces, policies, strict=True)
        if not all(_is_alike(trace, tracer.trace(longest.batch, policy)[0]) for trace, policy in pairs):
            return None
        with fake.faking():
            return TracedWorkload(fakes, replace(longest, batch=batch))
    except MesaTuneError:
        return None


def _is_alike(fake: StepTrace, real: StepTrace) -> bool:
    """Return whether a fake step takes what the real one does, from moment to moment.

    Operators that fake tensors run in another way may take another scratch, which no peak feels.
    """
    least = _ALIKE * real.peak()
    return len(fake.slots) == len(real.slots) and all(
        (one.layer, one.phase) == (other.layer, other.phase) and abs(one.high - other.high) <= least
        for one, other in zip(fake.slots, real.slots, strict=True)
    )
