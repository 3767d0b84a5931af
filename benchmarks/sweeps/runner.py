"""Run many cases in worker processes, so that a crash or a time-out of one case loses no other.

Every finished case is one JSON line, appended at once. A run that was interrupted goes on where it stopped:
a case with a line of the same code is not run again. The same code means the same sources of `mesa_tune` and
`tests`, so a result never outlives the code that it was measured on.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import queue
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[2]

RIGHT = "right"
BROKEN = "broken"
SKIPPED = "skipped"
CRASHED = "crashed"
TIMED_OUT = "timed out"
ILL_POSED = "ill-posed"
RESULTS = (RIGHT, BROKEN, CRASHED, TIMED_OUT, ILL_POSED, SKIPPED)
WRONG = frozenset({BROKEN, CRASHED, TIMED_OUT})

_FAMILIES = ("mesa_tune/**/*.py", "mesa_tune/*.so", "search/**/*.py", "csrc/**/*.*", "benchmarks/sweeps/*.py")
_WIDTH = 80


class Case(NamedTuple):
    """One thing to try, in one variant: `amax`, `scaled`."""

    name: str
    variant: str


@dataclass(frozen=True)
class Outcome:
    """What a case gave. `cause` says in a few words why it is broken or skipped.

    `figures` are numbers and words about the case that stand in its line: plain JSON values.
    """

    result: str
    cause: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


class Sweep(NamedTuple):
    """Cases and the function that runs one of them. A module offers its sweep as `SWEEP`.

    `limit_s`: seconds after which a case is given up. `refresh`: a worker process ends after so many cases,
    which bounds the memory that it may lose.
    """

    name: str
    cases: Callable[[], list[Case]]
    run: Callable[[Case], Outcome]
    limit_s: float
    refresh: int = 200


@dataclass(frozen=True)
class Line:
    """One line of a results file."""

    name: str
    variant: str
    result: str
    cause: str
    seconds: float
    code: str
    figures: Mapping[str, Any]

    @property
    def case(self) -> Case:
        return Case(self.name, self.variant)


class Results:
    """The lines of one sweep in one file. The last line of a case is the one that counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def lines(self) -> list[Line]:
        """The last line of every case, of whatever code."""
        if not self.path.exists():
            return []
        found: dict[Case, Line] = {}
        for text in self.path.read_text("utf-8").splitlines():
            line = Line(**json.loads(text))
            found[line.case] = line
        return list(found.values())

    def repair(self) -> None:
        """Cut off the half line that an interrupted run may have left at the end."""
        if self.path.exists():
            whole, newline, _ = self.path.read_text("utf-8").rpartition("\n")
            self.path.write_text(whole + newline, "utf-8")

    def append(self, line: Line) -> None:
        """Add `line` to the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")


def code() -> str:
    """Fingerprint of the sources and kernels that a result depends on."""
    digest = hashlib.sha256(torch.__version__.encode())
    for family in _FAMILIES:
        for path in sorted(ROOT.glob(family)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def run(
    module: str, results: Results, wanted: Callable[[Case], bool], jobs: int, say: Callable[[str], None]
) -> list[Line]:
    """Run the wanted cases of the sweep in `module` that have no line of this code yet.

    Returns the lines of the wanted cases in the order of the sweep; `say` gets a line of progress for each.
    """
    sweep, current = load(module), code()
    results.repair()
    cases = [case for case in sweep.cases() if wanted(case)]
    done = {line.case for line in results.lines() if line.code == current}
    left = [case for case in cases if case not in done]
    say(f"{sweep.name}: {len(left)} of {len(cases)} cases to run")
    waiting: queue.SimpleQueue[Case | None] = queue.SimpleQueue()
    for case in [*left, *[None] * jobs]:
        waiting.put(case)
    arguments = (module, waiting, current, results, say)
    threads = [threading.Thread(target=_drain, args=arguments, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {line.case: line for line in results.lines()}
    return [found[case] for case in cases if case in found]


def load(module: str) -> Sweep:
    """The sweep that `module` offers."""
    sweep = importlib.import_module(module).SWEEP
    assert isinstance(sweep, Sweep)
    return sweep


def _drain(
    module: str,
    waiting: queue.SimpleQueue[Case | None],
    current: str,
    results: Results,
    say: Callable[[str], None],
) -> None:
    """Run cases of `waiting`, one after the other, until there comes a None."""
    sweep = load(module)
    worker: _Worker | None = None
    for case in iter(waiting.get, None):
        worker = worker if worker is not None and worker.cases < sweep.refresh else _fresh(worker, module)
        started = time.perf_counter()
        outcome = worker.outcome(case, sweep.limit_s)
        seconds = round(time.perf_counter() - started, 2)
        line = Line(*case, outcome.result, outcome.cause, seconds, current, dict(outcome.figures))
        results.append(line)
        say(f"{line.result:9} {line.seconds:6.1f} s  {line.variant:10} {line.name}  {line.cause}")
        if not worker.process.is_alive():
            worker = None
    if worker is not None:
        worker.stop()


class _Worker:
    """A process that runs cases, and our end of the pipe to it."""

    def __init__(self, module: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_work, args=(module, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.cases = 0
        self.pipe.recv()  # the imports are no part of a case's time

    def outcome(self, case: Case, limit_s: float) -> Outcome:
        """The outcome of `case`. The process is dead after a crash or a time-out."""
        self.cases += 1
        self.pipe.send(case)
        if not self.pipe.poll(limit_s):
            self.process.kill()
            self.process.join()
            return Outcome(TIMED_OUT, f"more than {limit_s:g} s")
        try:
            outcome = self.pipe.recv()
        except EOFError:
            self.process.join()
            return Outcome(CRASHED, f"exit status {self.process.exitcode}")
        assert isinstance(outcome, Outcome)
        return outcome

    def stop(self) -> None:
        """End the process, which waits for its next case."""
        self.pipe.close()
        self.process.join()


def _fresh(worker: _Worker | None, module: str) -> _Worker:
    if worker is not None:
        worker.stop()
    return _Worker(module)


def _work(module: str, pipe: Connection) -> None:
    """Run the cases that come through `pipe` until it is closed; the body of a worker process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sweep = load(module)
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        pipe.send(sweep.run(case))


def table(lines: Sequence[Line]) -> str:
    """Counts by variant and result, then what is wrong with its cause; at most 80 columns."""
    variants = list(dict.fromkeys(line.variant for line in lines))
    counts = Counter((line.variant, line.result) for line in lines)
    head = "".join(f"{result:>11}" for result in RESULTS)
    rows = [f"{'':14}{head}"]
    for variant in variants:
        row = [counts[variant, result] for result in RESULTS]
        rows.append(f"{variant:14.14}" + "".join(f"{number:11}" for number in row))
    return "\n".join([*rows, *_faults(lines)])


def _faults(lines: Iterable[Line]) -> list[str]:
    wrong = [line for line in lines if line.result in WRONG]
    if not wrong:
        return ["", "nothing is broken"]
    rows = [f"{line.name} ({line.variant}): {line.cause or line.result}" for line in wrong]
    return [
        "",
        f"{len(wrong)} broken:",
        *(row if len(row) <= _WIDTH else row[: _WIDTH - 1] + "…" for row in rows),
    ]
