"""Rule 10 in training: what compares, divides by or exponentiates what it saved; NaN, Inf and zeros."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from tests.builders import Calling
from tests.step_memory import Composed

SAMPLES, ROWS, WIDTH = 8, 64, 200
EIGHT = mt.Policy.uniform(level=256)


def net(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """`function` of an activation, between two linear layers."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(32, WIDTH), "last": nn.LazyLinear(4)}
    return Composed(lambda m, x: m.last(function(m.first(x))).square().mean(), **layers)


def lengths(rows: Tensor) -> Tensor:
    """Factors from 1e-4 to 10, one per row, in no order: neighbours in a group differ."""
    count = rows.shape[-2]
    return torch.logspace(-4, 1, count)[torch.arange(count) * 37 % count].unsqueeze(-1)


def padding(rows: Tensor) -> Tensor:
    return (torch.arange(rows.shape[-2]) % 4 > 0).unsqueeze(-1)


def scores(h: Tensor) -> Tensor:
    return h @ h.mT / 16


def future(h: Tensor) -> Tensor:
    return torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)


def doubly_masked(h: Tensor) -> Tensor:
    """Softmax in which some rows have nothing to look at, and are masked again."""
    hidden = future(h) | (torch.arange(ROWS) % 8 == 0).unsqueeze(-1)
    return scores(h).masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0) @ h


def ctc(h: Tensor) -> Tensor:
    logs = h.transpose(0, 1)[..., :20].log_softmax(-1)
    targets, lengths = torch.randint(1, 20, (SAMPLES, 10)), torch.full((SAMPLES,), 10)
    loss = F.ctc_loss(logs, targets, torch.full((SAMPLES,), ROWS), lengths)
    return h * loss


KEY = nn.Parameter(torch.randn(WIDTH // 2, 48) / 7)


def zero_keys(h: Tensor) -> Tensor:
    """Windows padded with zeros, whose keys are zero as well, and divided by ε (Swin v2)."""
    x = (h * padding(h))[..., :48].contiguous()
    keys = F.normalize(F.linear(x, KEY), dim=-1)
    return (keys @ keys.mT).softmax(-1) @ h


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda h: h.amax(1),
    "over-amax": lambda h: h / h.abs().amax(-1, keepdim=True),
    "max": lambda h: h.max(-1).values.unsqueeze(-1) * h,
    "maximum": lambda h: torch.maximum(h, h.roll(1, 0)),
    "median": lambda h: h * h.median(-1, keepdim=True).values,
    "cumprod": lambda h: (1 + 0.1 * h.tanh()).cumprod(-1),
    "logsumexp-masked": lambda h: h * scores(h).masked_fill(future(h), -torch.inf).logsumexp(-1, True),
    "logsumexp-far": lambda h: h * scores(h).masked_fill(future(h), -1e9).logsumexp(-1, True),
    "logaddexp": lambda h: torch.logaddexp(h, h.masked_fill(h < 0, -torch.inf)),
    "ctc_loss": ctc,
    "softmax-nothing-left": doubly_masked,
    "log_softmax-masked": lambda h: h.masked_fill(h < -1, -torch.inf).log_softmax(-1).clamp_min(-20),
    "normalize": lambda h: F.normalize(h * lengths(h), dim=-1),
    "normalize-some-short": lambda h: F.normalize(h * torch.where(padding(h), 1.0, 1e-3), dim=-1),
    "normalize-padding": lambda h: F.normalize((h * padding(h)).roll(1, -1), dim=-1),
    "normalize-zero-key": zero_keys,
    "normalize-3": lambda h: F.normalize(h, p=3.0, dim=-1),
    "over-norm": lambda h: (h * lengths(h)) / (h * lengths(h)).norm(dim=-1, keepdim=True),
    "over-norm-padding": lambda h: (h * padding(h)) / ((h * padding(h)).norm(dim=-1, keepdim=True) + 1e-12),
    "over-clamped-norm": lambda h: (h * padding(h)) / (h * padding(h)).norm(2, -1, True).clamp_min(1e-12),
    "cosine": lambda h: F.cosine_similarity(h * lengths(h), h.roll(1, 1), dim=-1).unsqueeze(-1) * h,
    "std": lambda h: (h * lengths(h)) / ((h * lengths(h)).std(-1, keepdim=True) + 1e-6),
    "charbonnier": lambda h: (h.square() + 1e-6).sqrt(),
    "entropy": lambda h: -(h.softmax(-1) * h.softmax(-1).log()).sum(-1, keepdim=True) * h,
    "power": lambda h: (h.abs() + 1e-4) ** 0.3,
    "cdist": lambda h: torch.cdist(h, h, p=torch.inf),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "lp_pool": lambda h: F.lp_pool1d(h, 2.0, 4),
    "copysign": lambda h: torch.copysign(h, h.roll(1, -1)),
    "gumbel": lambda h: F.gumbel_softmax(h, 0.7, dim=-1),
}


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    torch.manual_seed(1)
    model(x).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


AT_4_BITS = ("over-amax", "normalize", "over-norm-padding", "std", "power", "logsumexp-masked")


@pytest.mark.parametrize(
    ("name", "level", "bound"),
    [*((name, 256, 3e-4) for name in FUNCTIONS), *((name, 16, 0.1) for name in AT_4_BITS)],
)
def test_gradients_are_near_plain_ones(name: str, level: int, bound: float) -> None:
    x = torch.randn(SAMPLES, ROWS, 32)
    model = net(FUNCTIONS[name])
    exact = gradients(model, x)
    mt.convert(model, mt.Policy.uniform(level), seed=1)
    errors = [float((gradients(model, x) - exact).square().sum() / exact.square().sum()) for _ in range(4)]
    assert exact.isfinite().all()
    assert max(errors) < bound, errors


def test_what_is_logged_outside_the_loss_leaves_no_memory_behind() -> None:
    model = mt.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), EIGHT)
    x = torch.randn(512, 64)

    def logging(x: Tensor) -> tuple[Tensor, Tensor]:
        h = model(x)
        return h.square().mean(), h.cumprod(-1).norm(dim=-1).mean() + h.sinh().exp2().mean()

    step = mt.convert(Calling(logging), EIGHT)
    gc.disable()
    try:
        counts = []
        for _ in range(3):
            loss, logged = step(x)
            loss.backward()
            del loss, logged
            counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[2] == counts[1]


def norm_by_hand(width: int) -> nn.Module:
    def forward(model: Any, x: Tensor) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * model.weight

    return Composed(forward, weight=nn.Parameter(torch.ones(width)))


def gated_by_hand(width: int) -> nn.Module:
    """Norm, two projections, one of them gates the other; added to what came in, as Llama and Gemma do."""

    def forward(model: Any, x: Tensor) -> Any:
        h = model.norm(x)
        return x + model.down(F.gelu(model.gate(h)) * model.up(h))

    layers = {name: nn.Linear(width, width, bias=False) for name in ("up", "gate", "down")}
    return Composed(forward, norm=nn.RMSNorm(width, 1e-6), **layers)


def zero_projected(width: int) -> nn.Module:
    """Every other row comes from a projection that begins at zero, as those of images do in Gemma 3."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return torch.cat([x[:, ::2] @ model.projection, x[:, 1::2]], 2).view_as(x)

    return Composed(forward, projection=nn.Parameter(torch.zeros(width, width)))


TARGET = torch.randn(64, 24, 48)
SUMMED = Calling(lambda x: (x * TARGET).sum())
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer norm": lambda width: nn.LayerNorm(width, 1e-6, bias=False),
    "RMS norm": lambda width: nn.RMSNorm(width, 1e-6),
    "by hand": norm_by_hand,
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("level", [256, 16])
def test_rows_of_zeros_leave_the_weight_of_a_norm_alone(norm: str, level: int) -> None:
    # The later norms multiply a gradient that meets zeros by 1/sqrt(eps) each.
    torch.manual_seed(0)
    width = 48
    parts = [part for _ in range(3) for part in (NORMS[norm](width), nn.Linear(width, width, bias=False))]
    model = nn.Sequential(*parts, SUMMED)
    x = torch.randn(64, 24, width)
    x[torch.rand(64, 24) < 0.3] = 0
    right = gradients(model, x)
    for seed in range(3):
        found = gradients(mt.convert(copy.deepcopy(model), mt.Policy.uniform(level), seed=seed), x)
        sizes = [parameter.numel() for parameter in model.parameters()]
        for mine, own in zip(found.split(sizes), right.split(sizes), strict=True):
            assert float((mine - own).square().sum() / own.square().sum()) < 64 / (level - 1) ** 2


@pytest.mark.parametrize("store", ["quantize", "derive"])
@pytest.mark.parametrize("level", [256, 16])
def test_rows_of_zeros_stay_zeros_where_one_half_gates_the_other(store: str, level: int) -> None:
    torch.manual_seed(0)
    width = 48
    model = nn.Sequential(zero_projected(width), *[gated_by_hand(width) for _ in range(2)], SUMMED)
    x = torch.randn(64, 24, width)
    right = gradients(model, x)
    policy = mt.Policy.uniform(level, store=store)
    for seed in range(3):
        found = gradients(mt.convert(copy.deepcopy(model), policy, seed=seed), x)
        assert float((found - right).square().sum() / right.square().sum()) < 64 / (level - 1) ** 2


@pytest.mark.parametrize("name", ["atan", "arctan", "asinh", "arcsinh", "erf", "erfc", "tanh", "sigmoid"])
def test_a_gradient_that_is_zero_at_infinity_stays_zero(name: str) -> None:
    function = getattr(torch, name)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    x[0, :4] = torch.inf
    x[1, :4] = -torch.inf
    model = mt.convert(Calling(lambda h: function(1 * h)), mt.Policy.uniform(level=256))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    model(inputs[0]).sum().backward()
    function(inputs[1]).sum().backward()
    found, plain = (each.grad for each in inputs)
    assert found is not None
    torch.testing.assert_close(found, plain, atol=0.02, rtol=0)
    assert (found[:2, :4] == 0).all()
