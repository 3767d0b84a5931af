"""Bytes of steps in which modules run again in backward (`store: recompute`), beside measured ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure.fake_steps import FakeSteps
from mesa_tune.workload.fake import FakeWorkload
from tests.builders import gpt2, llama, own_loss, words, workload
from tests.measure.models import pixels, resnet
from tests.step_memory import measured, swept, without_parts

PARTS: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {
    "all": lambda names: names,
    "first half": lambda names: names[: len(names) // 2],
    "every other": lambda names: names[::2],
    "last": lambda names: names[-1:],
}
INSIDE = {
    "exact": mt.Policy.parse(""),
    "4 bits": mt.Policy.uniform(level=16),
    "derived": mt.Policy.uniform(level=16, store="derive"),
}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]], tuple[str, ...]]] = {
    "GPT-2": (lambda: gpt2(use_cache=False), words, ("transformer.h.0", "transformer.h.1")),
    "Llama": (lambda: llama(layers=1, use_cache=False), words, ("model.layers.0",)),
    # Each block but one that runs again leaves keys and values in a cache, until the forward ends.
    "Llama with a cache": (lambda: llama(layers=3), words, tuple(f"model.layers.{n}" for n in range(3))),
    "ResNet": (
        lambda: resnet(2, 2),
        lambda n: pixels(n, 96),
        tuple(f"resnet.encoder.stages.{stage}.layers.{number}" for stage in (0, 1) for number in (0, 1)),
    ),
}
SWEPT = ("Llama", "ResNet")


def rerunning(policy: mt.Policy, modules: Sequence[str], level: int) -> mt.Policy:
    return policy.rerunning(dict.fromkeys(modules, mt.LayerSettings(level=level, store="recompute")))


def workload_of(name: str) -> mt.Workload:
    return workload(*MODELS[name][:2], own_loss, batch_size=16)


@cache
def profile_of(name: str) -> mt.Profile:
    with without_parts():
        return mt.profile(workload_of(name), options=[])


@pytest.mark.parametrize("name", swept(MODELS, SWEPT))
def test_the_modules_that_could_run_again_are_the_blocks(name: str) -> None:
    assert profile_of(name).timeline.modules == MODELS[name][2]


@pytest.mark.parametrize(
    ("name", "inside", "part"),
    swept(
        [
            ("GPT-2", "exact", "all"),
            ("GPT-2", "4 bits", "first half"),
            ("GPT-2", "derived", "all"),
            ("Llama", "4 bits", "all"),
            ("Llama", "derived", "all"),
            ("Llama with a cache", "4 bits", "every other"),
            ("ResNet", "exact", "every other"),
            ("ResNet", "4 bits", "every other"),
            ("ResNet", "derived", "first half"),
        ],
        SWEPT,
    ),
)
def test_bytes_are_predicted(name: str, inside: str, part: str) -> None:
    # Another level than the traced one.
    policy = rerunning(INSIDE[inside], PARTS[part](MODELS[name][2]), 16)
    predicted = profile_of(name).predict(policy)
    found = measured(workload_of(name), policy)
    assert abs(predicted.saved_bytes - found.saved_bytes) <= 64
    # The measurement also holds the loss.
    assert -0.003 * found.peak_bytes <= predicted.peak_bytes - found.peak_bytes <= 0.01 * found.peak_bytes


@pytest.mark.parametrize("part", ["last", "first half", "every other"])
def test_a_module_has_what_the_ones_before_it_leave(part: str) -> None:
    name = "Llama with a cache"
    policy = rerunning(INSIDE["4 bits"], PARTS[part](MODELS[name][2]), 16)
    profile = profile_of(name)
    step = FakeSteps(FakeWorkload.of(workload_of(name)), policy, cuda=False).at(profile.batch_size)
    traced: dict[str | None, int] = {}
    for slot in step.trace.slots:
        if slot.phase == "forward":
            traced[slot.layer] = max(traced.get(slot.layer, 0), step.static + slot.high)
    sized = profile.timeline.at()
    live = sized.under(profile.assignment(policy)).live
    for known, alive in zip(sized.slots, live.tolist(), strict=True):
        if known.phase == "forward" and known.layer is not None and known.layer.startswith("model.layers"):
            assert alive == pytest.approx(traced[known.layer], rel=0.002), known.layer


@pytest.mark.parametrize("name", swept(MODELS, SWEPT))
def test_a_module_that_runs_again_at_another_batch_size(name: str) -> None:
    policy = rerunning(INSIDE["4 bits"], MODELS[name][2], 256)
    predicted = profile_of(name).predict(policy, batch_size=24)
    found = measured(workload_of(name), policy, 24)
    assert abs(predicted.saved_bytes - found.saved_bytes) <= 0.005 * found.saved_bytes
    assert -0.003 * found.peak_bytes <= predicted.peak_bytes - found.peak_bytes <= 0.01 * found.peak_bytes


def test_prices_of_modules_that_were_not_measured_are_unknown() -> None:
    profile, policy = profile_of("GPT-2"), rerunning(INSIDE["exact"], MODELS["GPT-2"][2], 16)
    predicted = profile.predict(policy)
    assert predicted.gradient_error is None
    assert predicted.step_ms is None
    again = mt.Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert again.predict(policy) == predicted


def test_modules_that_the_model_checkpoints_itself_do_not_run_a_third_time() -> None:
    def checkpointed() -> Any:
        model: Any = gpt2(layers=1)
        model.gradient_checkpointing_enable()
        return model

    work = workload(checkpointed, words, own_loss, batch_size=4)
    assert mt.profile(work, options=[]).timeline.modules == ()
