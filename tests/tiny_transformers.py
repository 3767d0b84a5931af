"""Configurations of small language models of transformers, two blocks each; `width`: hidden size."""

from typing import Any

import transformers


def llama(width: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=64, intermediate_size=2 * width, num_key_value_heads=1, **_sizes(width)
    )


def gpt2(width: int) -> transformers.GPT2Config:
    return transformers.GPT2Config(
        vocab_size=64, n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )


def bert(width: int) -> transformers.BertConfig:
    return transformers.BertConfig(vocab_size=64, intermediate_size=2 * width, **_sizes(width))


def t5(width: int) -> transformers.T5Config:
    config = transformers.T5Config(
        vocab_size=64, d_model=width, d_kv=width // 2, d_ff=2 * width, num_layers=2, num_heads=2
    )
    config.update({"decoder_start_token_id": 0})
    return config


def _sizes(width: int) -> dict[str, Any]:
    return {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": width}
