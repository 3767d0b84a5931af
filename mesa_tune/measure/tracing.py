"""Trace the steps of a workload that a timeline is built from, and make the profile of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointError

from mesa_tune.conversion.layers import Catalog, modules_by_name
from mesa_tune.conversion.sliced import has_slices
from mesa_tune.errors import MesaTuneError
from mesa_tune.measure.draws import LongestBatch, Looked
from mesa_tune.measure.memory.meter import bytes_of, gradients_of, parts_of, tensors_in, unless_out_of_memory
from mesa_tune.measure.memory.rerun_timeline import rerun_timeline
from mesa_tune.measure.memory.rows import Rows
from mesa_tune.measure.memory.skipped import skipped_layers
from mesa_tune.measure.memory.step_trace import StepTrace
from mesa_tune.measure.memory.timeline_builder import TracedPair, timeline_of
from mesa_tune.measure.memory.trace import trace_step
from mesa_tune.measure.memory.traced_steps import TracedSteps, exact_entries, tensor_entries
from mesa_tune.measure.rerun_modules.blocks import all_run_again, block_levels, rerunning, whole
from mesa_tune.measure.rerun_modules.parts import possible_parts
from mesa_tune.notice import unnoticed
from mesa_tune.policy import Policy
from mesa_tune.profiles.entries import Tie
from mesa_tune.profiles.other_entries import OtherStep
from mesa_tune.profiles.prediction import BATCH, GRADIENTS, OPTIMIZER_STATE, WEIGHTS
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.tiled_step import SLICES, TiledStep, tiling
from mesa_tune.profiles.timeline.memory_model import Timeline
from mesa_tune.workload.session import session
from mesa_tune.workload.step import Stepper
from mesa_tune.workload.workload import Workload

Tags = dict[str, tuple[str, int]]
"""Tag and index of each layer."""

Change = Callable[[Policy], Policy]
"""What is done to the policy of each traced step."""


LARGE, LEAST = 0.02, 1 << 20
"""Least share of the plain step's saved bytes, and least bytes, that make a loss large."""
_NEARLY_NONE = 1e-6
"""Share of elements or rows that a traced step leaves out, to show what this takes at most."""
_OTHERS: tuple[dict[str, Any], ...] = (
    {"quant_groups": 1},
    {"drop": _NEARLY_NONE},
    {"rows": 1 - _NEARLY_NONE},
)
"""Settings of the steps `whole`, `dropped` and `sampled`."""


def _unchanged(policy: Policy) -> Policy:
    return policy


@dataclass(frozen=True)
class StepTracer:
    """Traces steps of a model; `restore` restores its parameters."""

    workload: Workload
    model: nn.Module
    optimizer: Optimizer
    restore: Callable[[], None]

    def traced(
        self, batch: Any, batch_size: int, change: Change = _unchanged, *, few: bool = False
    ) -> tuple[TracedSteps, Tags]:
        """Return the traced steps on `batch`, of `batch_size` samples, and tag and index of each layer.

        `few`: other codecs take what the packed step does.
        """
        plain, _ = self.trace(batch, change(Policy.parse("")))
        packed, tags = self.trace(batch, change(Policy.uniform(level=16)))
        derived, _ = self.trace(batch, change(Policy.uniform(level=16, store="derive")), second=True)
        traces = [packed] * len(_OTHERS)
        if not few:
            with unnoticed():  # on some layers they have no effect
                policies = [change(Policy.uniform(level=16, **settings)) for settings in _OTHERS]
                traces = [self.trace(batch, policy)[0] for policy in policies]
        static = self.static_bytes(batch)
        static[GRADIENTS] += plain.static_gradients
        return TracedSteps(batch_size, static, plain, packed, derived, *traces), tags

    def trace(
        self, batch: Any, policy: Policy, *, second: bool = False, min_elements: int = 0
    ) -> tuple[StepTrace, Tags]:
        """Trace the first or the second step under `policy`; the first shows which layers derive from which.

        All traces start from the same weights and random state, because both decide how tokens are routed.
        Tensors of up to `min_elements` elements stay exact.
        """
        self.restore()
        with session(self.model, policy, min_elements=min_elements) as running:
            if second or self._stepper.may_keep_gradients:
                with self.workload.same_random_state():
                    self._stepper.prepare(self.model, batch, running.forward)
            with self.workload.same_random_state():
                static = self.static(batch)
                trace = trace_step(self._stepper, self.model, batch, running.forward, static)
            return trace, running.layers()

    def rows_of(self, random_state: int, draw: int) -> Rows:
        """Trace the plain and the packed step of a random state and draw, and return their rows."""
        workload = replace(self.workload, random_state=random_state)
        tracer, batch = replace(self, workload=workload), workload.make_batch(draw=draw)
        plain, _ = tracer.trace(batch, Policy.parse(""))
        packed, tags = tracer.trace(batch, Policy.uniform(level=16))
        return Rows(plain, packed, tags, Catalog.of(self.model).modules)

    def rerun_modules(self, batch: Any, plain: StepTrace) -> tuple[str, ...]:
        """Return the level of blocks that has the least peak if all of them run again; () if none can."""
        peaks: list[tuple[int, tuple[str, ...]]] = []
        for blocks in block_levels(self.model, plain):
            alone = (name for name in blocks if self._peak_again(batch, whole([name])) is not None)
            modules, peak = blocks, self._peak_again(batch, whole(blocks))
            if peak is None:
                modules = tuple(alone)
                peak = self._peak_again(batch, whole(modules)) if modules else None
            if peak is not None:
                peaks.append((peak, modules))
        return min(peaks, default=(0, ()))[1]

    def tiled_losses(self, batch: Any, plain: StepTrace, tags: Tags) -> tuple[str, ...]:
        """Return the large losses that save little if they go backward in slices."""
        losses = large_losses(plain, tags)
        if not losses:
            return ()
        try:
            trace, _ = self.trace(batch, tiling(Policy.parse(""), losses, SLICES))
        except MesaTuneError:
            return ()
        still_large = large_losses(trace, tags)
        return tuple(name for name in losses if name not in still_large)

    def parts(self, batch: Any, batch_size: int, plain: StepTrace, tags: Tags) -> dict[str, int]:
        """Return the parts of blocks that can run in slices, and in how many."""
        found = possible_parts(self.model, plain, tags, batch_size)
        if found and self._peak_again(batch, found) is None:
            found = {name: n for name, n in found.items() if self._peak_again(batch, {name: n}) is not None}
        modules = modules_by_name(self.model)
        return {name: n for name, n in found.items() if has_slices(modules[name])}

    def _peak_again(self, batch: Any, modules: Mapping[str, int]) -> int | None:
        """Return the peak of the step in which `modules` run again; None if one of them cannot."""
        try:
            trace, _ = self.trace(batch, rerunning(Policy.parse(""), modules))
        except (MesaTuneError, CheckpointError):  # such as a module that changes its input in place
            return None
        return trace.peak() if all_run_again(trace, modules) else None

    @cached_property
    def _stepper(self) -> Stepper:
        return self.workload.stepper(self.optimizer)

    def static(self, batch: Any) -> list[torch.Tensor]:
        """Return what is alive when a step begins."""
        return [tensor for tensors in self._static_kinds(batch).values() for tensor in tensors]

    def _static_kinds(self, batch: Any) -> dict[str, list[torch.Tensor]]:
        """Return what is alive when a step begins; of accumulated steps, when the last micro-batch begins.

        Gradients that the user's own step may free are not part of it.
        """
        if not self._stepper.may_keep_gradients:
            self.optimizer.zero_grad()
        return {
            WEIGHTS: [*self.model.parameters(), *self.model.buffers()],
            GRADIENTS: [] if self.workload.step else gradients_of(self.model),
            OPTIMIZER_STATE: tensors_in(self.optimizer.state),
            BATCH: tensors_in(batch),
        }

    def static_bytes(self, batch: Any) -> dict[str, int]:
        """Return the bytes of each kind; a storage of two kinds is counted as the first."""
        totals = accumulate(self._static_kinds(batch).values())
        sizes = [0, *(bytes_of(tensors) for tensors in totals)]
        return dict(
            zip(self._static_kinds(batch), (after - before for before, after in pairwise(sizes)), strict=True)
        )


class TracedWorkload:
    """Traced steps of a workload at its batch size and at half of it, and the timelines that they make.

    `variants`: also trace steps of other codecs, in which blocks run again, and in which large losses have
    slices.
    """

    def __init__(self, tracer: StepTracer, longest: LongestBatch, *, variants: bool = True) -> None:
        self.workload, self.tracer, self.longest = tracer.workload, tracer, longest
        self.notes = longest.notes
        batch_size = self.workload.batch_size
        self.few = not variants
        self.large, tags = tracer.traced(longest.batch, batch_size, few=self.few)
        if batch_size > 1:
            self.small = self._smaller(batch_size // 2)
        else:
            # If two samples do not fit, the timeline has one batch size, and no other can be planned for.
            self.small = unless_out_of_memory(lambda: self._smaller(2)) or self.large
        self.catalog = Catalog.of(tracer.model)
        self.rows = Rows(self.large.plain, self.large.packed, tags, self.catalog.modules)
        plain = self.large.plain
        self.modules = tracer.rerun_modules(longest.batch, plain) if variants else ()
        self.pair = TracedPair(self.large, self.small)
        self.timeline = self._timeline(self.pair, _unchanged, whole(self.modules))
        with unnoticed():  # slices may fail or have no effect
            self.tiled = unless_out_of_memory(lambda: self._tiled(tags)) if variants else None

    def _timeline(self, traced: TracedPair, change: Change, modules: Mapping[str, int]) -> Timeline:
        """Return the timeline, with modules that can run again if there are any and memory suffices."""
        hooked, names = self.rows.hooked, tuple(modules)

        def again(policy: Policy) -> Policy:
            return rerunning(change(policy), modules)

        pair = unless_out_of_memory(lambda: self._pair(again, few=True)) if modules else None
        return timeline_of(traced, hooked) if pair is None else rerun_timeline(traced, pair, names, hooked)

    def _tiled(self, tags: Tags) -> TiledStep | None:
        """Return the step in which large losses and parts of blocks have slices; None if there are none."""
        batch, plain = self.longest.batch, self.large.plain
        losses = self.tracer.tiled_losses(batch, plain, tags)
        parts = self.tracer.parts(batch, self.large.batch_size, plain, tags)
        if not losses and not parts:
            return None
        change: Change = _unchanged
        pair, heads = self.pair, tuple[str, ...]()
        if losses:
            change = partial(tiling, losses=losses, slices=SLICES)
            pair = self._pair(change)
            heads = heads_of(losses, pair.large.plain)
        timeline = self._timeline(pair, change, parts or whole(self.modules))
        parts = parts if timeline.modules else {}
        if not losses and not parts:
            return None
        return TiledStep(losses, heads, SLICES, timeline, parts=parts)

    def _pair(self, change: Change, *, few: bool = False) -> TracedPair:
        """Return the traced steps at the batch sizes of unchanged ones."""
        size, smaller = self.pair.batch_sizes
        large, _ = self.tracer.traced(self.longest.batch, size, change, few=few)
        if smaller == size:
            return TracedPair(large, large)
        batch = self.workload.make_batch(smaller, draw=self.longest.draw)
        return TracedPair(large, self.tracer.traced(batch, smaller, change, few=few)[0])

    def _smaller(self, size: int) -> TracedSteps:
        """Return the traced steps of the same draw at another batch size."""
        batch = self.workload.make_batch(size, draw=self.longest.draw)
        self.notes += self.longest.notes_on(batch, self.workload.batch_size, size)
        return self.tracer.traced(batch, size, few=self.few)[0]

    def profile(self, step_ms: float | None, *, notes: tuple[str, ...] = (), resume: str = "") -> Profile:
        """Return the profile of bytes; no layer has options yet, and it is partial."""
        tensors = tensor_entries(self.large.plain)
        described, static = self.workload.description, sum(self.large.static.values())
        return Profile(
            model=described["model"],
            fingerprint=described["fingerprint"],
            layers_fingerprint=self.catalog.fingerprint,
            device=self.workload.device,
            autocast=self.workload.autocast,
            batch_size=self.workload.batch_size,
            seed=self.workload.seed,
            random_state=self.workload.random_state or 0,
            torch=torch.__version__,
            partial=True,
            static_bytes=static,
            saved_bytes=sum(tensor.bytes for tensor in tensors) + self.rows.unattributed,
            peak_bytes=static + self.large.plain.peak(),
            step_ms=step_ms,
            tensors=tuple(tensors),
            layers=tuple(self.rows.entries()),
            timeline=self.timeline,
            tiled=self.tiled,
            ties=tuple(Tie(group, ()) for group in self.rows.groups()),
            exact=tuple(exact_entries(self.large, {name: tag for name, (tag, _) in self.rows.tags.items()})),
            notes=(*notes, *self.notes, *self._estimated()),
            resume=resume,
        )

    def _estimated(self) -> Iterator[str]:
        """Yield a note for each layer whose bytes, or near which peaks, are estimates."""
        for small in self.timeline.with_small_views():
            why = "a tensor too small for hooks may be a view of a larger one"
            yield f"bytes of {small!r} are estimates: {why}"
        excess, layer = self.pair.excess()
        if excess > 0:
            where = "peaks between layers" if layer is None else f"peaks near {layer!r}"
            yield f"{where} are estimates: saved tensors exceed the traced step by {excess} bytes"


def with_other_steps(
    profile: Profile, tracer: StepTracer, looked: Looked
) -> tuple[Profile, dict[OtherStep, Rows]]:
    """Return the profile with the layers that only other steps run, and the rows of each of these steps."""
    layers = [replace(layer, share=looked.shares.get(layer.module, 1.0)) for layer in profile.layers]
    ties, rows_of = list(profile.ties), dict[OtherStep, Rows]()
    for state, draw, share in looked.others:
        rows = tracer.rows_of(state, draw)
        skipped = list(skipped_layers(layers, rows, share))
        names = tuple(layer.name for layer in skipped)
        ties += [Tie(group) for group in rows.groups() if set(group) <= set(names)]
        rows_of[OtherStep(state, draw, share, names)] = rows
        layers += skipped
    notes = (*profile.notes, *(step.note for step in rows_of))
    full = replace(profile, layers=tuple(layers), ties=tuple(ties), others=tuple(rows_of), notes=notes)
    return full, rows_of


def rebuilding(workload: Workload, model: nn.Module) -> Callable[[], nn.Module] | None:
    """Return what builds a model with the parameters of `model`, to restore them without copies.

    None if `model()` does not: it may return one model again and again, or parameters of no seed. None on a
    GPU, too: copies are then on the host.
    """
    if workload.device != "cpu":
        return None
    other = workload.build()
    ours, others = (
        [part for each in built.parameters() for part in parts_of(each)] for built in (model, other)
    )
    pairs = list(zip(ours, others, strict=False))
    equal = all(torch.equal(one, again) and one.data_ptr() != again.data_ptr() for one, again in pairs)
    return workload.build if equal and other is not model else None


def heads_of(losses: Sequence[str], tiled: StepTrace) -> tuple[str, ...]:
    """Return the layers that made the logits of `losses`: in the `tiled` step, both save the same input."""
    sharing = [item.layers for item in tiled.plain.values() if set(losses) & set(item.layers)]
    return tuple(dict.fromkeys(name for layers in sharing for name in layers if name not in losses))


def large_losses(plain: StepTrace, tags: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """Return the losses that save a large part of what the plain step saves."""
    saved: dict[str, int] = {}
    for number, item in plain.plain.items():
        layer = item.layers[0]
        if plain.is_counted(number) and tags.get(layer, ("other", 0))[0] == "loss":
            saved[layer] = saved.get(layer, 0) + plain.lifetimes[number].bytes
    least = max(LEAST, LARGE * plain.saved_bytes)
    return tuple(name for name, size in saved.items() if size >= least)
