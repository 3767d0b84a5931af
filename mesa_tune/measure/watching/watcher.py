"""Find model, optimizer and steps of a running script, and observe one step of it.

What is hard: nothing says beforehand what the script will do. The first step shows which modules it calls,
how often it runs a backward, and which optimizers step; a later step is like it, and is observed. Whatever
goes wrong here, the script goes on.
"""

from __future__ import annotations

import atexit
import gc
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from mesa_tune.errors import MesaTuneError, RunError
from mesa_tune.measure.watching.observed_step import ObservedStep, now_ms, require_unconverted
from mesa_tune.profiles.profile import Profile
from mesa_tune.workload.boundaries import BackwardCall, StepEvents, watch_optimizers, watching_backwards
from mesa_tune.workload.user_code import unexplained

Arguments = ParamSpec("Arguments")

Then = Callable[[Sequence[nn.Module], Sequence[Optimizer], int], None]
_FIRST = "a step ends with the first one's"


def harmless(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Return a method of the watcher that does nothing after the end, and whose errors end the watching."""

    @wraps(method)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        watcher: Any = args[0]
        if watcher.ended or torch.compiler.is_compiling() or threading.get_ident() != watcher.thread:
            return
        try:
            method(*args, **kwargs)
        except MesaTuneError as error:
            watcher.end(str(error))
        except Exception as error:  # noqa: BLE001 - the script must go on
            # Without --debug the command prints the first three lines.
            watcher.end(
                f"the script's step could not be observed: {unexplained(error)}\n{traceback.format_exc()}"
            )

    return run


class Watcher(StepEvents):
    """Watches a script through `steps` steps of its first optimizer, and observes the last.

    `finish` gets the profile, or the reason why there is none. `exiting`: the process ends. `then`: called
    after a profile, with the modules that the script calls, its optimizers, and the backwards of a step.
    """

    def __init__(
        self, script: str, steps: int, finish: Callable[[Profile | str], None], then: Then | None = None
    ) -> None:
        self.script, self.steps, self.finish, self.then = script, steps, finish, then
        self.thread = threading.get_ident()
        self.ended = self.exiting = False
        self.depth = 0
        self.going_backward = self.ran_backward = False
        self.called: dict[nn.Module, None] = {}
        self.optimizers: dict[Optimizer, None] = {}
        self.step = 0
        self.backwards = self.expected = 0
        self.observed: ObservedStep | None = None
        self.step_began, self.step_ms = now_ms(torch.device("cpu")), 0.0
        self._watching = ExitStack()

    def start(self, module: nn.Module) -> None:
        """Begin to watch, in a call of `module`."""
        atexit.register(self.at_exit)
        handles = (
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        )
        for handle in handles:
            self._watching.callback(handle.remove)
        self._watching.enter_context(watching_backwards(self))
        self.optimizer_hook = watch_optimizers(self)
        self._before_forward(module, ())

    def end(self, result: Profile | str) -> None:
        """Stop watching, with this result. One hook of optimizers stays, and does nothing."""
        seen = list(self.called), list(self.optimizers), self.expected
        self._forget()
        self.finish(result)
        if self.then is not None and isinstance(result, Profile):
            self.then(*seen)

    @harmless
    def at_exit(self) -> None:
        """End without a result, as the script ends."""
        self.exiting = True
        if not self.ran_backward:
            raise RunError("the script ran no backward(), so no step was observed\nlet it train")
        if not self.optimizers:
            raise RunError(
                "no optimizer of torch.optim stepped in the script\nsteps of others cannot be observed"
            )
        raise RunError(
            f"the script ended before it had taken {self.needed} steps\n"
            f"let it run longer{', or observe an earlier step: --steps 2' if self.needed > 2 else ''}"
        )

    @property
    def needed(self) -> int:
        """Steps that the script must take at least."""
        return self.steps

    def _forget(self) -> None:
        """Drop hooks, and everything that refers to the script's objects."""
        atexit.unregister(self.at_exit)
        self.ended = True
        self._drop()
        self._watching.close()
        self.called.clear()
        self.optimizers.clear()

    @harmless
    def _before_forward(self, module: nn.Module, given: Any) -> None:
        self.depth += 1
        if self.going_backward or not torch.is_grad_enabled():
            return
        if self.depth == 1:
            self._note_call(module)
            self._begin_or_drop(module)
        if self.observed is not None and self.observed.forward:
            self.observed.note_autocast()

    def _note_call(self, module: nn.Module) -> None:
        """Note the call of an outermost module."""
        require_unconverted(module, None if self.observed is None else self.observed.conversion)
        self.called[module] = None

    def _begin_or_drop(self, module: nn.Module) -> None:
        if self.observed is None or self.observed.forward or not self._is_part(module):
            return
        if self.observed.recording is None:
            self.observed.begin()
        else:  # more backwards than in the step before: observe another step
            self._drop()

    @harmless
    def _after_forward(self, module: nn.Module, *given: Any) -> None:
        # After an error torch leaves the keyword arguments out; the last value is the output.
        self.depth = max(0, self.depth - 1)
        observed = self.observed
        if not self.depth and observed is not None and observed.forward and self._is_part(module):
            observed.note_batch(given[:-1])

    def _is_part(self, module: nn.Module) -> bool:
        """Return whether the observed model contains `module`."""
        assert self.observed is not None
        return any(module is part for part in self.observed.model.modules())

    @harmless
    def backward_begins(self, call: BackwardCall) -> None:
        self.going_backward = self.ran_backward = True
        if self.observed is not None and self.observed.forward:
            self.observed.begin_backward(call.outputs)

    @harmless
    def backward_ended(self) -> None:
        self.going_backward = False
        self.backwards += 1
        observed = self.observed
        if observed is not None and observed.recording is not None and not observed.forward:
            observed.end_backward()
        elif observed is None and self.step == self.steps - 1 and self.backwards == self.expected - 1:
            self._prepare()

    @harmless
    def step_ended(self, optimizer: Optimizer, /) -> None:
        self.optimizers[optimizer] = None
        if optimizer is not next(iter(self.optimizers)):
            return
        if self._is_other_rank():
            self._forget()
            return
        if self.observed is not None and self.observed.recording is not None:
            if not self.observed.forward:
                self._report()
                return
            raise RunError(
                "the optimizer stepped without a backward() of the model's output\n"
                "only steps that call backward() can be observed"
            )
        self.step = min(self.step + 1, self.steps - 1)
        self.expected, self.backwards = self.backwards, 0
        self._take_time()
        if self.step == self.steps - 1 and self.expected <= 1 and self.observed is None:
            self._prepare()

    def _take_time(self) -> None:
        now = now_ms(next(parameter.device for parameter in self._parameters()))
        self.step_began, self.step_ms = now, now - self.step_began

    def _parameters(self) -> list[Tensor]:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    def _prepare(self) -> None:
        """Make the next forward the observed one."""
        trained = {id(parameter) for parameter in self._parameters()}
        roots = [
            module
            for module in self.called
            if any(id(parameter) in trained for parameter in module.parameters())
        ]
        if not roots:
            raise RunError(
                "no module that the script called has the optimizer's parameters\n"
                "a model compiled by model.compile() is not seen: set TORCH_COMPILE_DISABLE=1 for this run"
            )
        self.observed = ObservedStep(_model_of(roots), list(self.optimizers))

    def _drop(self) -> None:
        if self.observed is not None:
            self.observed.close()
        self.observed = None

    def _report(self) -> None:
        observed = self.observed
        assert observed is not None
        self._drop()
        self.end(observed.profile(self.script, self.step_ms, list(self._notes(observed))))

    def _notes(self, observed: ObservedStep) -> Iterable[str]:
        models = observed.model
        named = ", ".join(models) if isinstance(models, nn.ModuleDict) else type(models).__name__
        precision = f", in {observed.autocast}" if observed.autocast else ""
        yield f"step {self.steps} of the script: {named}, at batch size {observed.batch_size}{precision}"
        if self.expected > 1:
            yield f"of the {self.expected} backwards in a step, the last was observed"
        if len(self.optimizers) > 1:
            yield f"several optimizers step ({_names(self.optimizers)}): {_FIRST}"

    @staticmethod
    def _is_other_rank() -> bool:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return distributed and torch.distributed.get_rank() != 0


def _model_of(roots: list[nn.Module]) -> nn.Module:
    """Return the one outermost module, or else the smallest module that contains all of them."""
    inner = {part for root in roots for part in root.modules() if part is not root}
    outer = [root for root in roots if root not in inner]
    if len(outer) == 1:
        return outer[0]
    containers = []
    for item in gc.get_objects():
        if issubclass(type(item), nn.Module) and "_modules" in item.__dict__:
            parts = set(item.modules())
            if parts.issuperset(outer):
                containers.append((len(parts), item))
    return min(containers, key=lambda pair: pair[0], default=(0, _together(outer)))[1]


def _together(models: list[nn.Module]) -> nn.ModuleDict:
    """Return a module that contains `models` under the names of their classes."""
    named = nn.ModuleDict()
    for model in models:
        name = type(model).__name__
        same = sum(type(each) is type(model) for each in named.values())
        named[f"{name}{same + 1}" if same else name] = model
    return named


def with_parameters(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of `modules` that have parameters: a loss may be a module without."""
    return [module for module in modules if any(True for _ in module.parameters())]


def _names(things: Iterable[object]) -> str:
    return ", ".join(type(thing).__name__ for thing in things)
