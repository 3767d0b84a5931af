"""Checkpoint files: the forms in which weights are saved, and what is wrong with others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mesa_tune as mt
from mesa_tune.measure.errors.at_checkpoints import load_weights

SOURCE = """
from torch import nn, randn
def model(): return nn.Linear(3, 2)
def batch(n): return randn(n, 3)
def loss(model, batch): return model(batch).square().mean()
CHECKPOINTS = {checkpoints}
"""


def model(width: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))


FORMS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda state: state,
    "model": lambda state: {"model": state, "step": 300, "optimizer": {"state": {}}},
    "state_dict entry": lambda state: {"state_dict": state},
    "DistributedDataParallel": lambda state: {f"module.{name}": value for name, value in state.items()},
    "compiled": lambda state: {"model": {f"module._orig_mod.{name}": value for name, value in state.items()}},
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_loaded_from_what_scripts_save(form: str, tmp_path: Path) -> None:
    trained, fresh = model(), model()
    trained(torch.randn(8, 3))  # moves the running statistics
    torch.save(FORMS[form](trained.state_dict()), tmp_path / "step.pt")
    load_weights(fresh, tmp_path / "step.pt")
    for name, tensor in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)


BAD: dict[str, tuple[Any, str]] = {
    "names": ({"0.weights": torch.ones(2, 3)}, r"not of the model.*Missing key.*\n.*CHECKPOINTS"),
    "shapes": (model(4).state_dict(), r"not of the model.*size mismatch for 0.weight"),
    "objects": (model(), r"has objects other than tensors\n.*state_dict"),
    "no state": ([torch.ones(2)], "has a list, no state_dict"),
    "empty": ({"step": 3}, "has no tensors"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_checkpoint_is_an_error_with_a_remedy(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    torch.save(content, tmp_path / "step.pt")
    with pytest.raises(mt.WorkloadError, match=r"checkpoint .*step\.pt: " + message) as raised:
        load_weights(model(), tmp_path / "step.pt")
    assert len(str(raised.value).splitlines()) <= 3


@pytest.mark.parametrize("content", [None, b"", b"weights"])
def test_a_missing_or_damaged_checkpoint(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "step.pt").write_bytes(content)
    with pytest.raises(mt.WorkloadError, match=r"step\.pt: (no such file|cannot be read|has objects)"):
        load_weights(model(), tmp_path / "step.pt")


def test_paths_are_relative_to_the_model_file(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(SOURCE.format(checkpoints=["a.pt", "/b.pt"]))
    assert mt.Workload.load(path).checkpoints == [tmp_path / "a.pt", Path("/b.pt")]
    path.write_text(SOURCE.format(checkpoints=repr("a.pt")))
    with pytest.raises(mt.WorkloadError, match=r"CHECKPOINTS = 'a.pt': must be a list of paths\n"):
        mt.Workload.load(path)
