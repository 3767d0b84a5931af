"""The campaign on a GPU, tried at small sizes on the CPU, and the page that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import of_benchmarks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", name="gpu")
def _gpu() -> Iterator[Any]:
    """The campaign. It adds a model to those of the benchmarks, which other tests do not expect."""
    models = of_benchmarks("zoo").ZOO
    known = set(models)
    yield of_benchmarks("gpu")
    for name in models.keys() - known:
        del models[name]


def command(*options: str) -> list[str]:
    return [str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--small", *options]


def lines_of(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()]


@pytest.mark.slow("processes")
def test_units_run_at_small_sizes_and_a_second_run_goes_on(
    tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "gpu.jsonl"
    options = ["--results", str(results), "--units"]
    subprocess.run([sys.executable, *command(*options, "codec")], check=True, capture_output=True)
    first = lines_of(results)
    assert [line["unit"] for line in first] == ["codec"]
    # The second run is in this process, with its units: each would import everything again.
    monkeypatch.setattr(gpu, "run", lambda name, setting: {**gpu.units()[name](setting), "seconds": 0.0})
    wanted = "tests,memory,codec,step deit_s,searched deit_s,largest deit_s"
    monkeypatch.setattr(sys, "argv", command(*options, wanted))
    gpu.main()
    lines = lines_of(results)
    by_unit = {line["unit"]: line for line in lines}
    assert len(lines) == len(by_unit) == 6
    assert not [line for line in lines if "error" in line]
    assert by_unit["codec"] == first[0]
    assert by_unit["tests"]["status"] == 0
    for row in by_unit["memory"]["rows"].values():
        assert row["predicted_saved"] == row["saved"]
        assert row["predicted_peak"] == pytest.approx(row["allocated"], rel=0.01)
    rows = by_unit["step deit_s"]["rows"]
    assert list(rows) == ["plain", "uniform 4 bits", "checkpoint per block", "save_on_cpu"]
    for row in (rows["plain"], rows["uniform 4 bits"], *by_unit["searched deit_s"]["rows"].values()):
        assert row["predicted_peak"] == pytest.approx(row["allocated"], rel=0.01)
    assert rows["uniform 4 bits"]["allocated"] < rows["plain"]["allocated"]
    promised = by_unit["largest deit_s"]["rows"]
    assert 0 < promised["plain"]["promised"] < promised["uniform 4 bits"]["promised"]


def test_the_page_shows_what_ran_on_a_gpu_alone() -> None:
    page = of_benchmarks("gpu_page")
    head = {"date": "2026-11-26", "hardware": {"gpu": "NVIDIA X"}, "versions": {"torch": "2.13"}}
    line = {"unit": "step gpt2", "device": "cuda", "small": False, **head}
    rows = {"plain": {"ms": 12.345, "allocated": 3_000_000_000}, "searched": {"ms": 13.0, "error": None}}
    text = page.page([{**line, "rows": rows}, {**line, "unit": "codec", "device": "cpu"}])
    assert "## step gpt2" in text
    assert "| plain | 12.3 | 3,000 MB | – |" in text
    assert "codec" not in text
    assert page.NOTHING in page.page([])
    failed = page.page([{**line, "error": "out of memory"}])
    assert "out of memory" in failed
