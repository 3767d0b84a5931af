"""The runner of the sweeps: nothing is lost, nothing runs twice, nothing broken goes unsaid."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sweeps import runner
from benchmarks.sweeps.runner import BROKEN, CRASHED, RIGHT, TIMED_OUT, Case, Line, Results

MODULE = "benchmarks.sweeps.samples"


def _run(results: Results, wanted: str = "") -> tuple[list[Line], list[str]]:
    said: list[str] = []
    lines = runner.run(MODULE, results, lambda case: wanted in case.name, 1, said.append)
    return lines, said


@pytest.mark.slow("processes")
def test_crash_and_time_out_of_one_case_lose_no_other(tmp_path: Path) -> None:
    results = Results(tmp_path / "samples.jsonl")
    lines, _ = _run(results)
    results_of = {line.name: line.result for line in lines}
    assert results_of == {"right": RIGHT, "exits": CRASHED, "hangs": TIMED_OUT, "breaks": BROKEN}
    assert [line.cause for line in lines] == ["", "exit status 3", "more than 1 s", "on purpose"]
    assert lines[0].figures == {"error": 0.5}
    again, said = _run(results)
    assert again == lines
    assert said == ["samples: 0 of 4 cases to run"]


@pytest.mark.slow("processes")
def test_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    results = Results(tmp_path / "samples.jsonl")
    _run(results, "right")
    with results.path.open("a") as file:
        file.write('{"name": "brea')
    _, said = _run(results, "r")
    assert said[0] == "samples: 1 of 2 cases to run"
    assert [line.name for line in results.lines()] == ["right", "breaks"]


@pytest.mark.slow("processes")
def test_result_of_other_code_is_run_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "samples.jsonl")
    results.append(_line("right", RIGHT))
    _, said = _run(results, "right")
    assert said[0] == "samples: 1 of 1 cases to run"


def test_table_counts_and_names_what_is_broken() -> None:
    lines = [_line("fine", RIGHT), _line("wrong", BROKEN, "NaN"), _line("long", TIMED_OUT, "x" * 90)]
    text = runner.table(lines).splitlines()
    assert text[0].split() == ["right", "broken", "crashed", "timed", "out", "ill-posed", "skipped"]
    assert text[1].split() == ["once", "1", "1", "0", "1", "0", "0"]
    assert text[3:5] == ["2 broken:", "wrong (once): NaN"]
    assert max(map(len, text)) == 80
    assert runner.table(lines[:1]).endswith("nothing is broken")


def _line(name: str, result: str, cause: str = "") -> Line:
    case = Case(name, "once")
    return Line(*case, result, cause, 0.1, "of other code", {})
