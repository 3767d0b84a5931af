"""`mt.Retune`: a policy measured anew while the model trains, without a trace in the model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import retune
from tests.builders import BatchNormMLP, conversion, cross_entropy, known, no_trace

Batch = tuple[Tensor, Tensor]


def make() -> tuple[BatchNormMLP, Batch]:
    torch.manual_seed(0)
    return BatchNormMLP(), (torch.randn(16, 48, 32), torch.randint(0, 10, (16,)))


@pytest.fixture
def two_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two settings of each layer are measured, which takes less time."""
    monkeypatch.setattr(retune, "OPTIONS", [mt.LayerSettings(level=level) for level in (16, 4)])


def trained(model: nn.Module, batch: Batch, tuner: mt.Retune | None, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    values = []
    for _ in range(steps):
        value = cross_entropy(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if tuner is not None:
            tuner.step(batch)
        values.append(value.item())
    return values


@pytest.mark.usefixtures("two_settings")
def test_the_model_gets_a_policy_at_the_first_step_and_every_so_many() -> None:
    model, batch = make()
    tuner = mt.Retune(model, cross_entropy, "60%", every=3)
    done = [tuner.step(batch) for _ in range(5)]
    assert done == [True, False, False, True, False]
    plan = known(tuner.plan)
    assert plan.predicted.peak_bytes <= (plan.budget_bytes or 0)
    assert plan.batch_size == 16
    assert conversion(model).policy == tuner.policy


@pytest.mark.usefixtures("two_settings")
def test_no_trace() -> None:
    model, batch = make()
    model.drop.eval()
    trained(model, batch, None, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    cross_entropy(model, batch).backward()
    with no_trace(model):
        mt.Retune(model, cross_entropy, "60%", optimizer=optimizer).step(batch)
    assert not optimizer.state


def without_time(tuner: mt.Retune) -> str:
    """Return what the header of the tuner's policy predicts, without the measured time."""
    assert known(tuner.policy).rules
    return str(known(tuner.policy).header.predicted).partition(", step")[0]


@pytest.mark.slow("training")
@pytest.mark.usefixtures("two_settings")
def test_a_training_goes_as_well_and_the_same_each_time() -> None:
    runs, predicted = [], []
    for _ in range(2):
        model, batch = make()
        tuner = mt.Retune(model, cross_entropy, "55%", every=6)
        runs.append(trained(model, batch, tuner, 10))
        predicted.append(without_time(tuner))
    assert runs[0] == runs[1]
    assert predicted[0] == predicted[1]
    model, batch = make()
    assert runs[0][-1] == pytest.approx(trained(model, batch, None, 10)[-1], rel=0.3)


@pytest.mark.usefixtures("two_settings")
def test_an_impossible_budget_is_an_error_first_and_a_warning_later() -> None:
    model, batch = make()
    with pytest.raises(mt.BudgetError):
        mt.Retune(model, cross_entropy, "10B").step(batch)
    tuner = mt.Retune(model, cross_entropy, "60%", every=1)
    tuner.step(batch)
    policy, tuner.budget = tuner.policy, "10B"
    with pytest.warns(UserWarning, match="retune at step 2 leaves the policy as it is"):
        tuner.step(batch)
    assert tuner.policy is policy


def test_loss_layers_stay_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 1000)
    batch = torch.randn(64, 64), torch.randint(0, 1000, (64,))
    tuner = mt.Retune(model, cross_entropy, "99%")
    with pytest.raises(mt.BudgetError):
        tuner.step(batch)


@pytest.mark.usefixtures("two_settings")
def test_the_plan_of_rank_0_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make()
    theirs = mt.Policy.uniform(level=4)

    def receive(box: list[str | None], src: int) -> None:
        assert src == 0
        box[0] = theirs.dumps()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", receive)
    tuner = mt.Retune(model, cross_entropy, "10B")  # this rank finds nothing for its own part
    tuner.step(batch)
    assert tuner.policy == theirs


def test_bad_arguments() -> None:
    model, batch = make()
    with pytest.raises(ValueError, match="every >= 1"):
        mt.Retune(model, cross_entropy, "60%", every=0)
    with pytest.raises(mt.BudgetError):
        mt.Retune(model, cross_entropy, "much")
    with pytest.raises(mt.WorkloadError, match="no tensor whose first dimension counts samples"):
        mt.Retune(model, cross_entropy, "60%").step([batch[0].sum()])


@pytest.mark.usefixtures("two_settings")
def test_the_own_step_of_the_training_is_measured() -> None:
    def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()

    predicted = []
    ways: list[dict[str, Any]] = [{"loss": cross_entropy}, {"loss": None, "own_step": step}]
    for options in ways:
        model, batch = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        tuner = mt.Retune(model, budget="60%", optimizer=optimizer, **options)
        with no_trace(model):
            assert tuner.step(batch)
        predicted.append(without_time(tuner))
    assert predicted[0] == predicted[1]
