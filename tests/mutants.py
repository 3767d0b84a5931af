"""Random mutants: how many small faults does the suite notice, in each room of the package?

    pip install cosmic-ray              # it is not among the packages that `make` installs
    python -m tests.mutants             # the suite under coverage, then 300 mutants; a second run resumes
    python -m tests.mutants --survivors # the mutants that no test notices, as differences

A mutant is one change of cosmic-ray's to one line: another operator, another number, `not` added, and so on.
Each room has 20 of them, chosen by a hash of the line, so edits elsewhere leave them as they are. A mutant is
tried on the tests that run its statement: first on the one that noticed it last time, then on those of
`make test`, then on those of `make test-slow`; one case of each test function, the fastest first, then others
until they take `SECONDS`. Coverage does not see what torch.compile traces, nor tests in other processes: a
mutant there may survive although a test would notice it. The results are `benchmarks/results/mutants.jsonl`.

Label `after` has the tests once they were trimmed, `before` those of ee46411. Of `before` only the 79 mutants
that survived `after` were tried: all at once, on the tests that the trim changed or removed; those that made
a test fail, then alone. Those of the sweeps and eight slow ones of other rooms were not run.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

ROOMS = {
    "policy": ["mesa_tune/policy/**/*.py"],
    "codecs": ["mesa_tune/codecs/**/*.py"],
    "engine": ["mesa_tune/engine/**/*.py"],
    "formulas": ["mesa_tune/formulas/**/*.py", "mesa_tune/functional.py", "mesa_tune/nn/*.py"],
    "conversion": ["mesa_tune/conversion/**/*.py"],
    "ops": ["mesa_tune/ops/**/*.py"],
    "workload": ["mesa_tune/workload/**/*.py"],
    "measure": [
        "mesa_tune/profiles/**/*.py",
        "mesa_tune/measure/*.py",
        *(f"mesa_tune/measure/{n}/*.py" for n in ("timing", "watching")),
    ],
    "memory": ["mesa_tune/measure/memory/*.py", "mesa_tune/measure/re*/*.py", "mesa_tune/estimation/*.py"],
    "errors": ["mesa_tune/measure/errors/*.py"],
    "search": ["search/**/*.py"],
    "commands": ["mesa_tune/commands/**/*.py", "mesa_tune/cli.py", "mesa_tune/runs/*.py"],
    "reports": ["reports/**/*.py"],
    "compat": ["mesa_tune/compat/**/*.py"],
    "training": [
        "mesa_tune/integrations/*.py",
        *(f"mesa_tune/{n}.py" for n in ("autotune", "monitor", "retune")),
    ],
}
OF_A_ROOM = 20
SECONDS = 15.0
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "mutants"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.jsonl"
COVERAGE = f"""[run]
source = mesa_tune, search, reports
branch = true
parallel = true
patch = subprocess
data_file = {FOLDER}/coverage
"""
HEAVY = ["torch", "numpy", "scipy.optimize", "pandas", "matplotlib.figure", "optuna", "hypothesis", "pytest"]
"""Imported once, before the processes of mutants are forked."""


class Mutant(NamedTuple):
    """A change: the occurrence of an operator of cosmic-ray in a file, and the text of the file with it."""

    digest: str
    """Hash of the place: its file, its line's text, and how many equal lines are above."""
    room: str
    path: str
    line: int
    operator: str
    occurrence: int
    text: str


def drawn(of_a_room: int, seed: int) -> list[Mutant]:
    """The mutants, room by room; drawn once for the same sources, because this takes a minute."""
    sources = [(path, Path(path).read_text("utf-8")) for room in ROOMS for path in paths(room)]
    path = FOLDER / f"drawn-{hashlib.sha256(repr((of_a_room, seed, sources)).encode()).hexdigest()[:16]}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(list(_drawn(of_a_room, seed))))
    return [Mutant(*values) for values in json.loads(path.read_text())]


def paths(room: str) -> list[str]:
    """The files of a room."""
    return sorted({str(path) for pattern in ROOMS[room] for path in Path().glob(pattern)})


def _drawn(of_a_room: int, seed: int) -> Iterator[Mutant]:
    for room in ROOMS:
        sites = sorted(
            (site for path in paths(room) for site in _sites(path, seed)), key=lambda site: site[0]
        )
        for digest, path, line, operator, occurrence in sites[:of_a_room]:
            text = _mutated(path, operator, occurrence)
            yield Mutant(digest[:16], room, path, line, operator, occurrence, text)


def _sites(path: str, seed: int) -> Iterator[tuple[str, str, int, str, int]]:
    """Yield (random rank, path, line, operator, occurrence): one change for each place but annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator, operator_names  # pyright: ignore[reportMissingImports]

    source = Path(path).read_text("utf-8")
    nodes, ignored, lines = list(ast_nodes(get_ast(source))), _annotated(source), source.splitlines()
    changes: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():
            continue
        starts = (start for node in nodes for start, _ in operator().mutation_positions(node))
        for occurrence, start in enumerate(starts):
            if not any(first <= start < last for first, last in ignored):
                changes[start].append((name, occurrence))
    equal: Counter[tuple[str, int]] = Counter()
    for (line, column), found in sorted(changes.items()):
        place = lines[line - 1].strip(), column
        rank = hashlib.sha256(f"{seed} {path} {place} {equal[place]}".encode()).hexdigest()
        equal[place] += 1
        yield (rank, path, line, *random.Random(rank).choice(found))


def _annotated(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """List where annotations and type aliases begin and end."""
    nodes: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes.append(node.returns)
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            nodes.append(node.annotation)
        elif isinstance(node, ast.Assign) and any(isinstance(n, ast.Name) for n in node.targets):
            nodes += [node.value] if _is_alias(node.value) else []
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in nodes
        if node is not None
    ]


def _is_alias(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp):
        return _is_alias(value.left) or _is_alias(value.right)
    named = isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name)
    return named and ast.unparse(value).split("[")[0] in {"dict", "list", "tuple", "Callable", "Sequence"}


def _mutated(path: str, operator: str, occurrence: int) -> str:
    from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]

    text = mutate_code(Path(path).read_text("utf-8"), get_operator(operator)(), occurrence)
    assert isinstance(text, str), (path, operator, occurrence)
    return text


def record() -> None:
    """Run all tests under coverage: which test runs which lines, and how long it takes."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings = FOLDER / "coveragerc"
    settings.write_text(COVERAGE)
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest"]
    command += ["-p", "tests.mutants", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-q"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    subprocess.run([sys.executable, "-m", "coverage", "combine", f"--rcfile={settings}", "-q"], check=True)


def pytest_sessionstart() -> None:
    """Leave out the processes that tests start: what they run would belong to no test."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.pop("COVERAGE_PROCESS_CONFIG", None)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Name the lines that run from now on after the test."""
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Write how long a test takes, its fixtures included, and whether `make test` runs it."""
    if coverage.Coverage.current() is not None and call.when != "teardown":
        slow = item.get_closest_marker("slow") is not None
        # By os.write: tests replace functions that open and write files.
        os.write(_seconds(), (json.dumps([item.nodeid, call.when, call.duration, slow]) + "\n").encode())


@cache
def _seconds() -> int:
    return os.open(FOLDER / "seconds.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class Recorded:
    """Tests by the lines that they run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.slow: set[str] = set()
        for line in (FOLDER / "seconds.jsonl").read_text().splitlines():
            name, _, seconds, slow = json.loads(line)
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds  # of its setup, too
            self.slow |= {name} if slow else set()
        self.data = coverage.CoverageData(str(FOLDER / "coverage"))
        self.data.read()
        files = sorted(self.data.measured_files())
        self.names = {os.path.relpath(os.path.realpath(path)): path for path in files}
        self._contexts: dict[str, dict[int, list[str]]] = {}

    def forget_all_but(self, names: set[str]) -> None:
        """Forget tests that are gone: pytest fails if it is asked for one."""
        self.seconds = {name: seconds for name, seconds in self.seconds.items() if name in names}

    def tests(self, mutant: Mutant) -> list[str]:
        """List the tests that run the mutant's statement; all of its file for what runs at import."""
        if mutant.path not in self.names:
            return []
        if mutant.path not in self._contexts:
            self._contexts[mutant.path] = self.data.contexts_by_lineno(self.names[mutant.path])
        contexts = self._contexts[mutant.path]
        lines = _statement(Path(mutant.path).read_text("utf-8"), mutant.line)
        running = {name for line in lines for name in contexts.get(line, [])} & self.seconds.keys()
        return sorted(
            running or {name for names in contexts.values() for name in names} & self.seconds.keys()
        )

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Choose tests that take `SECONDS` together: of each function the fastest case first, then others."""
        cases: dict[str, list[str]] = defaultdict(list)
        for name in sorted(names, key=lambda name: self.seconds[name]):
            cases[name.split("[")[0]].append(name)
        first = sorted((names[0] for names in cases.values()), key=lambda name: self.seconds[name])
        others = [name for names in cases.values() for name in names[1:]]
        random.Random(0).shuffle(others)
        total, tests = 0.0, list[str]()
        for name in (*first, *others):
            total += self.seconds[name] + 0.01
            if total > SECONDS and tests:
                break
            tests.append(name)
        return tests


def _statement(source: str, line: int) -> range:
    """The lines of the innermost statement at `line`, without its body."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):  # outer nodes first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            found = range(node.lineno, body[0].lineno if body else (node.end_lineno or 0) + 1)
    return found


def run(mutants: Sequence[Mutant], share: str, label: str) -> None:
    """Try the mutants of this share (`k/n`) that have no result under `label`."""
    for name in HEAVY:
        import_module(name)
    number, shares = map(int, share.split("/"))
    recorded, copy = Recorded(), _copied(FOLDER / f"copy{number}")
    recorded.forget_all_but(_collected())
    done = {line["digest"] for line in results() if line["label"] == label}
    before = {line["digest"]: line["killer"] for line in results() if line["killer"]}
    for mutant in list(mutants)[number::shares]:
        if mutant.digest in done:
            continue
        start = time.monotonic()
        killer, suite, count = _noticed(copy, mutant, recorded, before.get(mutant.digest))
        line = {"label": label, **mutant._asdict(), "tests": count}
        line |= {"killer": killer, "suite": suite, "seconds": round(time.monotonic() - start, 1)}
        del line["text"]
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _collected() -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line for line in printed.splitlines() if "::" in line}


def _noticed(copy: Path, mutant: Mutant, recorded: Recorded, before: str | None) -> tuple[str, str, int]:
    """Return the test that notices the mutant, the command that runs it, and how many tests run its line."""
    running = recorded.tests(mutant)
    fast = [name for name in running if name not in recorded.slow]
    slow = [name for name in running if name in recorded.slow]
    tries = [("make test", [before] if before in fast else []), ("make test", recorded.chosen(fast))]
    tries += [("make test-slow", recorded.chosen(slow))]
    for suite, tests in tries:
        if tests and (killer := _killer(copy, mutant, tests)):
            return killer, suite, len(running)
    return "", "", len(running)


def _killer(copy: Path, mutant: Mutant, tests: Sequence[str]) -> str:
    """Return the test that fails on the mutant ("time": it does not end), or "" if all pass."""
    path, output = copy / mutant.path, copy / "output.txt"
    before = path.read_text("utf-8")
    path.write_text(mutant.text, "utf-8")
    try:
        child = os.fork()
        if child == 0:
            _run_tests(copy, tests, output)
        for _ in range(int(20 * 4 * (SECONDS + 20))):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "time"
    finally:
        path.write_text(before, "utf-8")
    if status == 0:
        return ""
    lines = [
        line.split(" - ")[0]
        for line in output.read_text().splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    return [*lines, f"exit {status}"][0].removeprefix("FAILED ").removeprefix("ERROR ")


def _run_tests(copy: Path, tests: Sequence[str], output: Path) -> None:
    """Run tests in this process, a fork, as if it had started in the copy; never return."""
    status = 99
    try:
        os.setsid()
        os.chdir(copy)
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        for name in [name for name in sys.modules if name.split(".")[0] in {"tests", "mesa_tune"}]:
            del sys.modules[name]
        sys.path[0] = str(copy)
        sys.dont_write_bytecode = True
        os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain"]
        status = int(pytest.main([*options, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def _copied(folder: Path) -> Path:
    """Copy the repository; its compiled files are checked by the hash of their source, not by its time."""
    shutil.rmtree(folder, ignore_errors=True)
    skipped = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "mesa-run")
    shutil.copytree(".", folder, symlinks=True, ignore=skipped)
    compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*compiling, "mesa_tune", "search", "reports", "tests"], cwd=folder, check=True)
    return folder.resolve()


def results() -> list[dict[str, Any]]:
    """All results so far, those of earlier sources as well."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table(mutants: Sequence[Mutant], label: str) -> Iterator[str]:
    """Yield a line per room: mutants, those that some test notices, those that `make test` alone notices."""
    found = {line["digest"]: line for line in results() if line["label"] == label}
    lines = [found[mutant.digest] for mutant in mutants if mutant.digest in found]
    yield f"{'room':12}{'mutants':>8}{'noticed':>9}{'by make test alone':>20}"
    for room in (*ROOMS, "all"):
        suites = [line["suite"] for line in lines if room in {line["room"], "all"}]
        yield f"{room:12}{len(suites):8}{sum(map(bool, suites)):9}{suites.count('make test'):20}"


def survivors(mutants: Sequence[Mutant], found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the changes that no test notices."""
    import difflib

    for mutant in mutants:
        line = found.get(mutant.digest)
        if line is not None and not line["killer"]:
            before, after = Path(mutant.path).read_text("utf-8").splitlines(), mutant.text.splitlines()
            difference = difflib.unified_diff(before, after, n=2, lineterm="")
            yield "\n".join([f"{mutant.path}:{mutant.line}, {line['tests']} tests", *list(difference)[2:]])


def main() -> None:
    """Try the mutants, and print how many are noticed in each room."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=OF_A_ROOM, help="mutants of a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--label", default="now", help="names these results; a run resumes those of its label"
    )
    parser.add_argument("--share", help="k/n: try only these, in this process")
    parser.add_argument("--survivors", action="store_true", help="show what no test notices, run nothing")
    options = parser.parse_args()
    mutants = drawn(options.count, options.seed)
    if options.survivors:
        found = {line["digest"]: line for line in results() if line["label"] == options.label}
        print(*survivors(mutants, found), sep="\n\n")
        return
    if options.share:
        run(mutants, options.share, options.label)
        return
    if not (FOLDER / "coverage").exists():
        record()
    command = [sys.executable, "-m", "tests.mutants", *sys.argv[1:]]
    shares = [
        subprocess.Popen([*command, "--share", f"{number}/{options.jobs}"]) for number in range(options.jobs)
    ]
    statuses = [process.wait() for process in shares]
    if any(statuses):
        raise SystemExit("a share ended early; the same command goes on")
    print(*table(mutants, options.label), sep="\n")


if __name__ == "__main__":
    main()
