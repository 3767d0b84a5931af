"""Coverage of `make test` alone, beside that of `make test` and `make test-slow` together, in each room.

    python -m tests.coverage_by_room    # prints a table; runs all tests first, unless `tests.mutants` has

Lines and branches count together. What runs in another process than the test's own does not count. What asks
libraries for their workspaces will be replaced, so its tests are slow ("leaving"): it is a row of its own.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import coverage

from tests.mutants import FOLDER, ROOMS, ROOT, Recorded, paths, record

LEAVING = ("mesa_tune/measure/memory/workspaces.py",)


def arcs_of_fast_tests() -> dict[str, set[tuple[int, int]]]:
    """Jumps between lines, by file, of tests that are not slow and of imports."""
    slow, found = Recorded().slow, defaultdict[str, set[tuple[int, int]]](set)
    query = "select path, context, fromno, tono from arc join file on file.id = file_id "
    query += "join context on context.id = context_id"
    with closing(sqlite3.connect(FOLDER / "coverage")) as database:
        for path, context, start, end in database.execute(query):
            if context not in slow:
                found[path].add((start, end))
    return found


def covered(data: Path) -> Mapping[str, Any]:
    """Return coverage's summary of each file."""
    output = FOLDER / "summary.json"
    command = [
        sys.executable,
        "-m",
        "coverage",
        "json",
        f"--rcfile={FOLDER}/coveragerc",
        "-q",
        "-o",
        str(output),
    ]
    subprocess.run([*command, f"--data-file={data}"], cwd=ROOT, check=True)
    files = json.loads(output.read_text())["files"]
    return {str((ROOT / path).resolve()): file["summary"] for path, file in files.items()}


def table() -> Iterator[str]:
    """Yield a line for each room, and one for all of them."""
    (FOLDER / "fast").unlink(missing_ok=True)
    fast_data = coverage.CoverageData(str(FOLDER / "fast"))
    fast_data.add_arcs(arcs_of_fast_tests())
    fast_data.write()
    both, fast = covered(FOLDER / "coverage"), covered(FOLDER / "fast")
    yield f"{'room':12}{'lines and branches':>20}{'both':>8}{'make test':>11}{'difference':>12}"
    found = {room: paths(room) for room in ROOMS}
    leaving = [path for each in found.values() for path in each if path.startswith(LEAVING)]
    rooms = {room: [path for path in each if path not in leaving] for room, each in found.items()}
    rooms |= {"all": [path for each in rooms.values() for path in each], "leaving": leaving}
    for room, names in rooms.items():
        files = [str((ROOT / name).resolve()) for name in names]
        counts = [both[file]["num_statements"] + both[file]["num_branches"] for file in files if file in both]
        shares = [sum(_hit(found.get(file)) for file in files) / sum(counts) for found in (both, fast)]
        yield f"{room:12}{sum(counts):20}{shares[0]:8.1%}{shares[1]:11.1%}{shares[1] - shares[0]:12.1%}"


def _hit(summary: Mapping[str, int] | None) -> int:
    return 0 if summary is None else summary["covered_lines"] + summary["covered_branches"]


if __name__ == "__main__":
    if not (FOLDER / "coverage").exists():
        record()
    print(*table(), sep="\n")
