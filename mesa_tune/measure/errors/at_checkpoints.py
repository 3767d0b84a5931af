"""Gradient error and noise with the weights of checkpoints: at several points of training.

What is hard: both change with training. Measured with a model's first weights, they say little about its last
ones.
"""

from __future__ import annotations

import pickle
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mesa_tune.errors import WorkloadError
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.policy import Policy
from mesa_tune.profiles.own_noise import AtCheckpoint
from mesa_tune.workload.user_code import first_line
from mesa_tune.workload.workload import Workload

_ENTRIES = ("model", "state_dict")
_PREFIXES = ("_orig_mod.", "module.")
_SAVE = "save it with torch.save(model.state_dict(), path)"


def at_checkpoints(
    workload: Workload,
    model: nn.Module,
    policy: Policy,
    *,
    batches: int,
    first_seed: int = 0,
    checkpointed: bool = False,
) -> Iterator[AtCheckpoint]:
    """Yield error and noise of `policy` at each checkpoint of `workload`; `model` has its weights afterwards.

    The error is the mean over the first `batches` draws, each with a rounding seed of its own.
    `checkpointed`: see `JointError`.

    Raise WorkloadError for a file that is not of this model, or with whose weights no step can be taken.
    """
    for path in workload.checkpoints:
        load_weights(model, path)
        joint = JointError(workload, model, checkpointed=checkpointed)
        try:
            squares = [joint.squares(policy, draw, first_seed + draw) for draw in range(batches)]
            errors = [joint.relative(each, draw).error for draw, each in enumerate(squares)]
            noise = joint.noise(fewest=batches)
        except WorkloadError as error:
            raise WorkloadError(f"checkpoint {path}: {error}") from error
        ratio = noise.own.ratio(np.mean(squares, axis=0)) if noise.own.is_known else None
        yield AtCheckpoint(str(path), statistics.fmean(errors), noise.relative, ratio)


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load the parameters and buffers in the file at `path` into `model`.

    The file: what `torch.save` wrote of a state_dict, or of a dict with one as `model` or `state_dict`. The
    prefixes that DistributedDataParallel and torch.compile add to all names are dropped. Raise WorkloadError
    if the file cannot be read, or if its names or shapes are not those of `model`.
    """
    content = _read(path)
    state = next((content[name] for name in _ENTRIES if isinstance(content.get(name), Mapping)), content)
    if not state or not any(isinstance(value, Tensor) for value in state.values()):
        raise WorkloadError(f"checkpoint {path}: has no tensors\n{_SAVE}")
    try:
        model.load_state_dict(_without_prefixes(state))
    except RuntimeError as error:
        faults = [line.strip() for line in str(error).splitlines()[1:]]
        raise WorkloadError(
            f"checkpoint {path}: not of the model that model() returns: {_shown(faults, error)}\n"
            "correct CHECKPOINTS in the model file, or leave it out"
        ) from error


def _read(path: str | Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise WorkloadError(
            f"checkpoint {path}: no such file\n"
            "correct CHECKPOINTS in the model file (paths relative to it), or leave it out"
        ) from None
    except pickle.UnpicklingError as error:
        raise WorkloadError(f"checkpoint {path}: has objects other than tensors\n{_SAVE}") from error
    except (OSError, RuntimeError, EOFError) as error:
        raise WorkloadError(f"checkpoint {path}: cannot be read: {first_line(error)}\n{_SAVE}") from error
    if not isinstance(content, Mapping):
        raise WorkloadError(f"checkpoint {path}: has a {type(content).__name__}, no state_dict\n{_SAVE}")
    return content


def _without_prefixes(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` without the prefixes of wrappers that all of its names have."""
    names = dict(state)
    while prefix := next((each for each in _PREFIXES if all(name.startswith(each) for name in names)), None):
        names = {name.removeprefix(prefix): value for name, value in names.items()}
    return names


def _shown(faults: list[str], error: Exception) -> str:
    return first_line(RuntimeError(faults[0])) if faults else first_line(error)
