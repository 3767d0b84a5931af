"""What a module has besides weights: random numbers, counters, buffers, attributes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.steps.cases.common import (
    Batch,
    Block,
    Net,
    Step,
    inside,
    supervised,
)


def python_noise(m: Any, h: Tensor) -> Any:
    return h * random.uniform(0.5, 1.5)


def numpy_noise(m: Any, h: Tensor) -> Any:
    return h + torch.from_numpy(np.random.randn(h.shape[-1])).float()


def own_generator(m: Any, h: Tensor) -> Any:
    return h + torch.randn(h.shape[-1], generator=m.generator)


def counting(m: Any, h: Tensor) -> Any:
    m.calls = getattr(m, "calls", 0) + 1
    return h / m.calls


def penalty(m: Any, h: Tensor) -> Any:
    m.penalty = h.square().mean()
    return h


def penalized(model: Any, batch: Batch) -> Any:
    loss = supervised(model, batch)
    return loss + 0.1 * sum(block.penalty for block in model.blocks)


def vector_quantized(m: Any, h: Tensor) -> Any:
    """The nearest codes, straight through; the loss of codes in an attribute."""
    flat = h.flatten(0, 1)
    code = m.codes(torch.cdist(flat, m.codes.weight).argmin(1)).view_as(h)
    m.penalty = F.mse_loss(code, h.detach()) + 0.25 * F.mse_loss(h, code.detach())
    return h + (code - h).detach()


def moving_codes(m: Any, h: Tensor) -> Any:
    """Codes in a buffer that follows what is assigned to them."""
    flat = h.flatten(0, 1)
    chosen = torch.cdist(flat, m.codes).argmin(1)
    with torch.no_grad():
        sums = torch.zeros_like(m.codes).index_add_(0, chosen, flat)
        counts = torch.bincount(chosen, minlength=len(m.codes)).unsqueeze(1)
        m.codes.lerp_(torch.where(counts > 0, sums / counts.clamp(min=1), m.codes), 0.1)
    return h + (m.codes[chosen].view_as(h) - h).detach()


class MovingCodes(Block):
    def __init__(self) -> None:
        super().__init__(moving_codes)
        self.register_buffer("codes", torch.randn(16, 64))


def gumbel(m: Any, h: Tensor) -> Any:
    return h * F.gumbel_softmax(h, hard=True)


def normalized(**options: Any) -> Callable[[], nn.Module]:
    return inside(
        lambda m, h: m.batch_norm(h.transpose(1, 2)).transpose(1, 2),
        batch_norm=partial(nn.BatchNorm1d, 64, **options),
    )


def parametrized(kind: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        net = Net()
        for block in net.blocks:
            kind(block.up)  # type: ignore[arg-type]
        return net

    return model


def hooked(model: Any, batch: Batch) -> Any:
    """A penalty on what forward hooks record."""
    seen: list[Tensor] = []
    handles = [block.up.register_forward_hook(lambda _, __, out: seen.append(out)) for block in model.blocks]
    try:
        loss = supervised(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return loss + 0.01 * torch.stack([each.square().mean() for each in seen]).sum()


STATEFUL = {
    "dropout": Step(inside(lambda m, h: F.dropout(h, 0.3))),
    "noise of Python's random": Step(inside(python_noise)),
    "noise of NumPy": Step(inside(numpy_noise)),
    "noise of a generator": Step(inside(own_generator, generator=torch.Generator)),
    "a module that counts": Step(inside(counting)),
    "a penalty in an attribute": Step(inside(penalty), penalized),
    "a penalty on what hooks record": Step(Net, hooked),
    "batch norm": Step(normalized()),
    "batch norm, cumulative": Step(normalized(momentum=None)),
    "spectral norm": Step(parametrized(parametrizations.spectral_norm)),
    "weight norm": Step(parametrized(parametrizations.weight_norm)),
    "a vector quantizer": Step(inside(vector_quantized, codes=lambda: nn.Embedding(16, 64)), penalized),
    "codes that move in the forward": Step(lambda: Net(MovingCodes() for _ in range(2))),
    "hard Gumbel softmax": Step(inside(gumbel)),
}
