"""Predicted bytes beside measured ones, on whole steps of models that were not made for it.

The timeline has the bytes of the traced steps in every slot; what it predicts for other policies is compared
with real steps, whose live storages are counted from outside.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.conversion.layers import Catalog
from mesa_tune.measure.memory.rows import Rows
from mesa_tune.measure.memory.timeline_builder import TracedPair, build_timeline
from mesa_tune.measure.memory.traced_steps import TracedSteps
from mesa_tune.measure.tracing import StepTracer
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.timeline.memory_model import Timeline
from mesa_tune.workload.preserve import preserved
from tests.builders import bert_config, gpt2, llama, own_loss, workload
from tests.measure.models import pixels, resnet
from tests.step_memory import measured, swept

BATCH_SIZE = 4
IMAGE: dict[str, Any] = {"num_labels": 10, "image_size": 32, "patch_size": 4, "hidden_size": 64}
HEADS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
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
    return transformers.BertForMaskedLM(bert_config())


def checkpointed_vit() -> Any:
    model: Any = transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE, **HEADS))
    model.gradient_checkpointing_enable()
    return model


def padded(count: int) -> dict[str, Tensor]:
    """Texts of unequal lengths, padded: their mask is one tensor that every attention saves."""
    ids = torch.randint(1, 128, (count, 64))
    ends = torch.randint(32, 64, (count, 1))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": (torch.arange(64) < ends).long()}


class Case(NamedTuple):
    """A model, its batch, the kinds of policies that are tried, and options of the workload."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    kinds: tuple[str, ...]
    options: Mapping[str, Any] = MappingProxyType({})


SGD = partial(torch.optim.SGD, lr=0.1)
ZOO = {
    "BERT": Case(bert, padded, ("plain", "mixed", "all codecs")),
    "GPT-2, accumulated": Case(
        lambda: gpt2(layers=1), padded, ("4 bits", "dropping", "all codecs"), {"accumulation": 3}
    ),
    "Llama": Case(llama, padded, ("mixed", "few rows", "all codecs")),
    "GPT-2, SGD": Case(lambda: gpt2(layers=1), padded, ("4 bits", "by sample"), {"optimizer": SGD}),
    "ResNet": Case(lambda: resnet(1, 2), pixels, ("plain", "by channel", "all codecs")),
    "ViT, checkpointed": Case(checkpointed_vit, pixels, ("mixed", "dropping", "all codecs")),
}
SWEPT = ("Llama", "GPT-2, SGD")


def workload_of(name: str) -> mt.Workload:
    case = ZOO[name]
    return workload(case.model, case.batch, own_loss, batch_size=BATCH_SIZE, **case.options)


class Traced(NamedTuple):
    steps: TracedSteps
    timeline: Timeline
    layers: list[tuple[str, int, str]]


@cache
def traced(name: str) -> Traced:
    work = workload_of(name)
    model = work.build()
    optimizer = work.make_optimizer(model)
    with preserved(model, optimizer) as restore:
        batch = work.make_batch()
        work.take_step(model, batch, optimizer)
        steps, tags = StepTracer(work, model, optimizer, restore).traced(batch, BATCH_SIZE)
    rows = Rows(steps.plain, steps.packed, tags, Catalog.of(model).modules)
    layers = [(entry.tag, entry.index, entry.name) for entry in rows.entries()]
    return Traced(steps, build_timeline(steps, steps, rows.hooked), layers)


@pytest.mark.parametrize("name", swept(ZOO, SWEPT))
def test_the_timeline_has_the_bytes_of_the_traced_steps(name: str) -> None:
    steps, timeline, _ = traced(name)
    static = sum(steps.static.values())

    # Without the limit below which tensors stay exact, as the steps were traced.
    sized = replace(timeline, min_elements=0).at()
    assert TracedPair(steps, steps).excess()[0] <= 0
    for trace, settings in (
        (steps.plain, EXACT),
        (steps.packed, LayerSettings(level=16)),
        (steps.whole, LayerSettings(level=16, group_size=None, quant_groups=1)),
        (steps.dropped, LayerSettings(level=16, drop=1e-6)),
        (steps.sampled, LayerSettings(level=16, rows=1 - 1e-6)),
    ):
        assert len(trace.slots) == len(sized.slots)
        live = sized.live(dict.fromkeys(sized.names, settings)).tolist()
        # A slot without a layer has the bytes of the plain step. A millionth of the rows is rounded up.
        more = range(2 if settings.rows < 1 else 1)
        pairs = zip(trace.slots, live, strict=True)
        assert not [slot for slot, count in pairs if slot.layer and count - static - slot.high not in more]


@pytest.mark.parametrize(
    ("name", "kind"), swept([(name, kind) for name, case in ZOO.items() for kind in case.kinds], SWEPT)
)
def test_bytes_are_predicted(name: str, kind: str) -> None:
    _, timeline, layers = traced(name)
    chance = random.Random(5)
    settings = KINDS[kind]
    policy = mt.Policy.from_assignments((*layer, chance.choice(settings)) for layer in layers)
    step = timeline.at().under(policy.assignment(layers))
    found = measured(workload_of(name), policy)
    assert abs(step.saved_bytes - found.saved_bytes) <= 64
    # The measurement also holds the loss. What few survivors and rows add is an upper bound.
    most = 0.03 if any(one.omits for one in settings) else 0.01
    assert -0.003 * found.peak_bytes <= step.peak_bytes - found.peak_bytes <= most * found.peak_bytes
    assert sum(step.peak.bytes.values()) == step.peak_bytes
