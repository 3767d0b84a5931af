"""`mt.profile`: the steps that a profile is made of, and where it is saved between them."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mesa_tune.conversion.layers import Catalog
from mesa_tune.errors import RunError, WorkloadError
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiler.account import TracedPair, exact_entries, tensor_entries
from mesa_tune.profiler.derivation import Derivable, Links
from mesa_tune.profiler.entries import Derivation, LayerEntry, Option, Tie, full_grid, in_reference_groups
from mesa_tune.profiler.gradient import Price, Sensitivity
from mesa_tune.profiler.ledger import timeline
from mesa_tune.profiler.meter import bytes_of, tensors_in
from mesa_tune.profiler.profile import Profile
from mesa_tune.profiler.rows import Rows
from mesa_tune.profiler.step_trace import StepTrace
from mesa_tune.profiler.trace import observing, trace_step
from mesa_tune.workload.checkpoints import without_checkpoints
from mesa_tune.workload.clock import median_ms
from mesa_tune.workload.preserve import preserved
from mesa_tune.workload.session import RawConversion, session
from mesa_tune.workload.user_code import is_out_of_memory, located, seeded
from mesa_tune.workload.workload import Workload

SAVE_EVERY_S = 10.0

Known = dict[str, tuple[tuple[Option, ...], tuple[float, ...]]]
"""Layer -> its options, and the joint ratios of its tie."""
Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done (0 to 1)."""


def profile(
    workload: Workload,
    *,
    options: Sequence[LayerSettings] | None = None,
    seeds: int = 2,
    path: str | Path | None = None,
    progress: bool | Progress = False,
    save: Callable[[Profile], object] | None = None,
) -> Profile:
    """What a step of `workload` keeps for backward, and what each way of storing it does to the gradient.

    `options` are the settings to try on each layer (default: the full grid; `[]`: bytes only), `seeds` the
    rounding seeds of each. With `path` the profile is saved there as it grows; a partial one of the same
    workload and options is taken up again; `save` writes it in another way. A batch that does not fit is
    halved until it does, and `notes` say so.
    The model, its optimizer and the random generators are afterwards bit for bit as before.

    Raises WorkloadError for a workload that cannot be trained, RunError for a file that cannot be written.
    """
    wanted = full_grid() if options is None else list(options)
    if seeds < 1:
        raise ValueError(f"`seeds >= 1` must hold, but got (seeds={seeds})")
    show = progress if callable(progress) else (_print_progress if progress else _ignored)
    model = workload.build()
    optimizer = workload.make_optimizer(model)
    return _Profiling(workload, model, optimizer, wanted, seeds, path, save, show).run()


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

    def run(self) -> Profile:
        """The profile at the wanted batch size, halved until memory suffices for all that is measured."""
        self.wanted = self.workload.batch_size
        while True:
            made = self._unless_out_of_memory()
            if made is not None:
                return made
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.workload = self.workload.with_batch_size(self.workload.batch_size // 2)

    def _unless_out_of_memory(self) -> Profile | None:
        try:
            return self._profiled()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self.workload.batch_size == 1:
                raise RunError(
                    f"out of memory on {self.workload.device} at batch size 1: not even one sample fits\n"
                    "use a machine with more memory or a smaller model; `--fast` needs no less"
                ) from error
        # Outside the handler: the error holds the frames, and they the tensors.
        return None

    def _profiled(self) -> Profile:
        # Tracing takes real optimizer steps; errors are those of the model as it was given.
        with preserved(self.model, self.optimizer) as self.put_back:
            found = self._traced_profile()
        self.known = self._resumed(found)
        self.derivations: tuple[Derivation, ...] = ()
        try:
            with preserved(self.model, self.optimizer):
                for done in self._measured(found):
                    self.known = done
                self.derivations = tuple(self._derivations(found))
        except KeyboardInterrupt:
            self._save(self._assembled(found, partial=True))
            raise
        complete = self._assembled(found, partial=False)
        self._save(complete)
        return complete

    def _traced_profile(self) -> Profile:
        self.show("tracing a step", 0.0)
        self._step(self.workload.make_batch())
        batch_size = self.workload.batch_size
        self.large, places = self._traced(batch_size)
        small = self._traced(batch_size // 2)[0] if batch_size > 1 else self._traced_two_samples()
        self.catalog = Catalog.of(self.model)
        self.rows = Rows(self.large, places, self.catalog.modules)
        self.timeline = replace(timeline(self.large, small), hooked=self.rows.hooked)
        return self._profile()

    def _traced_two_samples(self) -> TracedPair:
        """Two beside one; where they do not fit, one again: then no other batch can be planned for."""
        try:
            return self._traced(2)[0]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return self.large

    def _notes(self) -> tuple[str, ...]:
        """What the reader should know: what was done to the batch size, and which bytes are estimates."""
        found = self.workload.batch_size
        halved = f"out of memory at batch size {self.wanted}: profiled at {found} instead"
        estimated = (
            f"bytes of {layer!r} are estimates: what hooks find too small may hold more than itself"
            for layer in self.timeline.with_scraps()
        )
        return (*([] if found == self.wanted else [halved]), *estimated)

    def _step(self, batch: Any) -> None:
        self.workload.take_step(self.model, batch, self.optimizer)

    def _traced(self, batch_size: int) -> tuple[TracedPair, dict[str, tuple[str, int]]]:
        batch = self.workload.make_batch(batch_size)
        plain, _ = self._trace(batch, Policy.parse(""))
        packed, layers = self._trace(batch, Policy.uniform(level=16))
        derived, _ = self._trace(batch, Policy.uniform(level=16, store="derive"), settled=True)
        return TracedPair(batch_size, bytes_of(self._static(batch)), plain, packed, derived), layers

    def _trace(
        self, batch: Any, policy: Policy, *, settled: bool = False
    ) -> tuple[StepTrace, dict[str, tuple[str, int]]]:
        """A traced step under `policy`; `settled`: after one that shows who derives from whom.

        All start from the same weights and dice: where a token goes must not differ between them.
        """
        self.put_back()
        with session(self.workload, self.model, policy) as running:
            if settled:
                with self._dice():
                    running.loss(batch).backward()
            with self._dice():
                trace = trace_step(
                    lambda: self.optimizer.zero_grad(set_to_none=True),
                    lambda: running.loss(batch),
                    lambda: _ignored(self.optimizer.step()),
                    self._static(batch),
                )
            return trace, running.layers()

    def _static(self, batch: Any) -> list[torch.Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *tensors_in(self.optimizer.state),
            *tensors_in(batch),
        ]

    def _profile(self) -> Profile:
        """The profile of bytes: no layer has options yet."""
        tensors = tensor_entries(self.large.plain)
        batch = self.workload.make_batch()
        step_ms = median_ms(lambda: self._step(batch), 3, self.workload.device)
        described = self.workload.description
        return Profile(
            model=described["model"],
            fingerprint=described["fingerprint"],
            layers_fingerprint=self.catalog.fingerprint,
            device=self.workload.device,
            autocast=self.workload.autocast,
            batch_size=self.workload.batch_size,
            seed=self.workload.seed,
            torch=torch.__version__,
            partial=True,
            static_bytes=self.large.static,
            saved_bytes=sum(tensor.bytes for tensor in tensors) + self.rows.unattributed,
            peak_bytes=self.large.static + self.large.plain.peak(),
            step_ms=step_ms,
            tensors=tuple(tensors),
            layers=tuple(self.rows.entries()),
            timeline=self.timeline,
            ties=tuple(Tie(group, ()) for group in self.rows.groups()),
            exact=tuple(
                exact_entries(self.large, {name: tag for name, (tag, _) in self.rows.places.items()})
            ),
            notes=self._notes(),
            resume=self._request(),
        )

    def _measured(self, found: Profile) -> Iterator[Known]:
        """Measures group after group; yields all options known so far, and saves them now and then."""
        tied = {name: tie.layers for tie in found.ties for name in tie.layers}
        groups = list(dict.fromkeys(tied.get(layer.name, (layer.name,)) for layer in found.layers))
        todo = [group for group in groups if any(name not in self.known for name in group)]
        if not todo:
            return
        sensitivity = self._recorded() if self.options else None
        saved, start = time.monotonic(), time.monotonic()
        for count, group in enumerate(todo):
            known = self.known = self.known | self._group_options(found, group, sensitivity)
            spent = time.monotonic() - start
            left = spent / (count + 1) * (len(todo) - count - 1)
            self.show(
                f"gradient errors, layer {count + 1} of {len(todo)}, {left:.0f} s left",
                (count + 1) / len(todo),
            )
            if time.monotonic() - saved > SAVE_EVERY_S:
                self._save(self._assembled(found, partial=True))
                saved = time.monotonic()
            yield known

    def _derivations(self, found: Profile) -> Iterator[Derivation]:
        """Prices of what is stored while others derive from it; all others store exactly."""
        if not self.options or not any(item.sources for item in self.timeline.kept):
            return
        made = self._links().made
        producers = {name for one in made.values() for name in one.recipe.layers()}
        sensitivity = self._recorded(producers)
        step = Derivable(sensitivity.recording.replays, made)
        tied = {name: tie.layers for tie in found.ties for name in tie.layers}
        groups = dict.fromkeys(tied.get(layer.name, (layer.name,)) for layer in found.layers)
        reaches = list(step.reaches(groups))
        for count, reach in enumerate(reaches, 1):
            grid = in_reference_groups(self._grid(reach.layers))
            prices = sensitivity.together(step.calls(reach), grid)
            entry = found.layer(reach.layers[0])
            options = [self._option(entry, *pair) for pair in zip(grid, prices, strict=True)]
            yield Derivation(reach.layers, reach.takers, reach.sources, tuple(options))
            self.show(f"errors of what is derived, {count} of {len(reaches)}", count / len(reaches))

    def _links(self) -> Links:
        """Which kept tensors a step that derives all it can makes again, and of what."""
        batch, links = self.workload.make_batch(), Links()
        policy = Policy.uniform(level=16, store="derive")
        with session(self.workload, self.model, policy) as running:
            running.loss(batch).backward()
            with self._dice(), observing(links):
                running.loss(batch)
        return links

    def _dice(self) -> AbstractContextManager[None]:
        """The random state of every step: dropout masks of one must fit another's."""
        return seeded(self.workload.seed, self.workload.device)

    def _recorded(self, producers: Collection[str] = ()) -> Sensitivity:
        """The exact step, recorded; `producers` keep in it what they keep when others derive from them."""
        batch = self.workload.make_batch()
        sensitivity = Sensitivity(self.model.parameters(), self.seeds)
        running = session(self.workload, self.model, Policy.parse(""), kind=RawConversion)
        with running as raw, observing(sensitivity.recording):
            for conversion in (raw.conversion, raw.losses):
                conversion.producers.update(producers)
            # The gradient is the same with checkpoints, but each part would go backward from its second run.
            with self._dice(), without_checkpoints():
                loss = raw.loss(batch)
        sensitivity.record(loss)
        if not sensitivity.norm:
            raise WorkloadError(
                f"{located(self.workload.loss, self.workload.path)}: loss() gives every parameter the "
                "gradient zero, so no error can be measured against it\n"
                "check that the loss depends on the parameters, or give the model a first training step"
            )
        return sensitivity

    def _group_options(
        self, found: Profile, group: tuple[str, ...], sensitivity: Sensitivity | None
    ) -> Known:
        entries = {name: found.layer(name) for name in group}
        grid = self._grid(group)
        if sensitivity is None or not grid:
            return {name: ((self._exact(entry),), ()) for name, entry in entries.items()}
        prices, joint = sensitivity.prices(group, grid)
        return {
            name: (
                (
                    *(
                        self._option(entry, option, price)
                        for option, price in zip(grid, prices[name], strict=True)
                    ),
                    self._exact(entry),
                ),
                tuple(joint),
            )
            for name, entry in entries.items()
        }

    def _grid(self, group: tuple[str, ...]) -> list[LayerSettings]:
        """The options for a group: hooks store 8 bits or nothing, and what cannot be stored has none."""
        if not self.rows.can_be_stored(group):
            return []
        on_cpu = self.workload.device == "cpu"  # where there is nowhere to offload to
        options = [option for option in self.options if not (on_cpu and option.store == "offload")]
        if all(name in self.timeline.hooked for name in group):
            return [option for option in options if option.bits == 8 and not option.drop]
        return options

    def _option(self, entry: LayerEntry, option: LayerSettings, price: Price) -> Option:
        return Option(
            settings=option,
            bytes=self.rows.bytes(entry.name, option),
            tensor_error=price.tensor_error,
            gradient_error=price.gradient_error,
            standard_error=price.standard_error,
            measured=price.measured,
            encode_ms=price.encode_ms,
            decode_ms=price.decode_ms,
        )

    def _exact(self, entry: LayerEntry) -> Option:
        return Option(EXACT, entry.bytes, 0.0, 0.0, 0.0, True, 0.0, 0.0)

    def _assembled(self, found: Profile, *, partial: bool) -> Profile:
        layers = [replace(layer, options=self.known.get(layer.name, ((), ()))[0]) for layer in found.layers]
        ties = [replace(tie, joint=self.known.get(tie.layers[0], ((), ()))[1]) for tie in found.ties]
        return replace(
            found, layers=tuple(layers), ties=tuple(ties), derivations=self.derivations, partial=partial
        )

    def _resumed(self, found: Profile) -> Known:
        """What an earlier, interrupted run of the same request has measured."""
        if self.path is None or not Path(self.path).exists():
            return {}
        try:
            earlier = Profile.load(self.path)
        except RunError:
            return {}
        if not earlier.partial or earlier.resume != found.resume:
            return {}
        joint = {name: tie.joint for tie in earlier.ties for name in tie.layers}
        return {
            layer.name: (layer.options, joint.get(layer.name, ()))
            for layer in earlier.layers
            if layer.options
        }

    def _request(self) -> str:
        wanted = [option.to_dict() for option in self.options]
        parts = [self.workload.description, wanted, self.seeds, torch.__version__]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _save(self, made: Profile) -> None:
        if self.save is not None:
            self.save(made)
        elif self.path is not None:
            made.save(self.path)


def _ignored(*_: object) -> None:
    return None


def _print_progress(text: str, share: float) -> None:
    sys.stderr.write(f"\r\x1b[K{share:4.0%} {text}" + ("\n" if share >= 1 else ""))
    sys.stderr.flush()
