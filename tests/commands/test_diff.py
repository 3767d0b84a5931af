"""`mesa-tune diff`: what changed between two profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import mesa_tune as mt
from mesa_tune import cli

pytestmark = pytest.mark.usefixtures("without_variants")


def profile(width: int, batch_size: int = 64, extra: bool = False) -> mt.Profile:
    def model() -> nn.Module:
        layers = [nn.Linear(32, width), nn.GELU(), nn.Linear(width, 64), *([nn.Tanh()] if extra else [])]
        return nn.Sequential(*layers)

    work = mt.Workload(
        model, lambda n: torch.randn(n, 32), lambda model, x: model(x).square().mean(), batch_size=batch_size
    )
    return mt.profile(work, options=[])


@pytest.fixture(autouse=True)
def _profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profiles = {"narrow": profile(100), "wide": profile(300), "longer": profile(100, extra=True)}
    for name, made in profiles.items():
        Path(name).mkdir()
        made.save(f"{name}/profile.json")


def test_what_grew_is_named_with_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["diff", "narrow", "wide/profile.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    grown = next(line for line in lines if line.startswith("1 "))
    assert grown.split() == ["1", "25.6", "kB", "76.8", "kB", "+51.2", "kB"]
    assert "saved activations" in lines[2]


def test_layers_that_one_side_lacks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["diff", "narrow", "longer", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "mesa-tune.diff/1"
    new = next(layer for layer in document["layers"] if layer["name"] == "3")
    assert new == {"name": "3", "before": None, "after": 64 * 64 * 4}
    sizes = [document[side]["saved_bytes"] for side in ("before", "after")]
    changes = [(layer["after"] or 0) - (layer["before"] or 0) for layer in document["layers"]]
    assert sizes[1] - sizes[0] == sum(changes)


def test_the_same_profile_differs_in_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["diff", "narrow", "narrow"]) == 0
    assert "no layer saves more or less" in capsys.readouterr().out


def test_other_conditions_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile(100, batch_size=32).save(tmp_path / "half.json")
    assert cli.run(["diff", "narrow", "half.json"]) == 0
    captured = capsys.readouterr()
    assert "batch size was 64 before, and is 32 after" in captured.err
    assert "-50.0 %" in captured.out


def test_a_missing_profile_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["diff", "narrow", "nowhere"]) == 1
    assert "nowhere: no such file" in capsys.readouterr().err
