"""`mesa-tune doctor`: what mesa-tune finds on this machine, and how to install what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from mesa_tune.commands.common import (
    DEFAULT_RUN,
    DebugOption,
    JsonOption,
    Output,
    QuietOption,
    Run,
    counted,
)
from mesa_tune.commands.guide.state import next_step

_PACKAGES = {
    "optuna": "the study of `mesa-tune search`",
    "pandas": "tables",
    "scipy": "the exact solver of `mesa-tune search`",
    "matplotlib": "figures",
    "jinja2": "report.html",
    "scikit-learn": "the data of the examples and of `mesa-tune demo`",
    "transformers": "most of the examples, and `profile hf:CONFIG.json`",
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
    for finding in findings:
        output.line(f"{'ok ' if finding.good else '-- '} {finding.name}: {finding.found}")
        if finding.remedy:
            output.line(f"       {finding.remedy}")
    output.line(next_step(Run(DEFAULT_RUN)))
    good = all(finding.good for finding in findings)
    output.document(
        "doctor", {"device": device, "good": good, "findings": [asdict(finding) for finding in findings]}
    )


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
    what = "do not load" if ops.LIBRARY.exists() else "were not built"
    return Finding(name, f"{ops.LIBRARY} {what}: the slow reference in PyTorch is used", False, _build())


def _build() -> str:
    """Return how to get kernels: build them if there are sources, else install another wheel."""
    from mesa_tune import ops

    sources = ops.LIBRARY.parents[1]
    if (sources / "setup.py").exists():
        return f"pip install --no-build-isolation -e {sources} builds them (`make install` does it)"
    return (
        "pip install --force-reinstall with a wheel built for this system, "
        "or pip install --no-build-isolation with the folder of the sources, which builds them"
    )


def _cuda_kernels() -> Finding:
    import torch

    from mesa_tune import ops

    name = "CUDA kernels"
    if ops.native("cuda"):
        return Finding(name, "in the library", True)
    if torch.version.cuda is None:
        return Finding(name, "none, as this torch has no CUDA", True)
    remedy = f"with the CUDA {torch.version.cuda} toolkit (nvcc) on PATH, MESA_TUNE_CUDA=1 {_build()}"
    return Finding(name, "none: on a GPU the slow reference in PyTorch is used", False, remedy)


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
        return Finding(name, "not installed", False, f"pip install {name}: {_PACKAGES[name]}")
