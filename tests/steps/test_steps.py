"""Steps of `cases/` under policies, beside plain: only rounding changes gradients.

| policy | loss | relative squared gradient error | what else |
|---|---|---|---|
| 8 bits | bitwise plain's | at most `ERRORS` | buffers, generators and Python state as plain leaves them |
| 4 bits, derived from 4 bits | the same | the same | the same |
| blocks that run again | the same | as 8 bits: their inputs are packed | the same |
| blocks in slices | up to sums of floats | the same | the same |
| searched for 60 % of the peak | the same | | verified: within the budget |
"""

from __future__ import annotations

import random
import warnings
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure.fake_steps import PolicyTracer
from tests.builders import known, policy_of
from tests.conformance.running import relative_error
from tests.steps.cases import STEPS
from tests.steps.cases.common import SAMPLES, Step

BLOCKS = "on module:\n    by_name: *blocks.? *.h.? *layers.?\n    store: recompute\n"
POLICIES = {
    "8 bits": mt.Policy.uniform(level=256),
    "4 bits": mt.Policy.uniform(level=16),
    "derive": mt.Policy.uniform(level=16, store="derive"),
    "recompute": policy_of(BLOCKS),
    "tile": policy_of(BLOCKS + "    tile: 2\n"),
}
ERRORS = {"8 bits": 2e-3, "4 bits": 0.3, "derive": 0.3, "recompute": 2e-3, "tile": 2e-3}


class Taken(NamedTuple):
    """What a step leaves: the loss, gradients, buffers, and the next numbers of the generators."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    numbers: tuple[float, ...]


def taken(step: Step, policy: mt.Policy | None) -> Taken:
    """What the second step leaves: then layers know whose outputs others derive from."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model, batches = step.model().train(), [step.batch(SAMPLES) for _ in range(2)]
    if policy is not None:
        mt.convert(model, policy, seed=0, min_elements=0)
    loss = torch.zeros(())
    for batch in batches:
        model.zero_grad(set_to_none=True)
        if policy is None:
            loss = step.take(model, deepcopy(batch))
        else:
            with mt.compress_saved(policy, seed=0):
                loss = step.take(model, deepcopy(batch))
        if loss.requires_grad:
            loss.backward()
    gradients = {
        name: each.grad.to_dense().clone() for name, each in model.named_parameters() if each.grad is not None
    }
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    return Taken(
        loss.detach(), gradients, buffers, (random.random(), np.random.rand(), float(torch.rand(())))
    )


@cache
def plain(name: str) -> Taken:
    return taken(STEPS[name], None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if not step.refused])
@pytest.mark.filterwarnings("ignore:mesa-tune", "ignore:Sparse")
def test_only_rounding_changes_gradients(name: str, policy: str) -> None:
    wanted, found = plain(name), taken(STEPS[name], POLICIES[policy])
    assert found.numbers == wanted.numbers
    if policy == "tile" and STEPS[name].draws:
        return
    if policy == "tile" or STEPS[name].changes:
        torch.testing.assert_close(
            found.loss, wanted.loss, rtol=1e-2 if STEPS[name].changes else 1e-5, atol=1e-6
        )
    else:
        assert torch.equal(found.loss, wanted.loss)
    torch.testing.assert_close(found.buffers, wanted.buffers)
    assert list(found.gradients) == list(wanted.gradients)
    assert relative_error(found.gradients, wanted.gradients) < ERRORS[policy]


@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if step.refused])
@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_what_differentiates_through_its_own_backward_is_refused(name: str) -> None:
    assert torch.isfinite(plain(name).loss)
    with pytest.raises(mt.MesaTuneError, match=STEPS[name].refused):
        taken(STEPS[name], POLICIES["8 bits"])


def workload(step: Step) -> mt.Workload:
    """The step as users write it for a profile: a loss, or the whole where it has backwards of its own."""

    def whole(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
        step.take(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    if step.profiled:
        return mt.Workload(step.model, step.batch, step.take, optimizer=descent, batch_size=2 * SAMPLES)
    return mt.Workload(step.model, step.batch, step=whole, optimizer=descent, batch_size=2 * SAMPLES)


def descent(parameters: Any) -> torch.optim.Optimizer:
    """One that takes sparse gradients, too."""
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9)


@pytest.mark.slow("sweep")
@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if not step.refused])
def test_a_searched_policy_keeps_what_it_promises(name: str) -> None:
    work = workload(STEPS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile = mt.profile(work, options=[mt.LayerSettings(level=2**bits) for bits in (2, 4, 8)], seeds=1)
    limits: dict[str, Any] = {"trials": 0, "workload": work}
    limits |= {"max_noise_ratio": 1e6, "max_slowdown": 100.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a policy that a search wrote warns of nothing
        warnings.filterwarnings("ignore", "(?!mesa-tune)")
        try:
            plan = mt.search_policy(profile, "60%", **limits)
        except mt.BudgetError:
            plan = mt.search_policy(profile, objective="memory", **limits)
        check = mt.verify(work, plan.policy, steps=1, seeds=1)
    assert known(check.policy.peak_bytes) <= 1.003 * plan.predicted.peak_bytes
    assert known(check.policy.saved_bytes) <= 1.003 * plan.predicted.saved_bytes


def test_what_decides_by_values_is_promised_at_its_dearest_batch() -> None:
    work = workload(STEPS["experts by nonzero"])
    profile = mt.profile(work, options=[mt.LayerSettings(level=16)], seeds=1)
    tracer, policy = PolicyTracer.of(work, profile, work.batch_size), mt.Policy.uniform(level=16)
    peaks = [tracer._real_on(policy, work, work.make_batch(draw=draw)).peak for draw in range(4)]
    promised = tracer.trace(policy)
    assert promised is not None
    assert promised.peak == max(peaks) > min(peaks)
