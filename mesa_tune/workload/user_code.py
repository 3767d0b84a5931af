"""Running the user's functions: whatever they raise comes out as one WorkloadError that says where."""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from mesa_tune.errors import MesaTuneError, WorkloadError

_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
_LONGEST = 300


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or what it was raised from, says that memory ran out: on a device or on the host."""
    if error is None:
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    said = isinstance(error, RuntimeError) and any(phrase in text for phrase in _OUT_OF_MEMORY)
    return said or is_out_of_memory(error.__cause__)


class explaining:  # noqa: N801 - reads as a statement: `with explaining(...)`
    """A context that turns what the user's `function` (called `name`) raises into a WorkloadError.

    Errors of ours and lack of memory pass as they are: callers act on them. `path` is the model file, where
    the function came from one; otherwise the file that defines the function counts.
    """

    def __init__(
        self, name: str, function: Callable[..., Any] | None = None, path: Path | None = None
    ) -> None:
        self.name = name
        self.function = function
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # SystemExit too: a model file that calls sys.exit() must not end a profile as if it were done.
        if not isinstance(error, (Exception, SystemExit)) or isinstance(error, MesaTuneError):
            return
        if not is_out_of_memory(error):
            raise WorkloadError(self._message(error, trace)) from error

    def _message(self, error: BaseException, trace: TracebackType | None) -> str:
        file, line = self._place(trace)
        source = linecache.getline(file, line).strip()
        what = f"{_shown(file)}:{line}: {self.name} raised {type(error).__name__}: {first_line(error)}"
        return "\n".join([what, *([f"    {source}"] if source else []), _remedy(error)])

    def _place(self, trace: TracebackType | None) -> tuple[str, int]:
        """The innermost line of the user's file on the way to the error, or where the function begins."""
        file, first = place_of(self.function, self.path)
        frames = [frame for frame in traceback.extract_tb(trace) if frame.filename == file]
        return file, (frames[-1].lineno or first) if frames else first


def place_of(function: Callable[..., Any] | None, path: Path | None = None) -> tuple[str, int]:
    """File and line at which `function` is defined; the start of `path` for what has no code of its own."""
    if isinstance(function, functools.partial):
        return place_of(function.func, path)
    plain = inspect.unwrap(function) if function else None
    of_type = getattr(type(plain), "__call__", None)  # noqa: B004 - its code is wanted, not whether it is there
    code = getattr(plain, "__code__", None) or getattr(of_type, "__code__", None)
    if code is None:
        return str(path or "<unknown>"), 1
    return code.co_filename, code.co_firstlineno


def located(function: Callable[..., Any], path: Path | None = None) -> str:
    """`model.py:12`: where `function` is defined, for the head of a message."""
    file, line = place_of(function, path)
    return f"{_shown(file)}:{line}"


def first_line(error: BaseException) -> str:
    """The first line of what `error` says, no longer than a few terminal lines."""
    lines = str(error).strip().splitlines() or ["(no message)"]
    return lines[0] if len(lines[0]) <= _LONGEST else lines[0][:_LONGEST] + "…"


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Torch's, NumPy's and Python's random generators start at `seed` inside, and are as before after it."""
    cuda = torch.cuda.is_available() and (device.startswith("cuda") or torch.cuda.is_initialized())
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda_states = torch.cuda.get_rng_state_all() if cuda else []
    try:
        # Not torch.manual_seed: where CUDA has not started it would leave a seed behind for its start.
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed_all(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda_states)


def mixed_seed(seed: int, draw: int) -> int:
    """A seed of 63 bits for the `draw`-th use of `seed`; neighbours have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{draw}".encode()).digest()[:8], "little") >> 1


def _shown(file: str) -> str:
    """The path as a person in the current folder would write it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _remedy(error: BaseException) -> str:
    if any(phrase in str(error) for phrase in ("same device", "expected device")):
        return "make new tensors where the batch is: torch.zeros(…, device=images.device)"
    return "--debug shows the whole traceback"
