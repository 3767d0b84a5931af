"""`mesa-tune doctor`: what mesa-tune finds on this machine, and how to install what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mesa_tune.commands.common import (
    DEFAULT_RUN,
    DebugOption,
    JsonOption,
    Output,
    QuietOption,
    Run,
    counted,
    wrapped,
)
from mesa_tune.commands.guide.state import next_step

_PACKAGES = {
    "optuna": "the study of `mesa-tune search`",
    "pandas": "tables",
    "scipy": "the exact solver of `mesa-tune search`",
    "matplotlib": "figures",
    "jinja2": "report.html",
    "scikit-learn": "the data of the examples and of `mesa-tune demo`",
    "transformers": "most of the examples, and `profile hf:CONFIG`",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: what was found, whether it is good, and the remedy if not."""

    name: str
    found: str
    good: bool
    remedy: str = ""


def doctor(as_json: JsonOption = False, quiet: QuietOption = False, debug: DebugOption = False) -> None:
    """Say what this machine has, and how to install what is missing."""
    from mesa_tune.workload.workload import default_device

    output = Output(json=as_json, quiet=quiet)
    device = default_device()
    output.device(device, _device_note(device))
    findings = [_python(), _torch(), _kernels(), _cuda_kernels(), _compiler(), *map(_package, _PACKAGES)]
    for line in _lines(findings):
        output.line(line)
    output.line(next_step(Run(DEFAULT_RUN)))
    good = all(finding.good for finding in findings)
    output.document(
        "doctor", {"device": device, "good": good, "findings": [asdict(finding) for finding in findings]}
    )


def _lines(findings: Sequence[Finding]) -> list[str]:
    """Return the findings in lines of at most 80 characters, each with its remedy below it."""
    lines = []
    for finding in findings:
        lines += wrapped(f"{finding.name}: {finding.found}", 4, first="ok  " if finding.good else "--  ")
        lines += wrapped(finding.remedy, 6, first=6 * " ")
    return lines


def _device_note(device: str) -> str:
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"


def _python() -> Finding:
    return Finding("python", platform.python_version(), True)


def _torch() -> Finding:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return Finding("torch", f"{torch.__version__} ({build})", True)


def _kernels() -> Finding:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning only names this command
        from mesa_tune import ops

    name = "native kernels"
    if ops.native():
        return Finding(name, f"loaded from {ops.LIBRARY}", True)
    if os.environ.get("MESA_TUNE_REFERENCE") == "1":
        remedy = "unset MESA_TUNE_REFERENCE to use them"
        return Finding(name, "switched off: the slow reference in PyTorch is used", False, remedy)
    what = "does not load" if ops.LIBRARY.exists() else "was not built"
    return Finding(name, f"{ops.LIBRARY} {what}: the slow reference in PyTorch is used", False, _build())


def _build() -> str:
    """Return how to get kernels: build them if there are sources, else install another wheel."""
    wheel = "" if _sources() else "pip install --force-reinstall with a wheel built for this system, or "
    return wheel + _install()


def _install() -> str:
    """Return the command that builds the kernels."""
    sources = _sources()
    if sources is None:
        return "pip install --no-build-isolation with the folder of the sources, which builds them"
    return f"pip install --no-build-isolation -e {sources} builds them (`make install` does it)"


def _sources() -> Path | None:
    """Return the folder of the sources; None for a package that was installed from a wheel."""
    from mesa_tune import ops

    folder = ops.LIBRARY.parents[1]
    return folder if (folder / "setup.py").exists() else None


def _cuda_kernels() -> Finding:
    import torch

    from mesa_tune import ops

    name = "CUDA kernels"
    if ops.native("cuda"):
        return Finding(name, "in the library", True)
    if torch.version.cuda is None:
        return Finding(name, "none, as this torch has no CUDA", True)
    remedy = f"with the CUDA {torch.version.cuda} toolkit (nvcc) on PATH, MESA_TUNE_CUDA=1 {_install()}"
    return Finding(name, "none, so a GPU uses the slow reference in PyTorch", False, remedy)


def _compiler() -> Finding:
    for name in (os.environ.get("CXX") or "c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Finding("C++ compiler", path, True)
    remedy = "install g++ or clang++ (Debian: apt install g++), or name one in CXX; needed for building only"
    return Finding("C++ compiler", "none", False, remedy)


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name), True)
    except PackageNotFoundError:
        return Finding(name, "not installed", False, f"for {_PACKAGES[name]}: pip install {name}")
