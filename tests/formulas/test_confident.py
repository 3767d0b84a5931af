"""Losses of models that fit well: the gradient is what is left of the target's probability, p − 1."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from tests.builders import known
from tests.step_memory import Composed

ROWS, CLASSES = 512, 32
TARGET = torch.arange(ROWS) % CLASSES


def under_autocast(logits: Tensor) -> Tensor:
    """The loss in 32 bits, as PyTorch computes it."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(logits, TARGET)


SOFT = 0.999 * F.one_hot(TARGET, CLASSES) + 0.001 * torch.full((CLASSES,), 1 / CLASSES)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "indices": lambda logits: F.cross_entropy(logits, TARGET),
    "bfloat16": lambda logits: F.cross_entropy(logits.bfloat16(), TARGET).float(),
    "autocast": lambda logits: under_autocast(logits.bfloat16()),
    "log-softmax": lambda logits: F.nll_loss(F.log_softmax(logits, -1), TARGET),
    "smoothed": lambda logits: F.cross_entropy(logits, TARGET, label_smoothing=1e-3),
    "soft": lambda logits: F.cross_entropy(logits, SOFT),
}
BITS = {"8 bits": (256, 3e-5), "4 bits": (16, 9e-3)}


MARGINS = {"loss-0.06": 6.5, "loss-5e-4": 11.5, "loss-2e-5": 15.0}
CASES = [
    pytest.param(name, *BITS[bits], margin, id=f"{name}-{bits}-{loss}")
    for name, bits in (*((name, "8 bits") for name in LOSSES), ("indices", "4 bits"), ("soft", "4 bits"))
    for loss, margin in MARGINS.items()
    if (name, loss) != ("bfloat16", "loss-2e-5")  # there PyTorch's own p - 1 is rounded to 16 bits
]


@pytest.mark.parametrize(("name", "level", "bound", "margin"), CASES)
def test_a_confident_gradient_is_as_good_as_any(name: str, level: int, bound: float, margin: float) -> None:
    # The logits are a parameter, so that only their gradient is measured.
    margins = torch.full((ROWS, 1), margin)
    logits = nn.Parameter(torch.randn(ROWS, CLASSES).scatter_add_(1, TARGET[:, None], margins))
    model = Composed(lambda m: LOSSES[name](m.logits * 1.0), logits=logits)
    model().backward()
    exact = known(logits.grad).clone()
    mt.convert(model, mt.Policy.uniform(level=level), min_elements=0)
    errors = []
    for _ in range(4):
        model.zero_grad()
        model().backward()
        errors.append((known(logits.grad) - exact).square().sum() / exact.square().sum())
    assert torch.stack(errors).mean() < bound
