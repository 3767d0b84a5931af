"""Prices of the options of layers, on one batch of a workload after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mesa_tune.errors import WorkloadError
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiler.entries import LayerEntry, LayerPrices, Option, in_reference_groups
from mesa_tune.profiler.errors.derivation import DerivableStep, DerivationObserver, DerivedTensor, Reach
from mesa_tune.profiler.errors.sensitivity import Price, Sensitivity
from mesa_tune.profiler.memory.memory_model import Timeline
from mesa_tune.profiler.memory.rows import Rows
from mesa_tune.profiler.memory.step_trace import TensorKey
from mesa_tune.profiler.memory.trace import observing
from mesa_tune.profiler.profile import Profile
from mesa_tune.workload.checkpoints import without_checkpoints
from mesa_tune.workload.session import RawConversion, session
from mesa_tune.workload.user_code import located
from mesa_tune.workload.workload import Workload


@dataclass(frozen=True)
class Pricing:
    """Measures prices on a traced workload."""

    workload: Workload
    model: nn.Module
    options: list[LayerSettings]
    rows: Rows
    timeline: Timeline

    def record(self, number: int, producers: Collection[str] = (), batch: Any = None) -> Sensitivity:
        """Record the exact step on the batch of this number; `batch`: this batch, if it is at hand.

        `producers` save in it what they save when others derive from them.
        """
        first, *others = range(number * self.workload.accumulation, (number + 1) * self.workload.accumulation)
        batch = self.workload.make_batch(draw=first) if batch is None else batch
        sensitivity = Sensitivity(self.model.parameters(), number)
        running = session(self.workload, self.model, Policy.parse(""), kind=RawConversion)
        with running as raw, observing(sensitivity.recording):
            for conversion in (raw.conversion, raw.losses):
                conversion.producers.update(producers)
            # The gradient is the same with checkpoints, but each backward would start from a second forward.
            with self.workload.same_random_state(), without_checkpoints():
                self.model.zero_grad()
                loss = raw.loss(batch)
        self._require_no_gradients()
        sensitivity.record(loss, self._losses(others))
        if not sensitivity.norm:
            raise WorkloadError(
                f"{located(self.workload.loss, self.workload.path)}: loss() gives every parameter the "
                "gradient zero, so no error can be measured against it\n"
                "check that the loss depends on the parameters, or give the model a first training step"
            )
        return sensitivity

    def _losses(self, draws: Iterable[int]) -> Iterator[Tensor]:
        for draw in draws:
            with self.workload.same_random_state(), without_checkpoints():
                yield self.workload.compute_loss(self.model, self.workload.make_batch(draw=draw))

    def _require_no_gradients(self) -> None:
        """Raise WorkloadError if the loss itself has computed gradients of the parameters."""
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise WorkloadError(
                f"{located(self.workload.loss, self.workload.path)}: loss() calls backward() itself, so the "
                "gradient of the step is not that of what it returns\n"
                "return the sum of the losses; for micro-batches set ACCUMULATION"
            )

    def of_group(
        self, traced: Profile, group: tuple[str, ...], sensitivity: Sensitivity | None
    ) -> dict[str, LayerPrices]:
        """Return the prices of each layer of a group on the recorded batch."""
        entries = {name: traced.layer(name) for name in group}
        grid = self._grid(group)
        if sensitivity is None or not grid:
            return {name: LayerPrices((_exact(entry),), ()) for name, entry in entries.items()}
        prices, joint = sensitivity.prices(group, grid)
        return {
            name: LayerPrices((*self._options(entry, grid, prices[name]), _exact(entry)), tuple(joint))
            for name, entry in entries.items()
        }

    def of_derived(self, traced: Profile, number: int) -> dict[Reach, LayerPrices]:
        """Return the prices of what is stored while others derive from it, on the batch of this number.

        All other layers store exactly.
        """
        batch = self.workload.make_batch(draw=number * self.workload.accumulation)
        derived = self._derived_tensors(batch)
        producers = {name for tensor in derived.values() for name in tensor.recipe.layers()}
        sensitivity = self.record(number, producers, batch)
        step = DerivableStep(sensitivity.recording.replays, derived)
        prices: dict[Reach, LayerPrices] = {}
        for reach in step.reaches(traced.groups):
            grid, entry = in_reference_groups(self._grid(reach.layers)), traced.layer(reach.layers[0])
            found = sensitivity.together(step.calls(reach), grid)
            prices[reach] = LayerPrices(tuple(self._options(entry, grid, found)))
        return prices

    def _grid(self, group: tuple[str, ...]) -> list[LayerSettings]:
        """Return the options for a group: for hooks those of 8 bits; none if nothing can be compressed."""
        if not self.rows.can_be_stored(group):
            return []
        on_cpu = self.workload.device == "cpu"  # has nowhere to offload to
        options = [option for option in self.options if not (on_cpu and option.store == "offload")]
        if all(name in self.timeline.hooked for name in group):
            return [option for option in options if option.bits == 8 and not option.drop]
        return options

    def _options(self, entry: LayerEntry, grid: list[LayerSettings], prices: list[Price]) -> Iterator[Option]:
        for settings, price in zip(grid, prices, strict=True):
            yield Option(
                settings=settings,
                bytes=self.rows.bytes(entry.name, settings),
                tensor_error=price.tensor_error,
                gradient_error=price.gradient_error,
                standard_error=None,
                measured=price.measured,
                encode_ms=price.encode_ms,
                decode_ms=price.decode_ms,
            )

    def _derived_tensors(self, batch: Any) -> dict[TensorKey, DerivedTensor]:
        """Return the tensors that are derived on `batch` if all layers derive what they can."""
        observer, policy = DerivationObserver(), Policy.uniform(level=16, store="derive")
        with session(self.workload, self.model, policy) as running:
            running.loss(batch).backward()
            with self.workload.same_random_state(), observing(observer):
                running.loss(batch)
        return observer.derived


def _exact(entry: LayerEntry) -> Option:
    return Option(EXACT, entry.bytes, 0.0, 0.0, 0.0, True, 0.0, 0.0)
