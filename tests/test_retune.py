"""`mt.Retune`: a policy measured anew while the model trains, without a trace in the model."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.conversion.model import conversion_of

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Normalization with buffers, dropout, and layers large enough to be encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(48)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Samples of 48 tokens of width 32 to logits."""
        x = F.gelu(self.drop(self.norm(self.first(x))))
        result: Tensor = self.head(F.gelu(self.second(x)).mean(1))
        return result


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make() -> tuple[Net, Batch]:
    torch.manual_seed(0)
    return Net(), (torch.randn(32, 48, 32), torch.randint(0, 10, (32,)))


def trained(model: nn.Module, batch: Batch, tuner: mt.Retune | None, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    values = []
    for _ in range(steps):
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if tuner is not None:
            tuner.step(batch)
        values.append(value.item())
    return values


def test_the_model_gets_a_policy_at_the_first_step_and_every_so_many() -> None:
    model, batch = make()
    tuner = mt.Retune(model, loss, "60%", every=3)
    done = [tuner.step(batch) for _ in range(7)]
    assert done == [True, False, False, True, False, False, True]
    assert tuner.plan is not None
    assert tuner.plan.predicted.peak_bytes <= (tuner.plan.budget_bytes or 0)
    assert tuner.plan.batch_size == 32
    conversion = conversion_of(model)
    assert conversion is not None
    assert conversion.policy == tuner.policy


def test_no_trace() -> None:
    model, batch = make()
    model.drop.eval()
    trained(model, batch, None, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, batch).backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [(parameter.grad, copy.deepcopy(parameter.grad)) for parameter in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    mt.Retune(model, loss, "60%", optimizer=optimizer).step(batch)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for parameter, (gradient, values) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert gradient is not None
        assert values is not None
        assert torch.equal(gradient, values)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert repr(np.random.get_state()) == states[2]
    assert (model.drop.training, model.training) == (False, True)
    assert not optimizer.state


def without_time(tuner: mt.Retune) -> str:
    """Return what the header of the tuner's policy predicts, without the measured time."""
    assert tuner.policy is not None
    assert tuner.policy.rules
    return str(tuner.policy.header.predicted).partition(", step")[0]


def test_a_training_goes_as_well_and_the_same_each_time() -> None:
    runs, predicted = [], []
    for _ in range(2):
        model, batch = make()
        tuner = mt.Retune(model, loss, "55%", every=4)
        runs.append(trained(model, batch, tuner, 10))
        predicted.append(without_time(tuner))
    assert runs[0] == runs[1]
    assert predicted[0] == predicted[1]
    model, batch = make()
    assert runs[0][-1] == pytest.approx(trained(model, batch, None, 10)[-1], rel=0.3)


def test_an_impossible_budget_is_an_error_first_and_a_warning_later() -> None:
    model, batch = make()
    with pytest.raises(mt.BudgetError):
        mt.Retune(model, loss, "10B").step(batch)
    tuner = mt.Retune(model, loss, "60%", every=1)
    tuner.step(batch)
    policy, tuner.budget = tuner.policy, "10B"
    with pytest.warns(UserWarning, match="retune at step 2 leaves the policy as it is"):
        tuner.step(batch)
    assert tuner.policy is policy


def test_loss_layers_stay_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 1000)
    batch = torch.randn(64, 64), torch.randint(0, 1000, (64,))
    tuner = mt.Retune(model, loss, "99%")
    with pytest.raises(mt.BudgetError):
        tuner.step(batch)


def test_the_plan_of_rank_0_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make()
    theirs = mt.Policy.uniform(level=4)

    def receive(box: list[str | None], src: int) -> None:
        assert src == 0
        box[0] = theirs.dumps()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", receive)
    tuner = mt.Retune(model, loss, "10B")  # this rank finds nothing for its own part
    tuner.step(batch)
    assert tuner.policy == theirs


def test_bad_arguments() -> None:
    model, batch = make()
    with pytest.raises(ValueError, match="every >= 1"):
        mt.Retune(model, loss, "60%", every=0)
    with pytest.raises(mt.BudgetError):
        mt.Retune(model, loss, "much")
    with pytest.raises(mt.WorkloadError, match="no tensor whose first dimension counts samples"):
        mt.Retune(model, loss, "60%").step([batch[0].sum()])


def test_the_own_step_of_the_training_is_measured() -> None:
    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    predicted = []
    ways: list[dict[str, Any]] = [{"loss": loss}, {"loss": None, "own_step": step}]
    for options in ways:
        model, batch = make()
        before = copy.deepcopy(model.state_dict())
        tuner = mt.Retune(
            model, budget="60%", optimizer=torch.optim.SGD(model.parameters(), lr=0.05), **options
        )
        assert tuner.step(batch)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        predicted.append(without_time(tuner))
    assert predicted[0] == predicted[1]
