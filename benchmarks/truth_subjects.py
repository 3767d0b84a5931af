"""The models of `truth.py`, each with its batch, its loss, its batch size, and its blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import ZOO, configured

TOKENS = 256
TEXT = {"vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}


class Subject(NamedTuple):
    """A model: how to build it, its batch and loss, the batch size, and the name of its blocks' list."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    batch_size: int
    blocks: str


class Lstm(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, vocabulary: int = 4096, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([_Recurrent(width) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y


def _tokens(vocabulary: int, count: int) -> dict[str, Tensor]:
    ids = torch.randint(100, vocabulary, (count, TOKENS))
    return {"input_ids": ids, "labels": ids}


def _next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    value: Tensor = model(**batch).loss
    return value


def _text(config: str, model: str, blocks: str, **values: Any) -> Subject:
    build = partial(configured(config, model, {**TEXT, **values}, {}), "published", None)
    return Subject(build, partial(_tokens, 8192), _own_loss, 4, blocks)


def _published(name: str, batch_size: int, blocks: str) -> Subject:
    chosen = ZOO[name]
    build, batch = partial(chosen.build, "published", None), partial(chosen.batch, "published")
    return Subject(build, batch, chosen.loss, batch_size, blocks)


_DEIT_TI = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_labels": 1000}
_GPT2 = {"n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 8192, "use_cache": False}
_T5 = {"d_model": 256, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "vocab_size": 8192}
SUBJECTS: dict[str, Subject] = {
    "deit_ti": _published("deit_s", 16, "deit.layers")._replace(
        build=partial(configured("DeiTConfig", "DeiTForImageClassification", _DEIT_TI, {}), "published", None)
    ),
    "swin_t": _published("swin_t", 2, "swin.encoder.layers"),
    "resnet_50": _published("resnet_50", 4, "resnet.encoder.stages"),
    "bert": _text("BertConfig", "BertForMaskedLM", "bert.encoder.layer", intermediate_size=1024),
    "gpt2": Subject(
        partial(configured("GPT2Config", "GPT2LMHeadModel", _GPT2, {}), "published", None),
        partial(_tokens, 8192),
        _own_loss,
        4,
        "transformer.h",
    ),
    "llama": _text(
        "LlamaConfig",
        "LlamaForCausalLM",
        "model.layers",
        intermediate_size=704,
        num_key_value_heads=2,
        use_cache=False,
    ),
    "unet": _published("unet", 2, "down"),
    "t5": Subject(
        partial(
            configured(
                "T5Config",
                "T5ForConditionalGeneration",
                _T5 | {"decoder_start_token_id": 0, "use_cache": False},
                {},
            ),
            "published",
            None,
        ),
        partial(_tokens, 8192),
        _own_loss,
        4,
        "encoder.block",
    ),
    "convnext_t": _published("convnext_t", 2, "convnext.encoder.stages"),
    "segformer_b0": _published("segformer_b0", 2, "segformer.stages"),
    "mobilenet_v2": _published("mobilenet_v2", 4, "mobilenet_v2.layer"),
    "lstm": Subject(Lstm, partial(_tokens, 4096), _next_token, 8, "layers"),
}
