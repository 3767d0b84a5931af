"""Write a model file from a recorded step: readable source, and the model and its batches in files beside it.

What is hard: nothing builds a model again as a script has built it, perhaps from pretrained weights. So the
model itself is pickled. What the pickle refers to in the script is copied into the source.
"""

from __future__ import annotations

import inspect
import math
import pickletools
import sys
import textwrap
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mesa_tune.errors import RunError
from mesa_tune.measure.recording.definitions import Definitions, definitions
from mesa_tune.measure.recording.loss_calls import INSTEAD, LossSource, quoted
from mesa_tune.workload.batches import batch_size
from mesa_tune.workload.instance.optimizers import unwrapped
from mesa_tune.workload.instance.recorded import BATCHES, SCRIPT, VALUES, digest_of

_LITERALS = (bool, int, float, str, type(None))
_IMPORTS = ("import torch", "import torch.nn.functional as F")
_GLOBALS = ("GLOBAL", "STACK_GLOBAL")


@dataclass
class Recording:
    """What was recorded of `script`, whose source is `file`.

    `accumulation`: backwards per step; `keeps_gradients`: gradients are alive when its first forward begins.
    """

    script: str
    file: Path | None
    model: nn.Module
    optimizer: Optimizer
    accumulation: int
    autocast: str | None = None
    clip_norm: float | None = None
    scaler: bool = False
    keeps_gradients: bool = False
    batches: list[dict[str, Any]] = field(default_factory=list)
    loss: LossSource | None = None
    constant: list[bool] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Device type of the model."""
        return next((parameter.device.type for parameter in self.model.parameters()), "cpu")

    def add(self, inputs: dict[str, Any], loss: LossSource) -> None:
        """Add a batch and the source of its loss. Raise RunError if earlier batches had another loss."""
        others = [other.detach() for other in loss.others]
        if self.loss is None:
            self.constant = [False] * len(others)
        elif self.loss.statements != loss.statements:
            raise RunError(
                "the loss of the script differs from step to step\n"
                "`mesa-tune init` writes a file to put it into"
            )
        else:
            self.constant = [one is other for one, other in zip(self.loss.others, loss.others, strict=True)]
        self.loss = loss
        others = [other.cpu().clone() for other in others]
        self.batches.append({**inputs, "others": others, "numbers": loss.numbers})

    @property
    def varying(self) -> list[int]:
        """The positions of those numbers in the loss that differ from batch to batch."""
        columns = zip(*(batch["numbers"] for batch in self.batches), strict=True)
        return [index for index, column in enumerate(columns) if len(set(column)) > 1]


def write(recording: Recording, folder: Path, path: Path) -> None:
    """Write the model file and the files beside it to `folder`, to be moved to `path`.

    Raise RunError for a model that cannot be pickled.
    """
    stem = path.stem
    model, batches = f"{stem}-model.pt", f"{stem}-batches.pt"
    others = _Others(recording)
    _pickle(_plain(recording.model), folder / model)
    names = [*_script_names(folder / model), *_optimizer_names(recording), *_loss_names(recording)]
    while True:
        found = definitions(names, recording.file) if names else Definitions([], [], {})
        values = {key: value for key, value in found.values.items() if not _is_literal(value)}
        _pickle({BATCHES: others.batches(), VALUES: values}, folder / batches)
        further = [each for each in _script_names(folder / batches) if each not in names]
        if not further:
            break
        names += further
    digest = digest_of(folder / model, folder / batches)[:16]
    opened = f"Recorded(globals(), {', '.join(map(quoted, (model, batches, digest)))})"
    local = sorted({*_local_modules(recording, folder / model, folder / batches), *_loss_modules(recording)})
    text = _source(recording, found, others, opened, local, _elsewhere(recording, path))
    (folder / path.name).write_text(text, "utf-8")


def _folder(recording: Recording) -> Path:
    """Return the folder from which the script imports modules of its own."""
    return (recording.file or Path.cwd() / "script").parent


def _elsewhere(recording: Recording, path: Path) -> str:
    """Return source that finds the modules beside the script, if the model file is not there."""
    folder = _folder(recording)
    if path.resolve().parent == folder:
        return ""
    return f"import sys\n\nsys.path.insert(0, {quoted(str(folder))})  # of modules that the script imports"


class _Others:
    """The tensors of the loss that are no arguments of the model, so that samples can be chosen from them.

    A constant gets a first dimension of 1. One whose first dimension is a multiple of the batch size, as that
    of flattened labels, gets the batch size as first dimension. `expressions` undo it.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        last = recording.batches[-1]
        self.kinds = [
            self._kind(other, constant)
            for other, constant in zip(last["others"], recording.constant, strict=True)
        ]

    def _kind(self, other: Tensor, constant: bool) -> str:
        size = batch_size(self.recording.batches[-1])
        if constant:
            return "[0]"
        many = other.dim() > 0 and other.shape[0] > size and other.shape[0] % size == 0
        return ".flatten(0, 1)" if many else ""

    @property
    def expressions(self) -> list[str]:
        """Source of each tensor as the loss takes it."""
        return [f'batch["others"][{index}]{kind}' for index, kind in enumerate(self.kinds)]

    def batches(self) -> list[dict[str, Any]]:
        """Return the batches as they are saved."""
        return [self._saved(batch) for batch in self.recording.batches]

    def _saved(self, batch: dict[str, Any]) -> dict[str, Any]:
        size = batch_size(batch)
        others = []
        for other, kind in zip(batch["others"], self.kinds, strict=True):
            grouped = other.unflatten(0, (size, -1)) if kind.startswith(".") else other
            others.append(other.unsqueeze(0) if kind == "[0]" else grouped)
        numbers = [batch["numbers"][index] for index in self.recording.varying]
        return {**batch, "others": others, "numbers": numbers}


def _plain(model: nn.Module) -> nn.Module:
    """Return `model` without the forward that accelerate puts around its own."""
    if "_original_forward" not in vars(model):
        return model
    plain = model.__new__(type(model))
    plain.__dict__ = {
        name: value for name, value in vars(model).items() if name not in ("forward", "_original_forward")
    }
    return plain


def _pickle(value: Any, path: Path) -> None:
    try:
        torch.save(value, path)
    except Exception as error:
        raise RunError(
            f"the model of the script, or a name that its classes use, cannot be pickled: {error}\n{INSTEAD}"
        ) from error


def _references(path: Path) -> list[tuple[str, str]]:
    """Return module and name of every class and function that a file of `torch.save` refers to."""
    with zipfile.ZipFile(path) as archive:
        name = next(each for each in archive.namelist() if each.endswith("data.pkl"))
        operations = pickletools.genops(archive.read(name))
        found = {str(argument) for operation, argument, _ in operations if operation.name in _GLOBALS}
    return sorted((module, name) for module, _, name in (each.partition(" ") for each in found))


def _script_names(path: Path) -> list[str]:
    return [name.partition(".")[0] for module, name in _references(path) if module == SCRIPT]


def _local_modules(recording: Recording, *paths: Path) -> list[str]:
    """Return the modules beside the script that files refer to: as imports they count in the fingerprint."""
    folder = _folder(recording)
    modules = {module for path in paths for module, _ in _references(path)} - {SCRIPT}
    modules &= sys.modules.keys()
    files = {
        module: Path(getattr(sys.modules[module], "__file__", None) or "/") for module in sorted(modules)
    }
    return [
        module
        for module, file in files.items()
        if file.resolve().is_relative_to(folder) and "site-packages" not in file.parts
    ]


def _optimizer_names(recording: Recording) -> list[str]:
    kind = type(unwrapped(recording.optimizer))
    return [kind.__qualname__] if kind.__module__ == SCRIPT else []


def _loss_names(recording: Recording) -> list[str]:
    """Return the names of the script's own autograd functions that its loss applies."""
    assert recording.loss is not None
    return [
        kind.__qualname__.partition(".")[0] for kind in recording.loss.classes if kind.__module__ == SCRIPT
    ]


def _loss_modules(recording: Recording) -> set[str]:
    """Return the modules of the other autograd functions that the loss applies."""
    assert recording.loss is not None
    return {kind.__module__ for kind in recording.loss.classes} - {SCRIPT}


def _is_literal(value: Any) -> bool:
    return type(value) in _LITERALS and not (isinstance(value, float) and not math.isfinite(value))


def _source(
    recording: Recording,
    found: Definitions,
    others: _Others,
    opened: str,
    local: list[str],
    elsewhere: str,
) -> str:
    future = [line for line in found.imports if line.startswith("from __future__")]
    imports = [line for line in found.imports if line not in (*future, *_IMPORTS)]
    literals = [f"{name} = {quoted(value)}" for name, value in found.values.items() if _is_literal(value)]
    sections = [
        _HEAD.format(script=recording.script, batches=len(recording.batches)),
        "\n".join(future),
        elsewhere,
        "\n".join(_IMPORTS),
        "from mesa_tune.workload.instance.recorded import Recorded",
        "\n".join([*imports, *(f"import {module}  # of the recorded model" for module in local)]),
        "\n".join(literals),
        *(f"\n{source}" for source in found.sources),
        "\n" * bool(found.sources) + "\n".join(_constants(recording)),
        f"recorded = {opened}\nbatch = recorded.batches  # to be called with the number of samples",
        _MODEL,
        _loss(recording, others),
        _optimizer(recording),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


_HEAD = '''"""The training step of `{script}`, recorded by mesa-tune.

The model, with its weights, and {batches} batches are in files beside this one. They are pickles, which load
where their classes can be imported. Any function may be replaced by your own.
"""'''

_MODEL = '''
def model():
    """Return the model as the script had it when the last batch was recorded."""
    return recorded.model()'''


def _constants(recording: Recording) -> list[str]:
    values = {
        "BATCH_SIZE": batch_size(recording.batches[0]),
        "AUTOCAST": recording.autocast,
        "ACCUMULATION": recording.accumulation if recording.accumulation > 1 else None,
        "CLIP_NORM": recording.clip_norm,
        "SCALER": recording.scaler or None,
    }
    lines = [f"{name} = {quoted(value)}" for name, value in values.items() if value is not None]
    if recording.keeps_gradients:
        lines.append("SET_TO_NONE = False  # gradients of the last step were alive when the forward began")
    return lines


def _loss(recording: Recording, others: _Others) -> str:
    assert recording.loss is not None
    call = ", ".join(
        f"{stars}batch[{quoted(key)}]"
        for key, stars in (("args", "*"), ("kwargs", "**"))
        if recording.batches[0][key]
    )
    varying = recording.varying
    *lines, value = recording.loss.written(varying)
    lines = [
        '"""Return the loss, by the calls that the script made with the output of its model."""',
        f"output = model({call})",
        *([f"others = [{', '.join(others.expressions)}]"] if others.expressions else []),
        *(['numbers = batch["numbers"]'] if varying else []),
        *lines,
        f"return {value}",
    ]
    return "\ndef loss(model, batch):\n    " + "\n    ".join(lines)


def _optimizer(recording: Recording) -> str:
    inner = unwrapped(recording.optimizer)
    kind, group = type(inner), inner.param_groups[0]
    rate = {"lr": group["initial_lr"]} if "initial_lr" in group else {}  # before a scheduler changed it
    values = {**group, **rate}
    options = [
        f", {name}={quoted(values[name])}"
        for name, parameter in inspect.signature(kind).parameters.items()
        if name in values and name != "params" and values[name] != parameter.default
    ]
    is_torchs = getattr(torch.optim, kind.__name__, None) is kind
    module = "torch.optim" if is_torchs else kind.__module__
    lines = [] if is_torchs or module == SCRIPT else [f"import {module}", ""]
    if len(inner.param_groups) > 1:
        lines += [f"# The script has {len(inner.param_groups)} groups; these are the options of the first."]
    name = kind.__qualname__ if module == SCRIPT else f"{module}.{kind.__qualname__}"
    lines += [f"return {name}(parameters{''.join(options)})"]
    return "\ndef optimizer(parameters):\n" + textwrap.indent("\n".join(lines), "    ")
