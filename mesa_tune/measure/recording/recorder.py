"""Record the training step of a running script: model, batches, loss and optimizer, for a model file.

What is hard: nothing says beforehand what the script will do. The first step shows which model it calls and
how many backwards it runs; the batches of the later steps are recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from mesa_tune.errors import RunError
from mesa_tune.measure.memory.meter import tensors_in
from mesa_tune.measure.recording.loss_calls import LossCalls
from mesa_tune.measure.recording.model_file import Recording, write
from mesa_tune.measure.watching.observed_step import require_no_modes, require_uncompiled
from mesa_tune.measure.watching.watcher import Watcher, harmless, with_parameters
from mesa_tune.workload.boundaries import BackwardCall, autocast_dtype

_INSTEAD = "`mesa-tune init` writes a file to put the step into; `mesa-tune profile -- COMMAND` observes it"


class Recorder(Watcher):
    """Watches a script through its first step, and records the batches of `steps` further ones.

    `folder`: where the model file and the files beside it are written, to be moved to `path`. `finish` gets
    an empty text when they are, or the reason why there are none. A script that ends earlier gives fewer
    batches.
    """

    def __init__(
        self, script: str, steps: int, folder: Path, path: Path, finish: Callable[[str], None]
    ) -> None:
        super().__init__(script, steps, lambda result: finish(str(result)))
        self.folder, self.path = folder, path
        main = getattr(sys.modules["__main__"], "__file__", None)  # is gone when Python ends
        self.file = None if main is None else Path(main).resolve()
        self.recording: Recording | None = None
        self.root: nn.Module | None = None
        self.inputs: Any = None
        self.copied: Any = None
        self.output: Any = None
        self.loss: LossCalls | None = None
        self._stack = ExitStack()
        self.scaled: tuple[Tensor, Tensor] | None = None

    def start(self, module: nn.Module) -> None:
        """Begin to watch, in a call of `module`."""
        scale, clip = torch.amp.GradScaler.scale, clip_grad._clip_grads_with_norm_

        def scaling(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            self.scaled = None if scaled is outputs else (outputs, scaled)
            return scaled

        def clipping(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> None:
            if self.recording is not None:
                self.recording.clip_norm = float(max_norm)
            clip(parameters, max_norm, *args, **kwargs)

        self._watching.enter_context(patch.object(torch.amp.GradScaler, "scale", scaling))
        self._watching.enter_context(patch.object(clip_grad, "_clip_grads_with_norm_", clipping))
        super().start(module)

    def follow(self, called: Sequence[nn.Module], optimizers: Sequence[Optimizer], backwards: int) -> None:
        """Record from the next forward on, as a step was watched: with these modules and `backwards`."""

        def begin(module: nn.Module, given: Any) -> None:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return
            handle.remove()
            self.called, self.optimizers = dict.fromkeys(called), dict.fromkeys(optimizers)
            self.backwards = backwards
            self._step_watched(optimizers[0])
            if not self.ended:
                self.start(module)

        handle = register_module_forward_pre_hook(begin)

    @harmless
    def _step_watched(self, optimizer: Optimizer) -> None:
        self._require_one_optimizer()
        self._begin_recording(optimizer)
        self.backwards = 0

    @harmless
    def _before_forward(self, module: nn.Module, given: Any) -> None:
        self.depth += 1
        recording = self.recording
        if self.going_backward or not torch.is_grad_enabled():
            return
        if self.depth == 1:
            self._note_call(module)
        if recording is None:
            return
        if self.output is None:  # also one that a wrapper of the forward enters
            recording.autocast = autocast_dtype(recording.device) or recording.autocast
        if self.depth == 1 and module is self.root:
            self._begin(recording)

    def _begin(self, recording: Recording) -> None:
        if self.output is not None:
            raise RunError(f"the script calls its model several times before a backward\n{_INSTEAD}")
        require_no_modes()
        if self.backwards == 0:
            recording.keeps_gradients |= any(each.grad is not None for each in recording.model.parameters())

    @harmless
    def _after_forward(self, module: nn.Module, *given: Any) -> None:
        # After an error torch leaves the keyword arguments out.
        self.depth = max(0, self.depth - 1)
        outermost = not self.depth and module is self.root and torch.is_grad_enabled()
        if self.recording is None or not outermost or self.going_backward or len(given) < 3:
            return
        args, kwargs, self.output = given
        self.inputs = {"args": list(args), "kwargs": dict(kwargs)}
        if any(tensor.requires_grad for tensor in tensors_in(self.inputs)):
            raise RunError(f"an input of the script's model requires a gradient\n{_INSTEAD}")
        self.copied = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), self.inputs)
        self.loss = LossCalls(self.recording.device if self.recording.autocast else None)
        self._stack.enter_context(self.loss)

    @harmless
    def backward_begins(self, call: BackwardCall) -> None:
        self.going_backward = self.ran_backward = True
        if self.recording is None:
            return
        calls = self._stopped()
        if calls is None or len(call.outputs) != 1:
            raise RunError(f"a backward of the script is not that of one loss of one forward\n{_INSTEAD}")
        loss = call.outputs[0]
        if self.scaled is not None and loss is self.scaled[1]:
            loss, self.recording.scaler = self.scaled[0], True
        recording = self.recording
        source = calls.source(self.inputs, self.output, loss, recording.accumulation, recording.model)
        self.recording.add(self.copied, source)
        self.inputs = self.copied = self.output = self.scaled = None

    def _stopped(self) -> LossCalls | None:
        """Record no more calls of the loss; return those recorded."""
        calls, self.loss = self.loss, None
        self._stack.close()
        return calls

    @harmless
    def backward_ended(self) -> None:
        self.going_backward = False
        self.backwards += 1

    @harmless
    def step_ended(self, optimizer: Optimizer, /) -> None:
        self.optimizers[optimizer] = None
        if self._is_other_rank():
            self._forget()
            return
        self._require_one_optimizer()
        if self.recording is None:
            self._begin_recording(optimizer)
        else:
            self.step += 1
            if self.step == self.steps:
                self._write()
        self.backwards = 0

    def _require_one_optimizer(self) -> None:
        if len(self.optimizers) > 1:
            raise RunError(f"the script has several optimizers\n{_INSTEAD}")

    def _begin_recording(self, optimizer: Optimizer) -> None:
        trained = {id(parameter) for parameter in self._parameters()}
        roots = with_parameters(self.called)
        if len(roots) != 1 or not any(id(parameter) in trained for parameter in roots[0].parameters()):
            names = ", ".join(type(root).__name__ for root in roots) or "none"
            raise RunError(
                f"a step of the script must call one module, the trained model; it calls {names}\n{_INSTEAD}"
            )
        self.root = model = roots[0]
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        require_uncompiled(model)
        self.recording = Recording(self.script, self.file, model, optimizer, self.backwards)

    def _forget(self) -> None:
        self._stopped()
        super()._forget()
        self.recording = self.root = None
        self.inputs = self.copied = self.output = self.scaled = None

    @harmless
    def at_exit(self) -> None:
        """Write what was recorded, as the script ends."""
        if self.recording is not None and self.recording.batches:
            self._write()
        else:
            super().at_exit()

    @property
    def needed(self) -> int:
        """Steps that the script must take at least: one shows what it does, one is recorded."""
        return 2

    def _write(self) -> None:
        assert self.recording is not None
        write(self.recording, self.folder, self.path)
        self.end("")
