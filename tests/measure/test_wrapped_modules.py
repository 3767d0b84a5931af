"""Blocks inside a wrapper (LoRA of PEFT) are found by their names without its prefix, and run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import pytest
from torch import nn

import mesa_tune as mt
from mesa_tune.profiles.profile import Profile
from mesa_tune.search.space import make_space
from tests.builders import llama, own_loss, words, workload

BLOCKS = ("model.layers.0", "model.layers.1")
PARTS = {f"{block}.{part}" for block in BLOCKS for part in ("mlp", "self_attn")}


def adapted() -> nn.Module:
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    base = llama(intermediate_size=192, num_key_value_heads=2, use_cache=False)
    return peft.get_peft_model(base, peft.LoraConfig(target_modules=targets, r=8, init_lora_weights=False))


pytestmark = pytest.mark.slow("training")
WORKLOAD = workload(adapted, lambda n: words(n, 48), own_loss)


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return mt.profile(WORKLOAD, options=[mt.LayerSettings(level=256), mt.LayerSettings(level=16)], seeds=1)


def test_blocks_run_again_and_parts_in_slices(profile: Profile) -> None:
    assert profile.timeline.modules == BLOCKS
    # The first block takes no tensor that wants a gradient: the embedding is frozen.
    assert [entry.name for entry in profile.modules] == ["model.layers.1"]
    assert set(profile.parts) == PARTS


def test_they_do_around_layers_that_no_setting_changes(profile: Profile) -> None:
    """Rows of 8 elements (LoRA's) pack into no fewer bytes, and may still be timed as faster than exact."""
    layers = (replace(layer, call_ms=-0.01) for layer in profile.layers)
    space = make_space(replace(profile, layers=tuple(layers)))
    assert [module.name for module in space.modules] == ["model.layers.1"]


def test_the_smallest_policy_lets_them_and_is_as_small_as_predicted(profile: Profile) -> None:
    slow: dict[str, Any] = {"max_slowdown": 100.0, "max_noise_ratio": 1.0}  # times of small models vary
    plan = mt.search_policy(profile, objective="memory", trials=0, **slow)
    assert {name for rule in plan.policy.module_rules() for name in rule.names or ()} & {*BLOCKS, *PARTS}
    others = mt.search_policy(profile, objective="memory", trials=0, forbid=("recompute", "tile"), **slow)
    assert plan.predicted.peak_bytes < 0.95 * others.predicted.peak_bytes
    check = mt.verify(WORKLOAD, plan.policy, steps=1, seeds=1)
    assert check.policy.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.03)
