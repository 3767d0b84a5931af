"""What benchmarks share: the header of a result, the results file, timing in turn, and statistics."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")
PACKAGES = ("mesa-tune", "torch", "numpy", "scipy", "optuna", "transformers")


class Spread(NamedTuple):
    """A median, and the lower and upper quartile."""

    median: float
    low: float
    high: float


class Interval(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


def header() -> dict[str, Any]:
    """Return date, commit, hardware, versions and command of this run."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **_versions()},
        "command": " ".join(["python", *sys.orig_argv[1:]]).replace(f"{ROOT}/", ""),
    }


def commit() -> str | None:
    """Return the commit that is checked out, with "+" where files differ from it; None without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def hardware() -> dict[str, Any]:
    """Return the processor, the instruction set that torch uses, the threads, and the GPU or None."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def append(subject: str, result: Mapping[str, Any]) -> Path:
    """Append the header and `result` as one line to `results/<subject>.jsonl`; return the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{subject}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**header(), **result}, allow_nan=False) + "\n")
    return path


def code_of(folders: Sequence[str], *files: Path) -> str:
    """Return a hash of the sources of mesa-tune in `folders`, of the kernels, and of further files."""
    sources = [file for folder in folders for file in (ROOT / "mesa_tune" / folder).resolve().rglob("*.py")]
    every = sorted([*sources, *ROOT.glob("csrc/**/*.*"), *files])
    return hashlib.sha256(b"".join(file.read_bytes() for file in every)).hexdigest()[:12]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the values in a file of lines of JSON, oldest first; none if there is no such file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of `values`."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def ratios(before: Sequence[float], after: Sequence[float]) -> Spread:
    """Return the spread of after / before, pair by pair: both were measured in the same round."""
    return spread([second / first for first, second in zip(before, after, strict=True)])


def in_turn(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each of `runs`, called A B C A B C …, after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of at least two `values`, with its confidence interval by Student's t."""
    from scipy import stats

    mean = statistics.fmean(values)
    error = statistics.stdev(values) / len(values) ** 0.5
    half_width = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * error
    return Interval(mean, mean - half_width, mean + half_width)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    return {package: number for package in PACKAGES if (number := _version(package)) is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
