"""A Llama of 8 layers, of transformers, on the bytes of Python's standard library."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import gpt2_text  # pyright: ignore[reportMissingImports]

BATCH_SIZE = 8
batch, loss, optimizer = gpt2_text.batch, gpt2_text.loss, gpt2_text.optimizer


def model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=gpt2_text.BYTES,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=gpt2_text.LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
