"""Trials of a converted model: as it stores in training, with some layers alone, and without a trace."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.conversion.trial import Trial
from tests.builders import MLPBlock, gradients
from tests.conformance.running import relative_error


def on_tags(settings: str) -> str:
    return "# mesa-tune policy 1\n" + "".join(
        f"on {tag}:\n    by_index: all\n    level: 16\n{settings}" for tag in ("fc", "layernorm", "gelu")
    )


POLICIES = {
    "uniform": on_tags(""),
    "by index": on_tags("\n    by_index: 1\n    level: 4\n"),
    "derive": on_tags("    store: derive\n"),
    "running ranges": on_tags("    ema_decay: 0.9\n"),
    "recompute": on_tags("") + "on module:\n    by_name: 0\n    store: recompute\n    level: 16\n",
}


def made(policy: str, seed: int = 0) -> nn.Module:
    """A converted model whose settings are final."""
    torch.manual_seed(0)
    model = mt.convert(nn.Sequential(MLPBlock(32), MLPBlock(32)), mt.Policy.parse(policy), seed=seed)
    for _ in range(2):
        gradients(model, X)
    return model


X = torch.randn(512, 32, generator=torch.Generator().manual_seed(3))


def error(model: nn.Module, plain: dict[str, Tensor]) -> float:
    return relative_error(gradients(model, X), plain)


def mean(measure: Callable[[int], float]) -> float:
    return statistics.fmean(map(measure, range(8)))


@pytest.mark.parametrize("name", POLICIES)
def test_a_trial_stores_what_the_training_stores(name: str) -> None:
    model = made(POLICIES[name])
    before = copy.deepcopy(mt.state_dict(model))
    trial = Trial(model, 1.0)
    with trial.plain():
        plain = gradients(model, X)
    assert error(mt.revert(copy.deepcopy(model)), plain) == 0

    def tried(seed: int) -> float:
        with trial.stored(seed):
            return error(model, plain)

    expected = mean(lambda seed: error(made(POLICIES[name], seed), plain))
    assert mean(tried) == pytest.approx(expected, rel=0.1)
    assert str(mt.state_dict(model)) == str(before)


@pytest.mark.parametrize("name", POLICIES)
def test_errors_of_layers_alone_add_up(name: str) -> None:
    """Rounding is unbiased and independent from layer to layer, so at 4 bits squared errors add up."""
    model = made(POLICIES[name])
    trial = Trial(model, 1.0)
    with trial.plain():
        plain = gradients(model, X)
    with trial.stored(1):
        whole = error(model, plain)
    parts = []
    for layer in trial.layers():
        with trial.stored(1, (layer,)):
            parts.append(error(model, plain))
    with trial.stored(1, ()):
        assert error(model, plain) < 1e-9
    assert sum(parts) == pytest.approx(whole, rel=0.25)
