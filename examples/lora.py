"""LoRA adapters, in plain PyTorch, on the frozen GPT-2 of gpt2_text.py.

    mesa-tune profile examples/lora.py

No gradient is computed for a frozen weight, so its input is not saved for it. What is saved is for the
adapters, and for what lies between them.
"""

from __future__ import annotations

from typing import Any

import gpt2_text
import torch
from torch import Tensor, nn

BATCH_SIZE = 8
RANK = 8

batch = gpt2_text.batch
loss = gpt2_text.loss


class Adapted(nn.Module):
    """A frozen projection, and a trained one of rank `RANK` beside it.

    LoRA begins with `up` at zero, where no gradient reaches `down`, and so no rounding of its input would
    show. Here `up` is small, as after the first steps.
    """

    def __init__(self, base: nn.Module, inner: int, outer: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inner, RANK, bias=False)
        self.up = nn.Linear(RANK, outer, bias=False)
        nn.init.normal_(self.up.weight, std=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def model() -> nn.Module:
    network: Any = gpt2_text.model().requires_grad_(False)
    for block in network.transformer.h:
        for parent, name in ((block.attn, "c_attn"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            base = getattr(parent, name)
            setattr(parent, name, Adapted(base, *base.weight.shape))
    return network


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, fused=True)
