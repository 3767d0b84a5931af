"""A workload: the user's model, batch and loss as functions, and how to run them.

The hard part: the user's functions may return anything. It is checked here, so that other modules get a
trainable model, a batch on the device and a finite scalar loss, and an error in the user's code names its
line.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mesa_tune.errors import WorkloadError
from mesa_tune.free_memory import is_cuda
from mesa_tune.workload.batches import copied_containers, to_device
from mesa_tune.workload.instance.given_batches import drawn
from mesa_tune.workload.model_file import read_model_file
from mesa_tune.workload.step import FunctionStepper, LossStepper, StepFunction, Stepper, TrainingStep
from mesa_tune.workload.user_code import explaining, located, mixed_seed, seeded

DEFAULT_BATCH_SIZE = 32
_STEP_NAMES = ("ACCUMULATION", "CLIP_NORM", "SCALER", "SET_TO_NONE")
AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Workload:
    """A training step that can be built and run many times, each time with the same numbers.

    `model() -> nn.Module`, `batch(batch_size) -> tensors in any containers`, `loss(model, batch) -> scalar
    tensor`, `optimizer(parameters) -> Optimizer` (default AdamW). `device` is `cpu` or `cuda[:n]`, `autocast`
    None, `bfloat16` or `float16`. `accumulation`, `clip_norm`, `scaler` and `set_to_none`: see
    `TrainingStep`. `step(model, batch, optimizer)`: the whole training step, where these do not say it; then
    `loss` is not needed, and autocast is the step's own. `checkpoints`: files of weights from several points
    of training, as `torch.save` writes a state_dict. `steps_before`: training steps that are taken before
    gradient errors are measured; None: until no weight has a gradient of exactly zero (`take_first_steps`).
    `random_state`: number of the one that steps start from, of those of `seed`, as a model may skip layers at
    random; None: the first, if nobody has looked for the dearest. `length`: of samples, such as tokens of a
    text; then it is the second argument of `batch`. `path` and `fingerprint` (SHA-256 of the content, local
    modules included): of the model file.

    Every method raises WorkloadError if a function raises or returns something wrong. Out-of-memory errors
    (`is_out_of_memory`) pass unchanged.
    """

    model: Callable[[], nn.Module]
    batch: Callable[..., Any]
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    _: KW_ONLY
    batch_size: int
    device: str = "cpu"
    autocast: str | None = None
    seed: int = 0
    accumulation: int = 1
    clip_norm: float | None = None
    scaler: bool = False
    set_to_none: bool = True
    step: StepFunction | None = None
    checkpoints: Sequence[str | Path] = ()
    steps_before: int | None = None
    path: Path | None = None
    fingerprint: str | None = None
    random_state: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        _require_batch_size(self.batch_size)
        _require_length(self.length)
        _require_device(str(self.device))
        _require_autocast(self.autocast)
        _require_paths(self.checkpoints)
        _require_steps(self.steps_before)
        _require_one_step(self.step, self.loss, self.training_step.changed(), self.autocast)
        object.__setattr__(self, "device", str(self.device))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        batch_size: int | None = None,
        length: int | None = None,
        device: str | None = None,
        autocast: str | None = None,
        seed: int = 0,
    ) -> Workload:
        """Load the workload of the model file at `path`.

        Arguments override its BATCH_SIZE, LENGTH and AUTOCAST.

        The default of `device` is `cuda` if there is one, else `cpu`. `autocast="none"` switches the file's
        AUTOCAST off.
        """
        path = Path(path)
        fingerprint, names = read_model_file(path)
        autocast = names.get("AUTOCAST") if autocast is None else autocast
        own_length = names.get("LENGTH") if _takes_length(names["batch"]) else None
        if length is not None and own_length is None:
            raise WorkloadError(
                f"{path}: its samples have no other length than its own\n"
                "write LENGTH = 2048, and batch(batch_size, length)"
            )
        return cls(
            names["model"],
            names["batch"],
            names.get("loss"),
            names.get("optimizer"),
            batch_size=names.get("BATCH_SIZE", DEFAULT_BATCH_SIZE) if batch_size is None else batch_size,
            device=device or default_device(),
            autocast=None if autocast == "none" else autocast,
            seed=seed,
            path=path,
            step=names.get("step"),
            **{name.lower(): names[name] for name in _STEP_NAMES if name in names},
            checkpoints=_beside(path, names.get("CHECKPOINTS", ())),
            steps_before=names.get("STEPS_BEFORE"),
            length=own_length if length is None else length,
            fingerprint=fingerprint,
        )

    def with_batch_size(self, batch_size: int) -> Workload:
        """Return the same workload with another batch size."""
        return replace(self, batch_size=batch_size)

    @property
    def description(self) -> dict[str, Any]:
        """Plain JSON values from which this workload can be loaded again."""
        return {
            "model": str(self.path.resolve()) if self.path else None,
            "fingerprint": self.fingerprint,
            "device": self.device,
            "autocast": self.autocast,
            "batch_size": self.batch_size,
            "seed": self.seed,
            **self.training_step.changed(),
            **({"checkpoints": [str(each) for each in self.checkpoints]} if self.checkpoints else {}),
            **({} if self.steps_before is None else {"steps_before": self.steps_before}),
            **({} if self.length is None else {"length": self.length}),
        }

    @property
    def training_step(self) -> TrainingStep:
        """What a training step is made of, if it is not the user's function."""
        return TrainingStep(self.accumulation, self.clip_norm, self.scaler, self.set_to_none)

    def build(self) -> nn.Module:
        """Build a model, the same at each call: seeded, on the device, in training mode.

        Parts of a model in training mode stay as they are. The caller's random states do not change.
        """
        with seeded(self.seed, self.device), explaining("model()", self.model, self.path):
            model = self.model()
            fault = _model_fault(model)
            if fault is None:
                return in_training_mode(on_device(model, self.device))
        raise self._error("model", self.model, *fault)

    def make_batch(self, n: int | None = None, *, draw: int = 0) -> Any:
        """Make the `draw`-th batch of `n` samples (default: the batch size), on the device.

        Equal seed, `n` and `draw` give equal batches, if `batch` uses only the random generators of torch,
        NumPy and Python. The caller's random states do not change.
        """
        with seeded(mixed_seed(self.seed, draw), self.device), explaining("batch()", self.batch, self.path):
            make = self.batch if self.length is None else partial(_long, self.batch, self.length)
            batch = drawn(make, self.batch_size if n is None else n, draw)
            return to_device(batch, self.device, f"{located(self.batch, self.path)}: batch()")

    def compute_loss(self, model: nn.Module, batch: Any, *, check: bool = True) -> Tensor:
        """Return the loss of `model` on `batch`, a scalar that requires grad, under this autocast.

        The loss may change the containers of its batch, such as a dict: they are copies.
        `check=False` does not read its value: for fake tensors, and where a synchronization would disturb
        times.
        """
        assert self.loss is not None
        with explaining("loss()", self.loss, self.path), self.autocasting():
            loss = self.loss(model, copied_containers(batch))
        fault = _loss_fault(loss, check=check)
        if fault:
            raise self._error("loss", self.loss, *fault)
        return loss

    def take_step(self, model: nn.Module, batch: Any, optimizer: Optimizer) -> None:
        """Run one training step of `model`, all its micro-batches on `batch`."""
        self.stepper(optimizer).run(model, batch)

    def stepper(self, optimizer: Optimizer, *, check: bool = True) -> Stepper:
        """Return what takes training steps with `optimizer`; `check`: see `compute_loss`."""
        if self.step is not None:
            return self.function_stepper(optimizer)
        name = "optimizer.step()" if self.optimizer else "the step of AdamW, as there is no optimizer(),"
        return LossStepper(
            self.training_step,
            optimizer,
            partial(self.compute_loss, check=check),
            backward=explaining("the backward of loss()", self.loss, self.path),
            update=explaining(name, self.optimizer or self.model, self.path),
        )

    def function_stepper(self, optimizer: Optimizer) -> FunctionStepper:
        """Return what takes the user's own steps."""
        assert self.step is not None
        return FunctionStepper(
            self.step, optimizer, explaining("step()", self.step, self.path), self.step_error
        )

    def step_error(self, what: str, remedy: str) -> WorkloadError:
        """Return an error of `step`, or else of `loss`: what it does, and the remedy."""
        name = "loss" if self.step is None else "step"
        return self._error(name, getattr(self, name), what, remedy)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the user's optimizer, or AdamW, over the trainable parameters of `model`."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.optimizer is None:
            return AdamW(parameters)
        with explaining("optimizer()", self.optimizer, self.path):
            optimizer = self.optimizer(parameters)
        if not isinstance(optimizer, Optimizer):
            raise self._error("optimizer", self.optimizer, f"returned {_kind(optimizer)}, not an Optimizer")
        return optimizer

    def autocasting(self) -> AbstractContextManager[Any]:
        """Return the autocast context of this workload, or one that does nothing."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype=AUTOCAST_DTYPES[self.autocast])

    def same_random_state(self) -> AbstractContextManager[None]:
        """Return a context with the random state of every step: all steps need the same dropout masks."""
        return seeded(self.step_seed, self.device)

    @property
    def step_seed(self) -> int:
        """The seed of the random state that steps start from."""
        return mixed_seed(self.seed, -self.random_state) if self.random_state else self.seed

    def _error(self, name: str, function: Callable[..., Any], what: str, remedy: str = "") -> WorkloadError:
        return WorkloadError(
            f"{located(function, self.path)}: {name}() {what}\n"
            + (remedy or "`mesa-tune init` writes a model file that shows what each function returns")
        )


def _require_one_step(step: object, loss: object, parts: Mapping[str, object], autocast: str | None) -> None:
    """Raise WorkloadError unless there is either a loss, or a step that says everything."""
    if step is None and loss is None:
        raise WorkloadError("neither loss nor step is given\ngive loss(model, batch), or the whole step")
    if step is not None and not callable(step):
        raise WorkloadError(
            f"step is {_kind(step)}, not a function\n"
            "write it as def step(model, batch, optimizer), or leave it out"
        )
    others = [name.upper() for name in parts] + ["AUTOCAST"] * (autocast is not None)
    if step is not None and others:
        raise WorkloadError(
            f"both step() and {', '.join(others)} say what a training step is\n"
            "choose one: let step() do all of it (torch.autocast, too), or leave step() out"
        )


def default_device() -> str:
    """Return `cuda` if there is one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def on_device(model: nn.Module, device: str) -> nn.Module:
    """Return `model`, moved to `device` unless it is there; some quantized models cannot be moved."""
    tensors = (*model.parameters(), *model.buffers())
    return model if all(str(tensor.device) == device for tensor in tensors) else model.to(device)


def in_training_mode(model: nn.Module) -> nn.Module:
    """Return `model` in training mode; where it is in it, parts that are not stay so."""
    return model if model.training else model.train()


def _model_fault(model: object) -> tuple[str, ...] | None:
    """Return why `model` cannot be trained, with a remedy if there is a special one; None for a good one."""
    if not isinstance(model, nn.Module):
        return (f"returned {_kind(model)}, not an nn.Module",)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            what = f"returned a model whose {name} is on the device meta, which has no values"
            return what, "build it on the CPU: the model is moved to the device for you"
    return None


def _loss_fault(loss: object, *, check: bool) -> tuple[str, str] | None:
    """Return why `loss` cannot be trained on, and the remedy; None for a good one."""
    if not isinstance(loss, Tensor):
        return f"returned {_kind(loss)}, not a tensor", "return the loss itself, such as F.cross_entropy(…)"
    if loss.numel() != 1 or loss.is_complex():
        what = f"returned a tensor of shape {tuple(loss.shape)}, not a scalar"
        return what, "end it with .mean() or .sum()"
    if torch.is_grad_enabled() and not loss.requires_grad:
        remedy = "compute it from the model's output, without detach(), item() or no_grad()"
        return "returned a tensor that no gradient flows from", remedy
    if check and not math.isfinite(value := loss.item()):
        remedy = "the first step must give a finite loss: check data, initialization and dtype"
        return f"returned {value}", remedy
    return None


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _require_batch_size(batch_size: object) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise WorkloadError(
            f"batch size {batch_size!r}: must be an integer of at least 1\n"
            "give one with --batch-size or BATCH_SIZE"
        )


def _takes_length(batch: Callable[..., Any]) -> bool:
    """Return whether a file's `batch` takes the length: LENGTH may also be a constant of the file's own."""
    try:
        return "length" in inspect.signature(batch).parameters
    except (TypeError, ValueError):  # written in C
        return False


def _long(batch: Callable[[int, int], Any], length: int, count: int) -> Any:
    return batch(count, length)


def _require_length(length: object) -> None:
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise WorkloadError(
            f"length {length!r}: must be an integer of at least 1\ngive one with --length or LENGTH"
        )


def _require_steps(steps: object) -> None:
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 0):
        raise WorkloadError(
            f"STEPS_BEFORE = {steps!r}: must be a number of training steps\n"
            "0 measures the model as it is; without it, steps are taken only while gradients are zero"
        )


def _require_autocast(autocast: object) -> None:
    if autocast is not None and autocast not in AUTOCAST_DTYPES:
        raise WorkloadError(
            f"autocast {autocast!r}: must be one of {', '.join(AUTOCAST_DTYPES)}\n"
            "give --autocast or AUTOCAST one of these, or leave it out"
        )


def _beside(path: Path, checkpoints: object) -> list[Path]:
    """Return the paths of `checkpoints`, which are relative to the folder of the model file at `path`."""
    return [path.parent / each for each in _require_paths(checkpoints)]


def _require_paths(checkpoints: Any) -> Sequence[str | Path]:
    if isinstance(checkpoints, (list, tuple)) and all(isinstance(each, (str, Path)) for each in checkpoints):
        return checkpoints
    raise WorkloadError(
        f"CHECKPOINTS = {checkpoints!r}: must be a list of paths\n"
        'write it like ["step20.pt", "step300.pt"], or leave it out'
    )


def _require_device(device: str) -> None:
    if is_cuda(device) and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise WorkloadError(
            f"device {device!r}: torch {torch.__version__} finds {count} CUDA devices\n"
            "use the device cpu (--device cpu), see `mesa-tune doctor`, or ask for bytes alone (--bytes-only)"
        )
