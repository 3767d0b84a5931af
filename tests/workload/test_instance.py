"""Workloads around what a script has: batches by number, other optimizers of its class, fingerprints."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from mesa_tune.errors import BudgetError, RunError, WorkloadError
from mesa_tune.workload.instance import rank_zero
from mesa_tune.workload.instance.fingerprint import fingerprint
from mesa_tune.workload.instance.given_batches import MOST_BATCHES, GivenBatches, preserved_generators
from mesa_tune.workload.instance.instance import instance_workload
from mesa_tune.workload.instance.optimizers import remade

hf: Any = transformers
ROOT = Path(__file__).parents[2]


def numbered(count: int, samples: int = 4) -> list[dict[str, Tensor]]:
    """Batches whose elements are the number of the batch."""
    return [{"x": torch.full((samples, 2), index)} for index in range(count)]


def numbers_of(batches: GivenBatches, count: int) -> list[int]:
    return [int(batches.numbered(number, 4)["x"][0, 0]) for number in range(count)]


def test_further_batches_of_one_have_its_samples_with_replacement() -> None:
    x = torch.arange(64)
    batches = GivenBatches(x)
    drawn = batches.numbered(1, 64)
    assert set(drawn.tolist()) < set(x.tolist())
    torch.manual_seed(3)
    first = batches.numbered(2, 8)
    torch.manual_seed(3)
    assert torch.equal(batches.numbered(2, 8), first)
    assert torch.equal(batches.numbered(0, 64), x)


def test_batches_come_in_order_and_again_from_the_first() -> None:
    batches = GivenBatches(iter(numbered(3)))
    assert "".join(batches.notes) == ""
    assert numbers_of(batches, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert batches.notes[0].startswith("3 batches were taken")
    many = GivenBatches(iter(numbered(MOST_BATCHES + 9)))
    assert numbers_of(many, MOST_BATCHES + 1)[MOST_BATCHES - 1 :] == [MOST_BATCHES - 1, 0]


def test_smaller_batches_are_left_out_and_larger_ones_cut() -> None:
    given = [*numbered(1), *numbered(1, samples=3), *({"x": x["x"] + 7} for x in numbered(1, samples=5))]
    batches = GivenBatches(iter(given))
    assert [numbers_of(batches, 2), batches.size] == [[0, 7], 4]
    assert batches.numbered(1, 4)["x"].shape == (4, 2)


def test_a_batch_can_be_changed() -> None:
    batches = GivenBatches(iter(numbered(1)))
    batches.numbered(0, 4).pop("x").add_(1)
    assert numbers_of(batches, 1) == [0]


def test_generators_of_a_loader_are_restored() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    samples: Any = list(range(8))
    loader: Any = DataLoader(samples, batch_size=4, shuffle=True, generator=generator)
    with preserved_generators(loader):
        GivenBatches(loader).numbered(1, 4)
    assert torch.equal(generator.get_state(), before)


def test_a_dataset_that_raises_is_named() -> None:
    class Broken(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            raise KeyError(index)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return squared(model(batch))

    said = r"test_instance.py:\d+: an iteration over the batches raised KeyError"
    with pytest.raises(WorkloadError, match=said):
        instance_workload(nn.Linear(2, 2), DataLoader(Broken(), batch_size=2), loss)


@pytest.fixture(name="as_rank")
def _as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`as_rank(n)`: this process is from now on rank `n` of two; what rank 0 broadcasts, rank 1 receives."""
    sent: list[Any] = []

    def broadcast(box: list[Any], **options: Any) -> None:
        (sent if distributed.get_rank() == 0 else box)[:] = box if distributed.get_rank() == 0 else sent

    monkeypatch.setattr(rank_zero, "processes", lambda: 2)
    monkeypatch.setattr(distributed, "new_group", lambda **options: None)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(distributed, "broadcast_object_list", broadcast)
    return lambda rank: monkeypatch.setattr(distributed, "get_rank", lambda: rank)


def test_ranks_have_one_text_or_one_error(as_rank: Callable[[int], None]) -> None:
    refuse, fail = Mock(side_effect=BudgetError("too small")), Mock(side_effect=KeyError)
    as_rank(0)
    assert rank_zero.is_rank_zero()
    assert rank_zero.text_of_rank_zero(lambda: "policy") == "policy"
    as_rank(1)
    assert not rank_zero.is_rank_zero()
    assert rank_zero.text_of_rank_zero(fail) == "policy"
    own_message = "rank 0 failed: its own message says why"
    for make, error, message in ((refuse, BudgetError, "^rank 0: too small"), (fail, RunError, own_message)):
        as_rank(0)
        with pytest.raises((BudgetError, KeyError)):
            rank_zero.text_of_rank_zero(make)
        as_rank(1)
        with pytest.raises(error, match=message):
            rank_zero.text_of_rank_zero(fail)


@pytest.mark.usefixtures("as_rank")
def test_models_whose_steps_communicate_are_refused() -> None:
    rank_zero.require_alone(nn.Linear(2, 2))
    synchronized = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(RunError, match=r"^1 is SyncBatchNorm: its step needs the processes of all ranks"):
        rank_zero.require_alone(synchronized)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, amsgrad=True, foreach=False),
    "Adafactor": lambda groups: hf.Adafactor(groups, scale_parameter=False, relative_step=False, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_optimizer_has_groups_and_options_but_no_state(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    groups = [{"params": model[0].parameters(), "weight_decay": 0.5}, {"params": model[2].weight}]
    optimizer = OPTIMIZERS[name](groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    made = remade(optimizer, model)(filter(lambda each: each.requires_grad, model.parameters()))
    assert type(made) is type(optimizer)
    assert not made.state
    assert str(made.param_groups) == str(optimizer.param_groups)


class Net(nn.Module):
    """A model whose fingerprint has options, ties and code."""

    def __init__(self, scale: float = 1.0, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(dropout)
        self.scale = scale

    def forward(self, x: Tensor) -> Any:
        return self.second(self.drop(F.gelu(self.first(x)))) * self.scale


class Changed(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 2


def changed(change: Callable[[Net], object]) -> Callable[[], Net]:
    def make() -> Net:
        net = Net()
        change(net)
        return net

    return make


def squared(x: Tensor) -> Tensor:
    return x.square().mean()


def loss(model: nn.Module, batch: Tensor, scale: float = 1.0) -> Tensor:
    return squared(model(batch)) * scale


def other_loss(model: nn.Module, batch: Tensor, scale: float = 1.0) -> Tensor:
    return squared(model(batch)) + scale


def bound(scale: float) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, batch: loss(model, batch, scale)


class Objective:
    """A loss with an attribute, which a method uses."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return loss(model, batch, self.scale)


PARTS: dict[str, Callable[[], Any]] = {
    "model": Net,
    "class": Changed,
    "attribute": partial(Net, scale=2.0),
    "dropout": partial(Net, dropout=0.2),
    "ties": changed(lambda net: setattr(net.second, "weight", net.first.weight)),
    "frozen": changed(lambda net: net.first.requires_grad_(False)),
    "mode": changed(lambda net: net.drop.eval()),
    "shape": lambda: torch.zeros(2, 4),
    "batch size": lambda: torch.zeros(3, 4),
    "dtype": lambda: torch.zeros(2, 4, dtype=torch.float64),
    "containers": lambda: {"x": torch.zeros(2, 4)},
    "loss": lambda: loss,
    "other loss": lambda: other_loss,
    "partial": lambda: partial(loss, scale=2.0),
    "closure": lambda: bound(1.0),
    "other closure": lambda: bound(2.0),
    "method": lambda: Objective(1.0).loss,
    "other method": lambda: Objective(2.0).loss,
}


def made(name: str) -> Any:
    return PARTS[name]()


def test_fingerprints_differ_in_what_a_profile_depends_on() -> None:
    fingerprints = {name: fingerprint(made(name)) for name in PARTS}
    assert len(set(fingerprints.values())) == len(PARTS)
    again = {name: fingerprint(made(name)) for name in PARTS}  # weights have other values
    assert fingerprints == again


def test_the_code_of_a_called_function_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(loss)
    monkeypatch.setattr(sys.modules[__name__], "squared", other_loss)
    assert fingerprint(loss) != before


@pytest.mark.slow("processes")
def test_fingerprints_are_equal_in_another_process() -> None:
    code = "from tests.workload.test_instance import *; print(fingerprint(*map(made, PARTS)))"
    found = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    assert found.strip() == fingerprint(*map(made, PARTS))
