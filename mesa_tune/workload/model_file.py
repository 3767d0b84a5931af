"""Reading a model file: the user's Python file that defines model, batch and loss.

The hard part is to run it as Python runs a script, yet as a module: pickle and dataclasses must find the
module in sys.modules, and its folder is on the import path. The code comes from the present content of the
file and of its own modules, and no bytecode is written.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mesa_tune.errors import WorkloadError
from mesa_tune.workload.local_modules import LocalModule, find_local_modules, serve
from mesa_tune.workload.user_code import explaining, first_line

_REQUIRED = {"model": "model()", "batch": "batch(batch_size)", "loss": "loss(model, batch)"}
_OPTIONAL = ("optimizer", "step")
_START = "`mesa-tune init` writes a model file to start from"


def read_model_file(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the fingerprint of the model file at `path`, and the names that it defines.

    The fingerprint is a SHA-256 of the content of the file and of the local modules that it imports. It is
    made before the file runs, and what runs is what was hashed, also if files change in between. Raise
    WorkloadError if the file does not exist, is not Python, raises, or lacks one of the three functions. A
    file with `step` needs no `loss`.
    """
    content = _read(path)
    if path.suffix == ".json":
        raise WorkloadError(
            f"{path}: is no Python file\n"
            f"of a configuration of transformers, the bytes alone: mesa-tune profile hf:{path} --bytes-only"
        )
    modules = find_local_modules(path.resolve().parent, content)
    serve(modules)
    names = vars(_executed(path, content))
    required = {name: text for name, text in _REQUIRED.items() if name != "loss" or names.get("step") is None}
    for name, signature in required.items():
        if not callable(names.get(name)):
            fault = f"{name} is a {type(names[name]).__name__}" if name in names else f"{name} is missing"
            raise WorkloadError(
                f"{path}: no function {signature}: {fault}\n"
                f"a model file defines {', '.join(_REQUIRED.values())}\n{_START}"
            )
    for name in _OPTIONAL:
        if names.get(name) is not None and not callable(names[name]):
            kind = type(names[name]).__name__
            raise WorkloadError(f"{path}: {name} is a {kind}, not a function\n{_START}")
    return _fingerprint(content, modules), names


def file_fingerprint(path: Path) -> str | None:
    """Return the fingerprint of the model file at `path`, which does not run; None if it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return _fingerprint(content, find_local_modules(path.resolve().parent, content))


def _fingerprint(content: bytes, modules: Mapping[str, LocalModule]) -> str:
    digest = hashlib.sha256(content)
    for name, module in modules.items():
        digest.update(f"\0{name}\0{hashlib.sha256(module.content).hexdigest()}".encode())
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise WorkloadError(f"{path}: no such file\n{_START}") from None
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}\n{_START}") from error


def _executed(path: Path, content: bytes) -> ModuleType:
    try:
        code = compile(content, str(path), "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise WorkloadError(
            f"{path}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
            + (f"\n    {line}" if line else "")
            + "\ncorrect the line"
        ) from error
    except ValueError as error:
        raise WorkloadError(f"{path}: is no Python source: {first_line(error)}\n{_START}") from error
    name = f"mesa_tune_model_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    with explaining("the model file", None, path):
        exec(code, vars(module))
    return module
