"""A T5 of 3 and 3 layers, of transformers: it repeats random tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

BATCH_SIZE, LENGTH, TOKENS = 8, 128, 1000


def model() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_heads": 4}
    config = T5Config(vocab_size=TOKENS, num_layers=3, use_cache=False, **sizes)
    config.update({"decoder_start_token_id": 0})
    return T5ForConditionalGeneration(config)


def batch(batch_size: int) -> Tensor:
    return torch.randint(2, TOKENS, (batch_size, LENGTH))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss
