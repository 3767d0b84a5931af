"""The campaign on a GPU, tried at small sizes on the CPU, and the page that it writes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def campaign(results: Path, *options: str) -> list[dict[str, Any]]:
    """Run it on the CPU, and return all results."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--small"]
    subprocess.run([*command, "--results", str(results), *options], check=True, capture_output=True)
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_units_run_at_small_sizes_and_a_second_run_goes_on(tmp_path: Path) -> None:
    results = tmp_path / "gpu.jsonl"
    first = campaign(results, "--units", "codec")
    assert [line["unit"] for line in first] == ["codec"]
    lines = campaign(results, "--units", "tests,memory,codec,step deit_s,searched deit_s,largest deit_s")
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


@pytest.fixture(scope="module", name="page")
def _page() -> Any:
    """The module that writes the page, which is in no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("gpu_page")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_the_page_shows_what_ran_on_a_gpu_alone(page: Any) -> None:
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
