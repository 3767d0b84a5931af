"""What no CPU can show: mesa-tune on one GPU, what matters most first.

    python benchmarks/gpu.py [--minutes 25] [--units codec,step]
    python benchmarks/gpu.py --device cpu --small --results FILE    # the same at small sizes, without a GPU
    python benchmarks/gpu.py --docs                                 # writes docs/gpu.md

Each unit runs in a process of its own, for 9 minutes at most. Run again, it goes on: a unit that has a result
of the same code on the same device is left out. Nothing is downloaded. The units: the tests that need a GPU;
steps of DeiT-S, GPT-2 and a Llama in several ways; memory, predicted and allocated; codecs beside `copy_`; a
ResNet's steps; steps under a searched policy; the largest batch under a limit, promised and true, and samples
per second at it; compiled steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common import RESULTS, code_of, header, json_lines
from gpu_page import write
from gpu_units import Setting, units

MINUTES, LONGEST_S = 25, 540


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin no unit after so many")
    parser.add_argument("--units", default="", help="only units that begin with one of these, with commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu.jsonl")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--docs", action="store_true", help="write docs/gpu.md from the results")
    arguments = parser.parse_args()
    setting = Setting(arguments.device, arguments.small)
    if arguments.docs:
        print(f"wrote {write(json_lines(arguments.results))}")
    elif arguments.run:
        print(json.dumps({**header(), **units()[arguments.run](setting)}))
    else:
        campaign(
            setting, arguments.results, arguments.minutes, tuple(filter(None, arguments.units.split(",")))
        )


def campaign(setting: Setting, results: Path, minutes: float, wanted: tuple[str, ...]) -> None:
    """Run the units that have no result yet, and append each to `results`."""
    begin, key = time.monotonic(), {"device": setting.device, "small": setting.small, "code": code()}
    for name in missing(json_lines(results), key, wanted):
        if time.monotonic() - begin > 60 * minutes:
            print(f"{minutes:g} minutes are over; the same command goes on with {name!r}")
            return
        line = {"unit": name, **key, **run(name, setting)}
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name}: {describe(line)}", flush=True)


def describe(line: Mapping[str, Any]) -> str:
    """Return the error of a unit, or its seconds."""
    return line["error"] if "error" in line else f"{line['seconds']:.0f} s"


def missing(lines: list[dict[str, Any]], key: Mapping[str, Any], wanted: tuple[str, ...]) -> Iterator[str]:
    """Yield the units, in order, without a result under this key."""
    done = {line["unit"] for line in lines if key.items() <= line.items() and "error" not in line}
    for name in units():
        if name not in done and (not wanted or name.startswith(wanted)):
            yield name


def run(name: str, setting: Setting) -> dict[str, Any]:
    """Run a unit in a process of its own; return its result with its seconds, or an error."""
    command = [sys.executable, "-W", "ignore", __file__, "--run", name, "--device", setting.device]
    command += ["--small"] if setting.small else []
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {LONGEST_S} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "seconds": time.monotonic() - start}


def code() -> str:
    """Return a hash of the sources that the results depend on."""
    return code_of(
        ("ops", "codecs", "engine", "formulas", "conversion", "workload", "profiles", "measure"),
        Path(__file__).with_name("gpu_units.py"),
    )


if __name__ == "__main__":
    main()
