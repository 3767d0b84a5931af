"""Running the user's functions: an error becomes a WorkloadError, even if it is raised deep inside torch.

The error names the innermost line of the user's own file in the traceback.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import random
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from mesa_tune.errors import MesaTuneError, WorkloadError, at_command_line

_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
_LONGEST = 300
_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")
_OURS = "this is a fault of mesa-tune: please report it, with the traceback that --debug shows"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if `error` or its cause says that memory ran out, on a device or on the host."""
    if error is None:
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = _text(error).lower()
    by_text = isinstance(error, RuntimeError) and any(phrase in text for phrase in _OUT_OF_MEMORY)
    return by_text or is_out_of_memory(error.__cause__)


def lacks_values(error: BaseException | None) -> bool:
    """Return True if `error` says that fake tensors have no values, or no shape without them."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


class explaining:  # noqa: N801 - reads as a statement: `with explaining(...)`
    """Context that turns an error of the user's `function` (called `name`) into a WorkloadError.

    A MesaTuneError or an out-of-memory error passes unchanged: callers act on it. `path` is the model file;
    None means the file that defines the function.
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
        # SystemExit too: a model file that calls sys.exit() must not end the profile with success.
        if not isinstance(error, (Exception, SystemExit)) or isinstance(error, MesaTuneError):
            return
        if not is_out_of_memory(error):
            raise WorkloadError(self._message(error, trace)) from error

    def _message(self, error: BaseException, trace: TracebackType | None) -> str:
        file, line = self._location(trace)
        return _three_lines(file, line, f"{self.name} raised", error, _remedy(error))

    def _location(self, trace: TracebackType | None) -> tuple[str, int]:
        """Return the innermost line of the user's file in the traceback, or the first of the function."""
        file, first = _definition(self.function, self.path)
        frames = [frame for frame in traceback.extract_tb(trace) if frame.filename == file]
        return file, (frames[-1].lineno or first) if frames else first


def _definition(function: Callable[..., Any] | None, path: Path | None = None) -> tuple[str, int]:
    """Return file and line of the definition of `function`; line 1 of `path` if it has no code."""
    if isinstance(function, functools.partial):
        return _definition(function.func, path)
    plain = inspect.unwrap(function) if function else None
    of_type = getattr(type(plain), "__call__", None)  # noqa: B004 - not a test for callable
    code = getattr(plain, "__code__", None) or getattr(of_type, "__code__", None)
    if code is None:
        return str(path or "<unknown>"), 1
    return code.co_filename, code.co_firstlineno


def located(function: Callable[..., Any], path: Path | None = None) -> str:
    """Return where `function` is defined, such as `model.py:12`, for the head of a message."""
    file, line = _definition(function, path)
    return f"{_shown(file)}:{line}"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of `error`, cut at 300 characters.

    Of a message that has a traceback, as that of a DataLoader's worker, it is the last line.
    """
    text = _text(error).strip()
    lines = text.splitlines() or ["(no message)"]
    line = lines[-1] if "Traceback (most recent call last)" in text else lines[0]
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's own class
        return ""


def raised_by_user(error: BaseException) -> bool:
    """Return True if the innermost frame of `error` that is not of installed code is the user's."""
    frame = _own_frame(error)
    return frame is not None and not _is_ours(frame[0])


def unexplained(error: BaseException) -> str:
    """Return at most three lines about an error that the command line did not expect.

    They name the user's file and line, or say that it is a fault of mesa-tune.
    """
    found = _own_frame(error)
    if found is None:
        return f"{type(error).__name__}: {first_line(error)}\n{_OURS}"
    frame, line = found
    remedy = _OURS if _is_ours(frame) else "--debug shows the whole traceback"
    return _three_lines(frame.f_code.co_filename, line, "raised", error, remedy)


def _three_lines(file: str, line: int, raised: str, error: BaseException, remedy: str) -> str:
    """Return where and what, the line of source if there is one, and the remedy if there is one."""
    source = linecache.getline(file, line).strip()
    what = f"{_shown(file)}:{line}: {raised} {type(error).__name__}: {first_line(error)}"
    return "\n".join([what, *([f"    {source}"] if source else []), *([remedy] if remedy else [])])


def _own_frame(error: BaseException) -> tuple[FrameType, int] | None:
    """Return the innermost frame, and its line, that is in a file of the user or of mesa-tune."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return next((each for each in reversed(frames) if _is_ours(each[0]) or not _is_installed(each[0])), None)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "mesa_tune"


def _is_installed(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_INSTALLED)


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Seed the random generators of torch, NumPy and Python for the body, and restore them afterwards."""
    cuda = torch.cuda.is_available() and (device.startswith("cuda") or torch.cuda.is_initialized())
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda_states = torch.cuda.get_rng_state_all() if cuda else []
    try:
        # Not torch.manual_seed: before CUDA is initialized it would queue a seed for the initialization.
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
    """Return a 63-bit seed for the `draw`-th use of `seed`, a hash of both."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{draw}".encode()).digest()[:8], "little") >> 1


def _shown(file: str) -> str:
    """Return the path relative to the current folder if it is inside."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _remedy(error: BaseException) -> str:
    if any(phrase in _text(error) for phrase in ("same device", "expected device")):
        return "make new tensors where the batch is: torch.zeros(…, device=images.device)"
    if "saved tensor hooks" in _text(error):
        return (
            "what a step saves is measured by such hooks: leave this part out of loss() "
            "(a converted model runs it uncompressed)"
        )
    if lacks_values(error):
        return "without values its bytes cannot be known: profile it with real steps (no --bytes-only)"
    return "--debug shows the whole traceback" if at_command_line() else ""
