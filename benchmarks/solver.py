"""Time, proven gap and memory of the exact solver on steps of 300 and 1,000 layers.

python benchmarks/solver.py

The steps are made up: blocks of ten layers whose activations live from the forward to the backward, with
errors over six orders of magnitude, shared storages, derived tensors, blocks that can run again, and layers
whose rounding interacts. First the solver is compared with an enumeration of all plans on small steps.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import append
from numpy.typing import NDArray

from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.search.linear.highs import Deadline, TimeUpError
from mesa_tune.search.objectives import WEIGHT
from mesa_tune.search.problem import Choice, Limits, Link, Module, Space, Unit
from mesa_tune.search.solver import Program, Solution

SIZES = ((300, 12, 5.0), (1000, 20, 60.0))
BLOCK = 10
NOISE = 0.1
SHARE = 0.6
"""The budget over the plain peak."""


def step(layers: int, options: int, seed: int = 0) -> Space:
    """A step of `layers` layers, in order, with `options` choices each."""
    chance = np.random.default_rng(seed)
    slots = 2 * layers + 1
    units = [_unit(chance, number, layers, options) for number in range(layers)]
    pairs = chance.choice(layers - 1, size=layers // 10, replace=False).tolist()
    links = [Link((n, n + 1), _alive(n, layers, int(2e6)), int(2e6)) for n in pairs]
    clusters = [(n, n + 1) for n in range(0, layers - 1, BLOCK)]
    modules = [
        _module(chance, n, units[n : n + BLOCK], layers) for n in range(0, layers, BLOCK) if n % 3 == 0
    ]
    base = np.full(slots, int(2e8)) + chance.integers(0, int(3e7), slots)
    return Space(tuple(units), tuple(links), base, 0, 100.0, 32, tuple(clusters), tuple(modules))


def _alive(number: int, layers: int, size: int) -> NDArray[np.int64]:
    live = np.zeros(2 * layers + 1, dtype=np.int64)
    live[number : 2 * layers - number] = size
    return live


def _unit(chance: np.random.Generator, number: int, layers: int, options: int) -> Unit:
    size, sensitivity = int(chance.integers(1_000_000, 9_000_000)), float(10 ** chance.uniform(-7, -1))
    work, ms = int(chance.integers(1_000_000, 20_000_000)), float(chance.uniform(0.05, 0.5))
    choices = [Choice(EXACT, 0.0, 0.0, _alive(number, layers, size), size)]
    bits = np.linspace(1, 8, options - 3)
    for index, width in enumerate([*bits, 4.0, 8.0]):
        derived = index >= len(bits) and number % BLOCK < 2
        share = 0.0 if derived and number % BLOCK else (width + 0.25) / 32
        live = _alive(number, layers, int(share * size))
        live[2 * layers - 1 - number] += work
        error = sensitivity * float(chance.uniform(0.7, 1.4)) / (2**width - 1) ** 2
        choices.append(_choice(chance, error, ms, live, int(share * size), derived, width))
    return Unit((f"layer.{number}",), "fc", tuple(choices))


def _choice(
    chance: np.random.Generator,
    error: float,
    ms: float,
    live: NDArray[np.int64],
    saved: int,
    derived: bool,
    width: float,
) -> Choice:
    weight = error * (0.05 if width < 2 else 0.01 if width < 3 else 0.0)
    return Choice(
        LayerSettings(level=max(2, round(2**width)), store="derive" if derived else "quantize"),
        error,
        ms * float(chance.uniform(0.6, 1.6)) * (1.5 if derived else 1.0),
        live,
        saved,
        derived,
        root=weight**0.5,
        weight=weight,
    )


def _module(chance: np.random.Generator, first: int, units: list[Unit], layers: int) -> Module:
    size = units[0].choices[0].saved
    ms = float(chance.uniform(0.8, 1.2)) * 0.35 * len(units)
    live = _alive(first, layers, size)
    live[2 * layers - 1 - first] += sum(unit.choices[0].saved for unit in units)
    exact = Choice(LayerSettings(store="recompute"), 0.0, ms, live, size)
    return Module(f"block.{first}", tuple(range(first, first + len(units))), (exact,))


def measure(layers: int, options: int, seconds: float) -> dict[str, Any]:
    """Solve for every objective; return times, gaps and the memory of this process."""
    space = step(layers, options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    program = Program(space)
    lowest = _timed(lambda: program.smallest_peak(Limits(noise=NOISE), deadline=Deadline(seconds)))
    plain = int(program.rows.plain_live.max())
    limits = Limits(int(SHARE * plain), noise=NOISE)
    solved = {
        "memory": lowest,
        "time": _timed(
            lambda: program.solve(
                limits, program.times, price=WEIGHT * space.base_ms, deadline=Deadline(seconds)
            )
        ),
        "error": _timed(lambda: program.solve(Limits(limits.peak), deadline=Deadline(seconds))),
    }
    found = {name: _result(space, limits, entry) for name, entry in solved.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "layers": layers,
        "options": options,
        "seconds_allowed": seconds,
        "objectives": found,
        "peak_mb": round(peak / 1024),
        "before_mb": round(before / 1024),
    }


def _timed(solve: Any) -> dict[str, Any]:
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        solution: Solution | None = solve()
    except TimeUpError:
        solution = None
    return {
        "solution": solution,
        "seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
    }


def _result(space: Space, limits: Limits, entry: dict[str, Any]) -> dict[str, Any]:
    solution = entry.pop("solution")
    if solution is None:
        return {**entry, "gap": None, "cost": None, "noise_ratio": None}
    assert space.is_consistent(solution.chosen)
    return {**entry, "gap": solution.gap, "cost": solution.cost, "noise_ratio": space.noise(solution.chosen)}


def check() -> int:
    """Compare with all plans of small steps; return how many problems were compared."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.search.random_spaces import all_plans, random_space

    for seed in range(40):
        chance = np.random.default_rng(seed)
        space = random_space(chance, 6, 4)
        plans = all_plans(space)
        limits = Limits(int(np.median(plans.peak)), noise=float(np.median(plans.noise)))
        inside = plans.within(limits)
        program = Program(space)
        solved = program.solve(limits, program.times)
        assert (solved is None) is (not inside.any()), seed
        assert solved is None or abs(solved.cost - plans.priced(1.0)[inside].min()) <= 1e-5, seed
    return 40


def results(sizes: list[tuple[int, int, float]]) -> Iterator[dict[str, Any]]:
    """Measure each size in a process of its own, so that its memory is its own."""
    for size in sizes:
        command = [sys.executable, __file__, "--measure", *map(str, size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        yield json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Check, measure, print and append to the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", nargs=3, metavar=("LAYERS", "OPTIONS", "SECONDS"))
    arguments = parser.parse_args()
    if arguments.measure:
        layers, options, seconds = arguments.measure
        print(json.dumps(measure(int(layers), int(options), float(seconds))))
        return
    print(f"equal to an enumeration of all plans: {check()} problems")
    found = list(results(list(SIZES)))
    for entry in found:
        print(f"{entry['layers']} layers x {entry['options']} options, {entry['peak_mb']} MB")
        for name, result in entry["objectives"].items():
            print(f"  {name:7s} {result['seconds']:6.2f} s  gap {result['gap']}")
    print(append("solver", {"sizes": found}))


if __name__ == "__main__":
    main()
