"""The memory of a workload's step, measured beside predicted, and small parts to make models of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mesa_tune as mt
from mesa_tune.measure.memory.meter import StepMemory, measure_second_step, measure_step
from mesa_tune.measure.tracing import StepTracer
from mesa_tune.profiles.entries import LayerEntry
from mesa_tune.profiles.profile import Profile

WIDTH, CLASSES, BATCH = 32, 48, 48
SETTINGS = [mt.LayerSettings(level=256), mt.LayerSettings(level=16)]
PLAIN, FOUR_BITS = mt.Policy.parse(""), mt.Policy.uniform(level=16)


def mlp(width: int = WIDTH, out: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, out))


def tokens(n: int) -> Tensor:
    return torch.randn(n, 20, WIDTH)


def squares(model: Callable[..., Any], x: Any) -> Any:
    return model(x).square().mean()


def regression(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def ids(n: int) -> Tensor:
    return torch.randint(0, CLASSES, (n, 21))


class Composed(nn.Module):
    """Parts by name, and a forward that is a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any] | None = None, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs) if self.function else None


def assigned(profile: Profile, settings: Callable[[LayerEntry], mt.LayerSettings]) -> mt.Policy:
    """The policy with these settings of each layer of a profile."""
    rows = ((layer.tag, layer.index, layer.name, settings(layer)) for layer in profile.layers)
    return mt.Policy.from_assignments(rows)


def swept(cases: Iterable[Any], names: Collection[str]) -> list[Any]:
    """Names, or tuples that begin with one, as parameters of a test: in the slow sweep those of `names`."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    sweep = pytest.mark.slow("sweep")
    return [pytest.param(*case, marks=sweep if case[0] in names else ()) for case in tuples]


def measured(work: mt.Workload, policy: mt.Policy, batch_size: int | None = None) -> StepMemory:
    """The memory of a real step of the converted model, in which the loss compresses too."""
    model = mt.convert(work.build(), policy, seed=0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with mt.compress_saved(policy, seed=0):
            return work.compute_loss(model, batch)

    return measure_step(
        model, work.make_batch(batch_size), loss, work.make_optimizer(model), work.training_step
    )


def without_parts() -> AbstractContextManager[Any]:
    """Let profiles trace no parts of blocks in slices, which most tests do not look at."""
    return mock.patch.object(StepTracer, "parts", return_value={})


@contextmanager
def without_variants() -> Iterator[None]:
    """Let profiles trace the step as it is: nothing runs again, and nothing has slices.

    That is half of their time, and of no use to tests that look at neither.
    """
    with (
        without_parts(),
        mock.patch.object(StepTracer, "rerun_modules", return_value=()),
        mock.patch.object(StepTracer, "tiled_losses", return_value=()),
    ):
        yield


def second_step(work: mt.Workload, policy: mt.Policy) -> StepMemory:
    """The memory of the second real step, as `mt.verify` measures it."""
    model = mt.convert(work.build(), policy, seed=0)
    stepper = work.stepper(work.make_optimizer(model))
    return measure_second_step(stepper, model, work.make_batch(), lambda: mt.compress_saved(policy, seed=0))


def check_memory(work: mt.Workload, profile: Profile) -> None:
    """Saved and peak bytes are those of real steps, plain and in 4 bits: at most 1 % over, 0.3 % under."""
    for policy in (PLAIN, FOUR_BITS):
        found, predicted = measured(work, policy), profile.predict(policy)
        for kind in ("saved_bytes", "peak_bytes"):
            real, expected = getattr(found, kind), getattr(predicted, kind)
            assert -0.003 * real <= expected - real <= 0.01 * real, (kind, expected, real)
