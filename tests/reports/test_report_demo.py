"""Where the demo finds its example. Its table: tests/commands/golden/demo.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesa_tune.commands import demo
from mesa_tune.errors import RunError
from tests.builders import Patch


def test_example_of_the_current_folder_comes_first(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "digits_vit.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert demo.find_example() == Path("examples") / "digits_vit.py"


def test_example_of_the_checkout_is_found_from_anywhere(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo.find_example().parts[-2:] == ("examples", "digits_vit.py")


def test_without_the_example_says_what_to_do(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "EXAMPLE", Path("examples") / "nowhere.py")
    with pytest.raises(RunError, match="clone of the source") as caught:
        demo.find_example()
    assert len(str(caught.value).splitlines()) <= 3
