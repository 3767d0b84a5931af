"""One step of a script, traced as `mt.profile` traces the plain step of a workload.

What is hard: nothing of the script may change. The model is converted with an empty policy, whose calls are
PyTorch's own; no forward, no backward and no random number is added. A script has variables of its own, such
as the logits, that live on after the forward: only what the graph refers to counts as saved.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from mesa_tune.conversion import entering
from mesa_tune.conversion.conversion import Conversion, entries
from mesa_tune.conversion.layers import Catalog
from mesa_tune.conversion.model import conversions_of, install, uninstall
from mesa_tune.engine.routing import top_hooks
from mesa_tune.errors import RunError
from mesa_tune.measure.memory.meter import bytes_of, gradients_of, storages, tensors_in
from mesa_tune.measure.memory.rows import Rows
from mesa_tune.measure.memory.step_trace import StepTrace
from mesa_tune.measure.memory.timeline_builder import build_timeline
from mesa_tune.measure.memory.trace import Recorder, StepRecording
from mesa_tune.measure.memory.traced_steps import TracedSteps, exact_entries, tensor_entries
from mesa_tune.policy import Policy
from mesa_tune.profiles.entries import REACHED_BY_NONE
from mesa_tune.profiles.prediction import BATCH, GRADIENTS, OPTIMIZER_STATE, WEIGHTS
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.packed_sizes import CASES
from mesa_tune.workload.boundaries import BackwardCall, autocast_dtype
from mesa_tune.workload.session import layers_of


class _StepRecorder(Recorder):
    """Recorder that also notes the storages which are older than the step."""

    def __init__(self, gradients: Iterable[Tensor]) -> None:
        super().__init__(gradients)
        self.older: dict[int, int] = {}

    def _see_argument(self, storage: UntypedStorage) -> None:
        super()._see_argument(storage)
        if storage._cdata in self._older:
            self.older[storage._cdata] = storage.nbytes()

    def stop(self) -> None:
        """Record no more deaths."""
        self._births.clear()
        self._older.clear()


class ObservedStep:
    """A step of `model` to be traced, from its forward to the end of the optimizers' step.

    Raise RunError for a model or a script that cannot be observed.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        require_uncompiled(model)
        self.model, self.optimizers = model, optimizers
        self.conversion, self.losses = (
            Conversion(Policy.parse(""), catalog, 0, 0) for catalog in (Catalog.of(model), Catalog.empty())
        )
        self.recording: StepRecording | None = None
        self.forward = False
        self.batch_size = 1
        self.autocast: str | None = None
        self._step, self._loss = ExitStack(), ExitStack()
        install(model, self.conversion)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def begin(self) -> None:
        """Note that the forward begins."""
        require_no_modes()
        self.forward = True
        self.recorder = _StepRecorder(gradients_of(self.model))
        self.static = [*self.model.parameters(), *self.model.buffers()]
        self.static += [tensor for optimizer in self.optimizers for tensor in tensors_in(optimizer.state)]
        self.recording = self._step.enter_context(StepRecording(self.model, self.static, self.recorder))
        self._loss.enter_context(entering.enter_loss(self.losses))
        self._entries = entries.number

    def note_autocast(self) -> None:
        """Note the autocast of a call in the forward: a wrapper of the model's forward may enter it."""
        self.autocast = autocast_dtype(self.device.type) or self.autocast

    def note_batch(self, tree: Any) -> None:
        """Note the arguments of the model: the first dimension of the first tensor is the batch size."""
        tensors = [tensor for tensor in tensors_in(tree) if tensor.dim()]
        self.batch_size = max(1, tensors[0].shape[0]) if tensors else 1

    def begin_backward(self, outputs: Sequence[Tensor]) -> None:
        """Note that the forward has ended, and the backward of `outputs` begins."""
        if entries.number != self._entries:
            raise RunError(CONVERTS)
        assert self.recording is not None
        self._loss.close()
        self.forward = False
        self.recording.backward_begins(BackwardCall(outputs))
        self._count_saved(outputs)

    def _count_saved(self, outputs: Sequence[Tensor]) -> None:
        trace, recorder = self.recorder.trace, self.recorder
        in_graph = [recorder.number(storage) for storage in storages(list(_in_nodes(outputs)))]
        alive = {number for number in trace.lifetimes if trace.alive_after(number)}
        trace.variables = alive - trace.plain.keys() - set(in_graph)
        saved = sum(trace.lifetimes[number].bytes for number in alive if trace.is_saved(number))
        trace.forwards = [replace(trace.forwards[0], saved_bytes=saved)]

    def end_backward(self) -> None:
        """Note that the backward has ended."""
        assert self.recording is not None
        self.recording.backward_ended()

    def close(self) -> None:
        """End the trace, and revert the model."""
        self._loss.close()
        self._step.close()
        uninstall(self.model, self.conversion)

    def _static_bytes(self) -> dict[str, int]:
        """Return the bytes that are older than the step, by kind; what the step met besides is its batch."""
        counted = {storage._cdata for storage in storages(self.static)}
        weights = bytes_of([*self.model.parameters(), *self.model.buffers()])
        return {
            WEIGHTS: weights,
            GRADIENTS: self.recorder.trace.static_gradients,
            OPTIMIZER_STATE: bytes_of(self.static) - weights,
            BATCH: sum(size for key, size in self.recorder.older.items() if key not in counted),
        }

    def profile(self, script: str, step_ms: float, notes: Sequence[str]) -> Profile:
        """Return the profile of the traced step: bytes alone, as no other policy has run."""
        static = self._static_bytes()
        self.recorder.stop()
        traced = _alone(self.recorder.trace, self.batch_size, static)
        tags = layers_of(self.conversion, self.losses)
        rows = Rows(traced.plain, traced.packed, tags, self.conversion.catalog.modules)
        tensors = tensor_entries(traced.plain)
        exact = exact_entries(traced, {name: tag for name, (tag, _) in tags.items()})
        return Profile(
            model=None,
            fingerprint=None,
            layers_fingerprint=self.conversion.catalog.fingerprint,
            device=str(self.device),
            autocast=self.autocast,
            batch_size=self.batch_size,
            seed=0,
            torch=torch.__version__,
            partial=False,
            static_bytes=sum(static.values()),
            saved_bytes=sum(tensor.bytes for tensor in tensors) + rows.unattributed,
            peak_bytes=sum(static.values()) + traced.plain.peak(),
            step_ms=step_ms,
            tensors=tuple(tensors),
            layers=tuple(rows.entries()),
            timeline=build_timeline(traced, traced, rows.hooked),
            exact=tuple(entry for entry in exact if entry.why in REACHED_BY_NONE),
            notes=tuple(notes),
            script=script,
        )


def _alone(plain: StepTrace, batch_size: int, static: dict[str, int]) -> TracedSteps:
    """Return a plain step as traced steps: no step was compressed."""
    return TracedSteps(batch_size, static, *[plain] * len(CASES))


def _in_nodes(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that autograd Functions written in Python have as attributes of `ctx`."""
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield from tensors_in(getattr(node, "__dict__", None))
        waiting.extend(below for below, _ in node.next_functions)


CONVERTS = (
    "the script itself compresses with mesa-tune, and only plain steps are observed\n"
    "leave mt.convert, mt.compress_saved, mt.auto and callbacks out for this run"
)


def require_unconverted(module: nn.Module, own: Conversion | None = None) -> None:
    """Raise RunError if mesa-tune calls `module`, or if it has another conversion than `own`.

    `mt.auto` and the callbacks call models that they have not yet converted.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("mesa_tune.") and not name.startswith(_OBSERVERS):
            raise RunError(CONVERTS)
        frame = frame.f_back
    if any(conversion is not own for conversion in conversions_of(module)):
        raise RunError(CONVERTS)


_OBSERVERS = ("mesa_tune.measure.watching", "mesa_tune.measure.recording")


def require_uncompiled(model: nn.Module) -> None:
    """Raise RunError for a model that is compiled."""
    compiled = any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    if compiled and not torch._dynamo.config.disable:
        raise RunError(
            "the script compiles its model, and compiled calls cannot be observed\n"
            "set TORCH_COMPILE_DISABLE=1 for this run"
        )


def require_no_modes() -> None:
    """Raise RunError if the script is inside contexts that would end before the step does."""
    modes = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    if modes or top_hooks() is not None or torch._C._len_torch_dispatch_stack():
        raise RunError(
            "the script calls its model inside saved-tensor hooks or inside a mode of torch\n"
            "leave that context out for this run (mt.compress_saved is one)"
        )


def now_ms(device: torch.device) -> float:
    """Return the time in milliseconds, when the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * time.perf_counter()
