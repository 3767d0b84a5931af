"""The demo's own parts: where it finds its example, and its one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesa_tune.commands import demo
from mesa_tune.errors import RunError

ROW: dict[str, Any] = {
    "name": "uniform 4 bits",
    "saved_bytes": 10_300_000,
    "peak_bytes": 28_500_000,
    "step_ms": 457.0,
    "step_ratio": 1.05,
    "gradient_error": 1.2e-4,
    "accuracy": 0.9694,
}


def test_table_has_at_most_80_columns_and_every_quantity() -> None:
    plain = {**ROW, "name": "plain", "step_ratio": None, "gradient_error": 0.0}
    lines = demo.table([plain, ROW])
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["plain", "10.3", "MB", "28.5", "MB", "457", "ms", "0", "96.9", "%"]
    assert "1.05 x plain" in lines[2]
    assert "1.2e-04" in lines[2]


def test_example_of_the_current_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "digits_vit.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert demo.find_example() == Path("examples") / "digits_vit.py"


def test_example_of_the_checkout_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo.find_example().parts[-2:] == ("examples", "digits_vit.py")


def test_without_the_example_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "EXAMPLE", Path("examples") / "nowhere.py")
    with pytest.raises(RunError, match="clone of the source") as caught:
        demo.find_example()
    assert len(str(caught.value).splitlines()) <= 3


def test_uniform_label_follows_the_level() -> None:
    assert demo.uniform_label() == "4 bits"
