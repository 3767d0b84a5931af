"""`mt.state_dict` and `mt.load_state_dict`: a resumed training is bit for bit the uninterrupted one."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

import mesa_tune as mt
from mesa_tune.engine.observer import watch
from tests.builders import Functions, ViT, policy_of

EVERYWHERE = "on {}:\n    by_index: all\n    level: 16\n"
ALL = "".join(EVERYWHERE.format(tag) for tag in ("fc", "layernorm", "gelu", "attention", "matmul", "softmax"))
POLICIES = {
    "4 bits": ALL,
    "running ranges": ALL.replace("level: 16\n", "level: 16\n    ema_decay: 0.9\n"),
    "drop": "on fc:\n    by_index: all\n    drop: 0.5\n",
    "by index": ALL + "on gelu:\n    by_index: 1\n    level: 2\n",
    "derive": ALL.replace("level: 16\n", "level: 16\n    store: derive\n"),
}
MODELS: dict[str, Any] = {"layers": ViT, "functions": lambda: Stacked(Functions(16), Functions(16))}


class Stacked(nn.Sequential):
    """Layers that are calls of functions, with dropout between them."""

    def forward(self, input: Tensor) -> Tensor:
        y = input
        for part in self:
            y = F.dropout(part(y), 0.1)
        return y.mean(1)


class Training:
    """A model under a policy, its optimizer, and steps on random data."""

    def __init__(self, kind: str, policy: str, seed: int = 5) -> None:
        torch.manual_seed(seed)
        self.policy = policy_of(POLICIES[policy])
        self.model: nn.Module = MODELS[kind]()
        mt.convert(self.model, self.policy, min_elements=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            x, y = torch.randn(4, 24, 16), torch.randint(0, 10, (4,))
            with mt.compress_saved(self.policy):
                loss = F.cross_entropy(self.model(x), y) + F.gelu(self.model(x)).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def saved(self, ours: bool = True) -> bytes:
        states: dict[str, Any] = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        states |= {"random": torch.get_rng_state()}
        states |= {"compression": mt.state_dict(self.model)} if ours else {}
        file = io.BytesIO()
        torch.save(states, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        torch.set_rng_state(states["random"])
        if "compression" in states:
            mt.load_state_dict(self.model, states["compression"])

    def equals(self, other: nn.Module) -> bool:
        pairs = zip(self.model.parameters(), other.parameters(), strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


CASES = [
    *(("layers", policy, 1 + 2 * (number % 2)) for number, policy in enumerate(POLICIES)),
    *(("functions", policy, 1) for policy in ("by index", "running ranges")),
]


@pytest.mark.parametrize(("kind", "policy", "steps"), CASES)
@pytest.mark.filterwarnings("ignore:mesa-tune", "ignore:policy.txt")
def test_a_resumed_training_is_the_uninterrupted_one(kind: str, policy: str, steps: int) -> None:
    training = Training(kind, policy)
    training.run(steps)
    saved, without = training.saved(), training.saved(ours=False)
    training.run(3)
    resumed, lost = Training(kind, policy, seed=6), Training(kind, policy, seed=6)
    for each, states in ((resumed, saved), (lost, without)):
        each.run(2)
        each.load(states)
        each.run(3)
    assert resumed.equals(training.model)
    assert not lost.equals(training.model)


CHILD = """
import sys
from tests.conversion.test_resume import Training
training = Training("layers", "running ranges", seed=6)
training.load(open(sys.argv[1], "rb").read())
training.run(3)
open(sys.argv[2], "wb").write(training.saved())
"""


@pytest.mark.slow("processes")
@pytest.mark.filterwarnings("ignore:mesa-tune", "ignore:policy.txt")
def test_it_resumes_in_another_process(tmp_path: Path) -> None:
    training = Training("layers", "running ranges")
    training.run(3)
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_bytes(training.saved())
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", CHILD, before, after], cwd=root, env=environment, check=True)
    training.run(3)
    resumed = Training("layers", "running ranges")
    resumed.load(after.read_bytes())
    assert resumed.equals(training.model)


def test_the_models_own_state_keeps_its_keys() -> None:
    assert list(Training("layers", "running ranges").model.state_dict()) == list(ViT().state_dict())


@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_a_state_is_a_snapshot_and_a_wrapped_model_takes_it() -> None:
    training = Training("layers", "4 bits")
    training.run(2)
    state = mt.state_dict(training.model)
    before = copy.deepcopy(state)
    training.run(1)
    assert torch.equal(state["conversions"][""]["key"], before["conversions"][""]["key"])
    wrapped = mt.convert(DataParallel(ViT()), training.policy, min_elements=0)
    mt.load_state_dict(wrapped, state)
    assert mt.state_dict(wrapped)["conversions"][""]["key"] == state["conversions"][""]["key"]


@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_parts_that_were_converted_by_themselves() -> None:
    def made() -> nn.Sequential:
        model = nn.Sequential(ViT(), nn.Linear(10, 10))
        for part, level in zip(model, (16, 4), strict=True):
            mt.convert(part, mt.Policy.uniform(level=level), min_elements=0)
        return model

    model, other = made(), made()
    model(torch.randn(4, 24, 16))
    mt.load_state_dict(other, mt.state_dict(model))
    assert set(mt.state_dict(model)["conversions"]) == {"0", "1"}
    assert str(mt.state_dict(other)) == str(mt.state_dict(model))
    with pytest.raises(mt.RunError, match="converted at '0', '1'"):
        mt.load_state_dict(other[0], mt.state_dict(model))


def test_what_does_not_fit_is_refused() -> None:
    uniform = mt.Policy.uniform
    model = mt.convert(ViT(), uniform(level=16))
    state = mt.state_dict(model)
    before = str(state)
    for wrong, refused in (
        (mt.convert(ViT(), uniform(level=4)), "another policy"),
        (mt.convert(ViT(depth=1), uniform(level=16)), "another model"),
        (mt.convert(ViT(), uniform(level=16), min_elements=0), "min_elements=4096"),
    ):
        with pytest.raises(mt.PolicyError, match=refused):
            mt.load_state_dict(wrong, state)
    with pytest.raises(mt.RunError, match="version 9"):
        mt.load_state_dict(model, {**state, "version": 9})
    for plain in (ViT(), mt.revert(copy.deepcopy(model))):
        with pytest.raises(mt.RunError, match="not converted"):
            mt.state_dict(plain)
    assert str(mt.state_dict(model)) == before


def test_a_running_forward_has_no_state() -> None:
    class Inside(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            mt.state_dict(self)
            return input

    with pytest.raises(mt.RunError, match="between steps"):
        mt.convert(Inside(4, 4), mt.Policy.uniform())(torch.randn(4, 4))


@pytest.mark.filterwarnings("ignore:mesa-tune")
@pytest.mark.parametrize("steps", [0, 1])
def test_a_new_process_knows_if_there_was_a_backward(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("layers", "4 bits")
    training.run(steps)
    state = mt.state_dict(training.model)
    monkeypatch.setattr(watch, "backwards", 0)
    mt.load_state_dict(training.model, state)
    assert state["conversions"][""]["backward_seen"] is (steps > 0)
    assert str(mt.state_dict(training.model)) == str(state)
