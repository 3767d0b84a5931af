"""Bytes of steps in which modules run again in backward (`store: recompute`), beside measured ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiler.memory.meter import measure_step

PARTS: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {
    "all": lambda names: names,
    "first half": lambda names: names[: len(names) // 2],
    "every other": lambda names: names[::2],
}
INSIDE = {
    "exact": mt.Policy.parse(""),
    "4 bits": mt.Policy.uniform(level=16),
    "derived": mt.Policy.uniform(level=16, store="derive"),
}


def gpt2() -> nn.Module:
    values: dict[str, Any] = {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 64}
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**values, **ends, use_cache=False))


def llama() -> nn.Module:
    values: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, **heads, **ends, use_cache=False))


def resnet() -> nn.Module:
    sizes: dict[str, Any] = {
        "embedding_size": 16,
        "hidden_sizes": [32, 64],
        "depths": [2, 2],
        "num_labels": 10,
    }
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))


def text(count: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 128, (count, 64))
    return {"input_ids": ids, "labels": ids.clone()}


def images(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 96, 96), "labels": torch.randint(10, (count,))}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    value: Tensor = model(**batch).loss
    return value


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]], tuple[str, ...]]] = {
    "GPT-2": (gpt2, text, tuple(f"transformer.h.{number}" for number in range(3))),
    "Llama": (llama, text, tuple(f"model.layers.{number}" for number in range(3))),
    "ResNet": (
        resnet,
        images,
        tuple(f"resnet.encoder.stages.{stage}.layers.{number}" for stage in (0, 1) for number in (0, 1)),
    ),
}


def rerunning(policy: mt.Policy, modules: Sequence[str], level: int) -> mt.Policy:
    return policy.rerunning(dict.fromkeys(modules, mt.LayerSettings(level=level, store="recompute")))


@pytest.fixture(scope="module", name="profiled", params=MODELS)
def _profiled(request: pytest.FixtureRequest) -> tuple[mt.Workload, mt.Profile, tuple[str, ...]]:
    model, batch, modules = MODELS[request.param]
    workload = mt.Workload(model, batch, own_loss, batch_size=16)
    return workload, mt.profile(workload, options=[]), modules


def test_the_modules_that_could_run_again_are_the_blocks(
    profiled: tuple[mt.Workload, mt.Profile, tuple[str, ...]],
) -> None:
    _, profile, modules = profiled
    assert profile.timeline.modules == modules


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("inside", INSIDE)
def test_bytes_are_predicted(
    inside: str, part: str, profiled: tuple[mt.Workload, mt.Profile, tuple[str, ...]]
) -> None:
    workload, profile, modules = profiled
    # Another level than the traced one.
    policy = rerunning(INSIDE[inside], PARTS[part](modules), 16)
    predicted = profile.predict(policy)
    model = mt.convert(workload.build(), policy, seed=0)
    found = measure_step(model, workload.make_batch(), own_loss, workload.make_optimizer(model))
    assert abs(predicted.saved_bytes - found.saved_bytes) <= 64
    # The measurement also holds the loss.
    assert -0.003 * found.peak_bytes <= predicted.peak_bytes - found.peak_bytes <= 0.01 * found.peak_bytes


def test_a_module_that_runs_again_at_another_batch_size(
    profiled: tuple[mt.Workload, mt.Profile, tuple[str, ...]],
) -> None:
    workload, profile, modules = profiled
    policy = rerunning(INSIDE["4 bits"], modules, 256)
    predicted = profile.predict(policy, batch_size=24)
    model = mt.convert(workload.build(), policy, seed=0)
    found = measure_step(model, workload.make_batch(24), own_loss, workload.make_optimizer(model))
    assert abs(predicted.saved_bytes - found.saved_bytes) <= 0.005 * found.saved_bytes
    assert -0.003 * found.peak_bytes <= predicted.peak_bytes - found.peak_bytes <= 0.01 * found.peak_bytes


def test_prices_of_modules_that_were_not_measured_are_unknown(
    profiled: tuple[mt.Workload, mt.Profile, tuple[str, ...]],
) -> None:
    _, profile, modules = profiled
    predicted = profile.predict(rerunning(INSIDE["exact"], modules, 16))
    assert predicted.gradient_error is None
    assert predicted.step_ms is None
    again = mt.Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert again.predict(rerunning(INSIDE["exact"], modules, 16)) == predicted


def test_modules_that_the_model_checkpoints_itself_do_not_run_a_third_time() -> None:
    def checkpointed() -> nn.Module:
        model: Any = gpt2()
        model.gradient_checkpointing_enable()
        built: nn.Module = model
        return built

    workload = mt.Workload(checkpointed, text, own_loss, batch_size=4)
    assert mt.profile(workload, options=[]).timeline.modules == ()
