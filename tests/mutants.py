"""Random mutants: how many small faults in the rooms that decide numbers does the suite notice?

    pip install cosmic-ray              # it is not among the packages that `make` installs
    python -m tests.mutants             # runs the suite under coverage, then 400 mutants; resumes
    python -m tests.mutants --survivors # shows the mutants that no test has noticed, as differences

A mutant is one change of cosmic-ray's to one line: another operator, another number, `not` added, and so on.
The sites are drawn at random, then one of the changes possible there; annotations are left out. A mutant is
run against the tests that run its line: one case of each test function, the fastest first, then others until
they take `SECONDS`. Coverage does not see what torch.compile traces: a mutant there may survive although the
tests of compiled models notice it. Results are lines of JSON in `build/mutants/`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import coverage
import pytest

ROOMS = {
    "engine": "mesa_tune/engine/**/*.py",
    "formulas": "mesa_tune/formulas/**/*.py",
    "conversion": "mesa_tune/conversion/**/*.py",
    "codecs": "mesa_tune/codecs/**/*.py",
    "solver": "search/solver.py",
}
SECONDS = 40
FOLDER = Path("build/mutants")
TESTS = ["engine", "codecs", "formulas", "conversion", "search", "nn", "policies", "ops", "compat"]


class Site(NamedTuple):
    """A place of the source at which cosmic-ray can change something."""

    path: str
    line: int
    column: int
    changes: tuple[tuple[str, int], ...]
    """Names of operators, and the occurrence of each that is at this place."""


class Mutant(NamedTuple):
    """A change: the occurrence of an operator of cosmic-ray in a file, and the text of the file with it."""

    path: str
    line: int
    operator: str
    occurrence: int
    text: str

    @property
    def digest(self) -> str:
        """A name that other sources do not have."""
        return hashlib.sha256(f"{self.path}\n{self.text}".encode()).hexdigest()[:16]


def sites(path: str) -> list[Site]:
    """Return the sites of a file that are no annotations, in the order of the file."""
    from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator, operator_names  # pyright: ignore[reportMissingImports]

    source = Path(path).read_text()
    tree, ignored = get_ast(source), _annotated(source)
    changes: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():
            continue
        starts = (start for node in ast_nodes(tree) for start, _ in operator().mutation_positions(node))
        for occurrence, start in enumerate(starts):
            if not any(first <= start < last for first, last in ignored):
                changes[start].append((name, occurrence))
    return [Site(path, *start, tuple(found)) for start, found in sorted(changes.items())]


def _annotated(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where annotations and type aliases begin and end."""
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


def drawn(count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of all rooms, in random order."""
    chosen = random.Random(seed)
    drawn_sites = chosen.sample([site for path in paths() for site in sites(path)], count)
    changes = [(site, chosen.choice(site.changes)) for site in drawn_sites]
    return [Mutant(site.path, site.line, *change, mutated(site.path, *change)) for site, change in changes]


def paths() -> list[str]:
    """Return the files of all rooms."""
    return sorted(str(path) for pattern in ROOMS.values() for path in Path().glob(pattern))


def mutated(path: str, operator: str, occurrence: int) -> str:
    """Return the text of a file with a change."""
    from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]

    text = mutate_code(Path(path).read_text(), get_operator(operator)(), occurrence)
    assert isinstance(text, str), (path, operator, occurrence)
    return text


def record() -> None:
    """Run the tests under coverage, and write which of them run which lines, and how long they take."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in paths():
        (FOLDER / "recorded" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, FOLDER / "recorded" / path)
    command = [*(sys.executable, "-m", "coverage", "run", "--rcfile=/dev/null", "--source=mesa_tune,search")]
    command += [f"--data-file={FOLDER}/coverage", "-m", "pytest", "-p", "tests.mutants", "-p", "no:xdist"]
    folders = [f"tests/{name}" for name in TESTS]
    command += ["-q", "-m", "not slow", *folders]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Name the lines that run from now on after the test."""
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write how long a test has taken."""
    if report.when == "call" and coverage.Coverage.current() is not None:
        with (FOLDER / "seconds.jsonl").open("a") as file:
            file.write(json.dumps([report.nodeid, report.duration]) + "\n")


def chosen_tests(contexts: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """Return the tests to run against a mutant: of each function the fastest case, then others."""
    cases: dict[str, list[str]] = defaultdict(list)
    for name in sorted(name for name in contexts if name in seconds):
        cases[name.split("[")[0]].append(name)
    functions = [sorted(names, key=lambda name: seconds[name]) for names in cases.values()]
    first = sorted((names[0] for names in functions), key=lambda name: seconds[name])
    others = [name for names in functions for name in names[1:]]
    random.Random(0).shuffle(others)
    total, tests = 0.0, list[str]()
    for name in (*first, *others):
        total += seconds[name] + 0.01
        if total > SECONDS and tests:
            break
        tests.append(name)
    return tests


def run(mutants: Sequence[Mutant], jobs: int) -> None:
    """Run the mutants that have no result yet, some at a time, each in a copy of the repository."""
    data = coverage.CoverageData(str(FOLDER / "coverage"))
    data.read()
    seconds = dict(map(json.loads, (FOLDER / "seconds.jsonl").read_text().splitlines()))
    measured = {os.path.relpath(os.path.realpath(path)): path for path in data.measured_files()}
    contexts = {path: data.contexts_by_lineno(measured[path]) for path in {m.path for m in mutants}}
    done = {line["digest"] for line in results()}
    waiting = [mutant for mutant in mutants if mutant.digest not in done]
    tests = [chosen_tests(_running(mutant, contexts[mutant.path]), seconds) for mutant in waiting]
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs):
        copies.put(_copied(FOLDER / f"copy{number}"))

    def run_one(mutant: Mutant, tests: Sequence[str]) -> None:
        copy = copies.get()
        try:
            killer = _killer(copy, mutant, tests)
        finally:
            copies.put(copy)
        line = {"digest": mutant.digest, **mutant._asdict(), "tests": len(tests), "killer": killer}
        del line["text"]
        with (FOLDER / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_one, waiting, tests))


def _running(mutant: Mutant, contexts: dict[int, list[str]]) -> list[str]:
    """Return the tests that run the mutant's statement; all of its file for what runs at import."""
    recorded, now = (path.read_text() for path in (FOLDER / "recorded" / mutant.path, Path(mutant.path)))
    matcher = difflib.SequenceMatcher(None, now.splitlines(), recorded.splitlines(), autojunk=False)
    shifts = [(first, other - first) for _, first, _, other, _ in matcher.get_opcodes()]
    shift = next(shift for first, shift in reversed(shifts) if first < mutant.line)
    lines = [line + shift for line in _statement(now, mutant.line)]
    running = {name for line in lines for name in contexts.get(line, [])} - {""}
    return sorted(running or {name for names in contexts.values() for name in names} - {""})


def _statement(source: str, line: int) -> range:
    """Return the lines of the innermost statement at `line`, without its body."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):  # outer nodes first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            found = range(node.lineno, body[0].lineno if body else (node.end_lineno or 0) + 1)
    return found


def _copied(folder: Path) -> Path:
    """Return a folder with a copy of the repository, of which mutants change a file."""
    shutil.rmtree(folder, ignore_errors=True)
    skipped = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "mesa-run", "results")
    shutil.copytree(".", folder, symlinks=True, ignore=skipped)
    return folder.resolve()


def _killer(copy: Path, mutant: Mutant, tests: Sequence[str]) -> str:
    """Return the test that fails on the mutant ("time": it does not end), or "" if all pass."""
    if not tests:
        return ""
    path, given = copy / mutant.path, copy / "tests.txt"
    before = path.read_text()
    path.write_text(mutant.text)
    given.write_text("\n".join(tests))
    command = [
        sys.executable,
        *["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "@tests.txt"],
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        found = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            timeout=6 * SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "time"
    finally:
        path.write_text(before)
    lines = [line for line in found.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return "" if found.returncode == 0 else [*lines, f"exit {found.returncode}"][0][:200]


def results() -> list[dict[str, Any]]:
    """Return the results so far, those of earlier sources as well."""
    path = FOLDER / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def survivors(mutants: Sequence[Mutant]) -> Iterator[str]:
    """Yield the changes that no test has noticed."""
    alive = {line["digest"]: line for line in results() if not line["killer"]}
    for mutant in mutants:
        if (line := alive.get(mutant.digest)) is not None:
            before, after = Path(mutant.path).read_text().splitlines(), mutant.text.splitlines()
            difference = difflib.unified_diff(before, after, n=2, lineterm="")
            yield "\n".join([f"{mutant.path}:{mutant.line}, {line['tests']} tests", *list(difference)[2:]])


def main() -> None:
    """Run the mutants, and print how many were noticed in each room."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--survivors", action="store_true", help="show what no test has noticed, run nothing")
    options = parser.parse_args()
    mutants = drawn(options.count, options.seed)
    if options.survivors:
        print(*survivors(mutants), sep="\n\n")
        return
    if not (FOLDER / "coverage").exists():
        record()
    run(mutants, options.jobs)
    killers = {line["digest"]: line["killer"] for line in results()}
    for room, pattern in {**ROOMS, "all": "**/*.py"}.items():
        files = {str(path) for path in Path().glob(pattern)}
        noticed = [bool(killers[mutant.digest]) for mutant in mutants if mutant.path in files]
        print(f"{room:12}{sum(noticed):4} of {len(noticed):4} noticed")


if __name__ == "__main__":
    main()
