"""The training step: its memory and its gradient error are predicted as they are, whatever it is made of."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.memory.meter import measure_step
from mesa_tune.workload.step import LossStepper, TrainingStep
from tests.builders import known, mean_error, workload

pytestmark = pytest.mark.usefixtures("without_variants")

STEPS: dict[str, dict[str, Any]] = {
    "simple": {},
    "accumulated": {"accumulation": 4},
    "zeros": {"set_to_none": False},
    "clipped": {"clip_norm": 1.0},
    "scaled": {"scaler": True, "clip_norm": 0.5, "accumulation": 3},
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.LayerNorm(300), nn.Linear(300, 300), nn.ReLU())


def loss(model: nn.Module, x: Tensor) -> Any:
    return model(x).square().mean()


def of_step(**step: Any) -> mt.Workload:
    return workload(model, lambda n: torch.randn(n, 64), loss, batch_size=48, **step)


@cache
def profiled(name: str) -> mt.Profile:
    """The profile of a step without prices, which several tests look at."""
    return mt.profile(of_step(**STEPS[name]), options=[])


@pytest.mark.parametrize("name", STEPS)
def test_memory_is_predicted(name: str) -> None:
    work = of_step(**STEPS[name])
    for policy in (mt.Policy.parse(""), mt.Policy.uniform(level=16)):
        converted = mt.convert(work.build(), policy, seed=0)

        def compressed_loss(model: nn.Module, x: Tensor, policy: mt.Policy = policy) -> Tensor:
            with mt.compress_saved(policy):
                return work.compute_loss(model, x)

        optimizer = work.make_optimizer(converted)
        found = measure_step(converted, work.make_batch(), compressed_loss, optimizer, work.training_step)
        predicted = profiled(name).predict(policy)
        assert predicted.saved_bytes == found.saved_bytes
        # The measurement itself holds the loss and the scaler's numbers.
        assert -16 <= predicted.peak_bytes - found.peak_bytes <= 0.001 * found.peak_bytes


def test_gradients_that_stay_are_part_of_the_peak() -> None:
    simple, accumulated = profiled("simple"), profiled("accumulated")
    weights = sum(4 * parameter.numel() for parameter in model().parameters())
    assert accumulated.static_bytes == simple.static_bytes + weights


def test_the_error_of_an_accumulated_gradient_is_predicted() -> None:
    policy = mt.Policy.uniform(level=4)
    errors = {}
    for count in (1, 4):
        work = of_step(accumulation=count)
        predicted = mt.profile(work, options=[mt.LayerSettings(level=4)], seeds=4).predict(policy)
        measured = mean_error(JointError(work), policy, [(draw, 9) for draw in range(4)])
        assert 0.5 < measured / known(predicted.gradient_error) < 2
        errors[count] = measured
    assert errors[4] < 0.7 * errors[1]  # rounding noise of micro-batches averages out


def test_a_step_is_what_pytorch_would_do() -> None:
    """Scaling and unscaling change nothing, and the clipped step follows torch's own."""
    x = [torch.randn(48, 64) for _ in range(2)]
    net, twin = model(), model()
    twin.load_state_dict(net.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (net, twin)]
    batches = iter(x)
    step = TrainingStep(accumulation=2, clip_norm=0.1, scaler=True)
    LossStepper(step, optimizers[0], lambda net, batches: loss(net, next(batches))).run(net, batches)
    for batch in x:
        (loss(twin, batch) / 2).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    optimizers[1].step()
    assert all(map(torch.allclose, net.parameters(), twin.parameters()))


def test_the_model_file_says_it(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\ndef model(): return nn.Linear(4, 4)\n"
        "def batch(n): return torch.randn(n, 4)\ndef loss(model, x): return model(x).mean()\n"
        "ACCUMULATION = 4\nCLIP_NORM = 1.0\nSCALER = True\nSET_TO_NONE = False\n"
    )
    work = mt.Workload.load(path)
    assert work.training_step == TrainingStep(4, 1.0, True, False)
    assert work.description["accumulation"] == 4
    assert "accumulation" not in of_step().description


@pytest.mark.parametrize(
    "step",
    [{"accumulation": 0}, {"accumulation": 1.5}, {"clip_norm": -1}, {"clip_norm": True}, {"scaler": "yes"}],
)
def test_bad_values_are_named(step: dict[str, Any]) -> None:
    with pytest.raises(mt.WorkloadError, match=rf"{next(iter(step)).upper()} = .*: must be"):
        of_step(**step)
