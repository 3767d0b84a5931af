"""The sweeps' command.

    python -m benchmarks.sweeps                       # all sweeps; goes on where an interrupted run stopped
    python -m benchmarks.sweeps operators             # one of them
    python -m benchmarks.sweeps operators --only 'amax*' --variant scaled
    python -m benchmarks.sweeps --broken              # only what the last run found broken

Results are lines of JSON in `build/sweeps/<sweep>.jsonl`. The exit status is 1 where something is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.sweeps import runner
from benchmarks.sweeps.runner import Case, Results

SWEEPS = {"operators": "benchmarks.sweeps.operators", "transformers": "benchmarks.sweeps.transformers_models"}


def main(arguments: list[str] | None = None) -> int:
    """Run the sweeps that `arguments` ask for, print their tables; 1 where something is broken."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.sweeps if name not in SWEEPS]:
        parser.error(f"no sweep {unknown[0]!r}; there are {', '.join(SWEEPS)}")
    wrong = 0
    for name in options.sweeps or SWEEPS:
        results = Results(options.results / f"{name}.jsonl")
        lines = runner.run(SWEEPS[name], results, _wanted(options, results), options.jobs, _say)
        print(f"\n{name}\n{runner.table(lines)}")
        wrong += sum(line.result in runner.WRONG for line in lines)
    return int(wrong > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweeps")
    parser.add_argument("sweeps", nargs="*", help=f"{', '.join(SWEEPS)}; default: all")
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases of this name")
    parser.add_argument("--variant", default="*", metavar="GLOB", help="cases of this variant")
    parser.add_argument("--broken", action="store_true", help="cases that the last run found broken")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--results", type=Path, default=runner.ROOT / "build" / "sweeps", metavar="DIR")
    return parser


def _wanted(options: argparse.Namespace, results: Results) -> Callable[[Case], bool]:
    results.repair()
    broken = {line.case for line in results.lines() if line.result in runner.WRONG}

    def wanted(case: Case) -> bool:
        named = fnmatchcase(case.name, options.only) and fnmatchcase(case.variant, options.variant)
        return named and (case in broken or not options.broken)

    return wanted


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
