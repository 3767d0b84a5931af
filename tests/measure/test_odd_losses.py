"""Losses that few write: the memory of their steps is predicted as it is, or an error says why not.

What is hard: a graph may be built inside the loss and be gone when it ends, a part may have no gradient, and
two models may train in one step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError
from tests.builders import known, mean_error, workload
from tests.step_memory import (
    BATCH,
    CLASSES,
    FOUR_BITS,
    PLAIN,
    SETTINGS,
    WIDTH,
    Composed,
    check_memory,
    measured,
    mlp,
    squares,
    swept,
    tokens,
)


def several() -> nn.Module:
    """Two heads with losses of their own."""

    def forward(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = model.trunk(x).relu()
        return model.classes(h), model.values(h)

    return Composed(forward, trunk=mlp(), classes=nn.Linear(WIDTH, CLASSES), values=nn.Linear(WIDTH, 1))


def several_losses(model: nn.Module, x: Tensor) -> Tensor:
    logits, values = model(x)
    target = torch.arange(logits.flatten(0, 1).shape[0]) % CLASSES
    return F.cross_entropy(logits.flatten(0, 1), target) + 0.5 * F.smooth_l1_loss(values[..., 0], x.mean(-1))


def gan_loss(model: Any, x: Tensor) -> Tensor:
    made = model.generator(torch.randn_like(x))
    real, fake = model.discriminator(x), model.discriminator(made.detach())
    fooled = model.discriminator(made)
    return F.softplus(-real).mean() + F.softplus(fake).mean() + F.softplus(-fooled).mean()


def momentum() -> nn.Module:
    """Contrastive learning: an encoder and its slow copy, which has no gradient."""
    encoder = mlp()
    return Composed(encoder=encoder, slow=copy.deepcopy(encoder).requires_grad_(False))


def contrastive_loss(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for slow, fast in zip(model.slow.parameters(), model.encoder.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
        keys = F.normalize(model.slow(x).mean(1), dim=-1)
    queries = F.normalize(model.encoder(x + 0.1 * torch.randn_like(x)).mean(1), dim=-1)
    return F.cross_entropy(queries @ keys.T / 0.1, torch.arange(len(x)))


def nested(n: int) -> dict[str, Any]:
    return {"views": [{"x": tokens(n)}, {"x": tokens(n)}], "extra": ({"target": tokens(n)}, None)}


def nested_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    first, second = (model(view["x"]) for view in batch["views"])
    return F.mse_loss(first * second.sigmoid(), batch["extra"][0]["target"])


def meta() -> nn.Module:
    """An inner step of gradient descent, differentiated through by the outer one."""

    def forward(model: Any, x: Tensor) -> Any:
        weights: dict[str, Tensor] = dict(model.inner.named_parameters())
        gradients = grad(lambda weights: squares(partial(functional_call, model.inner, weights), x))(weights)
        stepped = {name: weight - 0.1 * gradients[name] for name, weight in weights.items()}
        return functional_call(model.inner, stepped, (x,))

    return Composed(forward, inner=mlp())


def penalty_loss(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = model(x).square().mean()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + (slope.flatten(1).norm(dim=1) - 1).square().mean()  # type: ignore[no-any-return]


def first_gradient_loss(model: nn.Module, x: Tensor) -> Tensor:
    """A weight from a gradient that is not differentiated again."""
    y = model(x)
    (slope,) = torch.autograd.grad(y.mean(), y, retain_graph=True)
    return (y * slope.abs().mean()).square().mean()  # type: ignore[no-any-return]


def perturbed_loss(model: nn.Module, x: Tensor) -> Any:
    """Adversarial training: the inputs move along a gradient, whose graph is gone by then."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(squares(model, x), x)
    return squares(model, x.detach() + 0.1 * slope.sign())


def own_backward_loss(model: nn.Module, x: Tensor) -> Any:
    """A part of the loss goes backward inside, and the rest is returned."""
    first, second = x.chunk(2)
    squares(model, first).backward()
    return squares(model, second)


Made = tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[..., Tensor]]
LOSSES: dict[str, Made] = {
    "several losses": (several, tokens, several_losses),
    "adversarial": (lambda: Composed(generator=mlp(), discriminator=mlp(out=1)), tokens, gan_loss),
    "contrastive": (momentum, tokens, contrastive_loss),
    "a nested batch": (mlp, nested, nested_loss),
    "a first gradient": (mlp, tokens, first_gradient_loss),
}


@pytest.mark.parametrize("name", swept(LOSSES, ("several losses", "contrastive")))
def test_memory_is_that_of_a_real_step(name: str) -> None:
    work = workload(*LOSSES[name], batch_size=BATCH)
    check_memory(work, mt.profile(work, options=SETTINGS[1:], seeds=1))


def test_a_graph_that_is_gone_is_no_part_of_the_prices() -> None:
    work = workload(mlp, tokens, perturbed_loss, batch_size=BATCH)
    profile = mt.profile(work, options=SETTINGS[1:])
    error = mean_error(JointError(work), FOUR_BITS, [(draw, 9) for draw in range(2)])
    predicted = profile.predict(FOUR_BITS)
    assert 0.5 < error / known(predicted.gradient_error) < 2
    assert profile.predict(PLAIN).peak_bytes == measured(work, PLAIN).peak_bytes
    found = measured(work, FOUR_BITS)
    assert predicted.saved_bytes == found.saved_bytes
    assert predicted.peak_bytes >= found.peak_bytes


def test_a_backward_inside_the_loss_is_refused() -> None:
    work = workload(mlp, tokens, own_backward_loss, batch_size=BATCH)
    refusal = r"test_odd_losses.py:\d+: loss\(\) calls backward\(\) itself.*\n.*ACCUMULATION"
    with pytest.raises(mt.WorkloadError, match=refusal):
        mt.profile(work, options=SETTINGS)


def test_second_derivatives_are_refused() -> None:
    model = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))  # noqa: E731
    refusal = r"create_graph=True reached .*\n.*\n.*leave the second derivative out"
    with pytest.raises(mt.RunError, match=refusal):
        mt.profile(workload(model, tokens, penalty_loss, batch_size=BATCH), options=[])


def test_gradients_of_torch_func_are_refused() -> None:
    with pytest.raises(mt.WorkloadError, match=r"loss\(\) raised .*\n.*\n.*leave this part out of loss"):
        mt.profile(workload(meta, tokens, squares, batch_size=BATCH), options=[])


def test_parts_on_other_devices_are_named() -> None:
    work = workload(mlp, lambda n: (tokens(n), tokens(n).to("meta")), squares, batch_size=BATCH)
    with pytest.raises(mt.WorkloadError, match=r"on the device meta, which has no values"):
        mt.profile(work, options=[])
    with pytest.raises(mt.WorkloadError, match=r"model\(\) .*meta"):
        workload(lambda: nn.Linear(2, 2, device="meta"), tokens, squares, batch_size=BATCH).build()
