"""A GPT-2 of four layers, of transformers, on the text of Python's standard library, byte by byte.

mesa-tune profile examples/gpt2_text.py
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

BATCH_SIZE = 8
LENGTH = 256
BYTES = 256  # size of the vocabulary


@cache
def text() -> Tensor:
    """Return the modules at the top of the standard library as bytes, one after the other; shape [bytes]."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def model() -> nn.Module:
    config = GPT2Config(
        n_embd=192,
        n_layer=4,
        n_head=4,
        vocab_size=BYTES,
        n_positions=LENGTH,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def batch(batch_size: int) -> Tensor:
    """Return pieces of the text and the byte after each, as integers; shape [batch_size, LENGTH + 1]."""
    starts = torch.randint(len(text()) - LENGTH, (batch_size, 1))
    return text()[starts + torch.arange(LENGTH + 1)].long()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
