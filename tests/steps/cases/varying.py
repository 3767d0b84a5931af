"""Layers that vary from step to step."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from tests.steps.cases.common import (
    CLASSES,
    TOKENS,
    WIDTH,
    Batch,
    Block,
    Net,
    Step,
    supervised,
    through,
)


def dropped(m: Any, h: Tensor) -> Any:
    for block in m.blocks:
        if torch.rand(()) > 0.5:
            h = block(h)
    return h


def drop_path(m: Any, h: Tensor) -> Any:
    for block in m.blocks:
        kept = torch.rand(len(h), 1, 1).lt(0.8)
        h = h + (block(h) - h) * kept / 0.8
    return h


def either(m: Any, h: Tensor) -> Any:
    return m.blocks[int(torch.randint(len(m.blocks), ()))](h)


def early_exit(m: Any, h: Tensor) -> Any:
    for block in m.blocks[: random.randint(1, len(m.blocks))]:
        h = block(h)
    return h


def repeated(m: Any, h: Tensor) -> Any:
    for _ in range(3):
        h = m.blocks[0](h)
    return m.blocks[1](h)


def switch(m: Any, h: Tensor) -> Any:
    """Send each token to one expert."""
    flat = h.flatten(0, 1)
    weight, expert = m.router(flat).softmax(-1).max(-1)
    out = torch.zeros_like(flat)
    for number, block in enumerate(m.blocks):
        rows = (expert == number).nonzero().flatten()
        out = out.index_add(0, rows, block(flat[rows]) * weight[rows, None])
    if hasattr(m, "balance"):
        m.balance = F.one_hot(expert, len(m.blocks)).float().mean(0) @ m.router(flat).softmax(-1).mean(0)
    return out.view_as(h)


def experts(**parts: Any) -> nn.Module:
    return Net([Block(), Block()], switch, router=nn.Linear(WIDTH, 2), **parts)


def balanced(model: Any, batch: Batch) -> Any:
    return supervised(model, batch) + 0.1 * model.balance


def images(n: int) -> list[dict[str, Tensor]]:
    """Images of one size with different numbers of boxes."""
    return [
        {"x": torch.randn(TOKENS, 16), "boxes": torch.rand(int(torch.randint(1, 5, ())), 4)} for _ in range(n)
    ]


def detection(model: Any, batch: list[dict[str, Tensor]]) -> Any:
    features = model.features(torch.stack([image["x"] for image in batch]))
    losses = []
    for image, feature in zip(batch, features, strict=True):
        boxes = model.boxes(feature)[: len(image["boxes"])]
        cost = torch.cdist(boxes.detach(), image["boxes"])
        losses.append(F.l1_loss(boxes[cost.argmin(0)], image["boxes"]))
    return torch.stack(losses).mean()


def lengths(n: int) -> tuple[list[Tensor], Tensor]:
    parts = [torch.randn(int(torch.randint(6, TOKENS, ())), 16) for _ in range(n)]
    return parts, torch.randint(CLASSES, (n,))


def padded(model: Any, batch: tuple[list[Tensor], Tensor]) -> Any:
    x = rnn.pad_sequence(batch[0], batch_first=True)
    mask = torch.tensor([len(part) for part in batch[0]])[:, None] > torch.arange(x.shape[1])
    pooled = (model.features(x) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    return F.cross_entropy(model.head(pooled), batch[1])


def shared() -> nn.Module:
    block = Block()
    return Net([block, block, Block()])


def frozen() -> nn.Module:
    net = Net()
    net.embed.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    return net


VARYING = {
    "LayerDrop": Step(through(dropped, 4)),
    "stochastic depth": Step(through(drop_path)),
    "one of two branches": Step(through(either)),
    "early exit by Python's random": Step(through(early_exit)),
    "a block that runs three times": Step(through(repeated)),
    "a block in two places": Step(shared),
    "experts by nonzero": Step(experts),
    "experts with a loss in an attribute": Step(partial(experts, balance=None), balanced),
    "boxes of each image": Step(lambda: Net(boxes=nn.Linear(WIDTH, 4)), detection, images),
    "lists of tensors, padded": Step(Net, padded, lengths),
    "a frozen trunk": Step(frozen),
}
