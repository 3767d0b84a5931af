"""What rank 0 alone does for all processes of a training.

What is hard: it may take an hour, and the others wait. Collectives of a GPU backend end after minutes, so the
others wait in a group of their own on the CPU. If rank 0 fails, all must fail: a process that trains alone
would wait for the others for ever.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn

from mesa_tune.errors import MesaTuneError, RunError

_PATIENCE = dt.timedelta(days=1)
_COLLECTIVE = ("FullyShardedDataParallel", "SyncBatchNorm")


def text_of_rank_zero(make: Callable[[], str]) -> str:
    """Return the text that `make` returns on rank 0, on all ranks; all of them must call.

    Without torch.distributed, or with one process, call `make`. Raise the MesaTuneError of rank 0 on all
    ranks; RunError on the others if rank 0 fails otherwise.
    """
    if processes() == 1:
        return make()
    group: Any = distributed.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        return _made(make, group) if distributed.get_rank() == 0 else _received(group)
    finally:
        distributed.destroy_process_group(group)


def processes() -> int:
    """Return the number of processes of the default group; 1 without one."""
    grouped = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if grouped else 1


def is_rank_zero() -> bool:
    """Return whether this process is the first of its group, or alone."""
    return processes() == 1 or distributed.get_rank() == 0


def _made(make: Callable[[], str], group: distributed.ProcessGroup) -> str:
    outcome: list[object] = [None, RunError("rank 0 failed: its own message says why")]
    try:
        text = make()
        outcome = [text, None]
        return text
    except MesaTuneError as error:
        outcome = [None, type(error)(f"rank 0: {error}")]
        raise
    finally:
        distributed.broadcast_object_list(outcome, src=0, group=group, device=torch.device("cpu"))


def _received(group: distributed.ProcessGroup) -> str:
    outcome: list[object] = [None, None]
    distributed.broadcast_object_list(outcome, src=0, group=group, device=torch.device("cpu"))
    text, error = outcome
    if isinstance(error, MesaTuneError):
        raise error
    assert isinstance(text, str)
    return text


def require_alone(model: nn.Module) -> None:
    """Raise RunError if a step of `model` communicates: rank 0 would wait for others that wait for it."""
    if processes() == 1:
        return
    for name, module in model.named_modules():
        kind = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _COLLECTIVE), None)
        sharded = any(type(each).__name__ == "DTensor" for each in module.parameters(recurse=False))
        if kind or sharded:
            raise RunError(
                f"{name or 'the model'} is {kind or 'sharded'}: its step needs the processes of all ranks\n"
                "call mt.auto before the model is sharded or synchronized: rank 0 measures alone"
            )
