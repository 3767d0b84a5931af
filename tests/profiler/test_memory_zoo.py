"""Predicted bytes beside measured ones, on whole steps of models that were not made for it.

The timeline has the bytes of the traced steps in every slot; what it predicts for other policies is compared
with real steps, whose live storages are counted from outside.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.conversion.layers import Catalog
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiler.memory.memory_model import Timeline
from mesa_tune.profiler.memory.meter import measure_step
from mesa_tune.profiler.memory.rows import Rows
from mesa_tune.profiler.memory.timeline_builder import build_timeline
from mesa_tune.profiler.memory.traced_steps import TracedSteps
from mesa_tune.profiler.tracing import StepTracer
from mesa_tune.workload.preserve import preserved

BATCH_SIZE = 4
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IMAGE: dict[str, Any] = {
    "num_labels": 10,
    "image_size": 32,
    "patch_size": 4,
    "hidden_size": 64,
    "num_hidden_layers": 2,
}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "intermediate_size": 128}
STAGES: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 2], "num_labels": 10}
GPT: dict[str, Any] = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
CHOICES = [EXACT, *(LayerSettings(level=level) for level in (4, 16, 256))]
OTHERS = [
    LayerSettings(level=16, drop=0.3),
    LayerSettings(level=16, drop=0.9),
    LayerSettings(store="exact", drop=0.8),
    LayerSettings(level=16, group_size=None, quant_groups=8),
    LayerSettings(level=16, group_size=None, quant_groups=2),
    LayerSettings(level=16, allocation="sample"),
    LayerSettings(level=16, ema_decay=0.9),
    LayerSettings(level=16, rows=0.4),
    LayerSettings(level=4, store="levels"),
]
KINDS = {
    "plain": [EXACT],
    "4 bits": [LayerSettings(level=16)],
    "mixed": CHOICES,
    "dropping": [LayerSettings(level=16, drop=0.3)],
    "by channel": [LayerSettings(level=16, group_size=None, quant_groups=2)],
    "by sample": [LayerSettings(level=16, allocation="sample")],
    "few rows": [LayerSettings(level=16, rows=0.4)],
    "all codecs": [*CHOICES, *OTHERS],
}


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, intermediate_size=128))


def gpt2() -> nn.Module:
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT, **ends, use_cache=False))


def llama() -> nn.Module:
    """Of two heads for queries, and one for keys and values."""
    heads: dict[str, Any] = {"num_key_value_heads": 1, "intermediate_size": 128, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **heads))


def resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**STAGES))


def checkpointed_vit() -> nn.Module:
    model: Any = transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE, **HEADS))
    model.gradient_checkpointing_enable()
    built: nn.Module = model
    return built


def text(count: int) -> dict[str, Tensor]:
    """Texts of unequal lengths, padded: their mask is one tensor that every attention saves."""
    ids = torch.randint(1, 128, (count, 64))
    ends = torch.randint(32, 64, (count, 1))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": (torch.arange(64) < ends).long()}


def images(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 32, 32), "labels": torch.randint(10, (count,))}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    value: Tensor = model(**batch).loss
    return value


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    options: Mapping[str, Any] = MappingProxyType({})

    def workload(self) -> mt.Workload:
        return mt.Workload(self.model, self.batch, own_loss, batch_size=BATCH_SIZE, **self.options)


ZOO = {
    "BERT": Case(bert, text),
    "GPT-2, accumulated": Case(gpt2, text, {"accumulation": 3}),
    "Llama": Case(llama, text),
    "GPT-2, SGD": Case(gpt2, text, {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}),
    "ResNet": Case(resnet, images),
    "ViT, checkpointed": Case(checkpointed_vit, images),
}


class Traced(NamedTuple):
    steps: TracedSteps
    timeline: Timeline
    layers: list[tuple[str, int, str]]


@pytest.fixture(scope="module", name="traced", params=ZOO)
def _traced(request: pytest.FixtureRequest) -> tuple[mt.Workload, Traced]:
    work = ZOO[request.param].workload()
    model = work.build()
    optimizer = work.make_optimizer(model)
    with preserved(model, optimizer) as restore:
        batch = work.make_batch()
        work.take_step(model, batch, optimizer)
        steps, tags = StepTracer(work, model, optimizer, restore).traced(batch, BATCH_SIZE)
    rows = Rows(steps, tags, Catalog.of(model).modules)
    layers = [(entry.tag, entry.index, entry.name) for entry in rows.entries()]
    return work, Traced(steps, build_timeline(steps, steps, rows.hooked), layers)


def test_the_timeline_has_the_bytes_of_the_traced_steps(traced: tuple[mt.Workload, Traced]) -> None:
    _, (steps, timeline, _) = traced
    static = sum(steps.static.values())

    # Without the limit below which tensors stay exact, as the steps were traced.
    sized = replace(timeline, min_elements=0).at()
    assert timeline.excess() == (0, None)
    for trace, settings in (
        (steps.plain, EXACT),
        (steps.packed, LayerSettings(level=16)),
        (steps.whole, LayerSettings(level=16, group_size=None, quant_groups=1)),
        (steps.dropped, LayerSettings(level=16, drop=1e-6)),
        (steps.sampled, LayerSettings(level=16, rows=1 - 1e-6)),
    ):
        assert len(trace.slots) == len(sized.slots)
        live = sized.live(dict.fromkeys(sized.names, settings)).tolist()
        # A slot without a layer has the bytes of the plain step.
        differ = [
            (slot.layer, count - static - slot.high) for slot, count in zip(trace.slots, live, strict=True)
        ]
        assert not [pair for pair in differ if pair[1] and pair[0] is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_predicted(kind: str, traced: tuple[mt.Workload, Traced]) -> None:
    work, (_, timeline, layers) = traced
    chance = random.Random(5)
    settings = KINDS[kind]
    policy = mt.Policy.from_assignments((*layer, chance.choice(settings)) for layer in layers)
    step = timeline.at().under(policy.assignment(layers))
    model = mt.convert(work.build(), policy, seed=0)
    found = measure_step(model, work.make_batch(), own_loss, work.make_optimizer(model), work.training_step)
    assert abs(step.saved_bytes - found.saved_bytes) <= 64
    # The measurement also holds the loss. What few survivors and rows add is an upper bound.
    most = 0.03 if any(one.omits for one in settings) else 0.01
    assert -0.003 * found.peak_bytes <= step.peak_bytes - found.peak_bytes <= most * found.peak_bytes
    assert sum(step.peak.bytes.values()) == step.peak_bytes
