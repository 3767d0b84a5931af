"""`store: derive` in profiles: what is predicted beside what is measured."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiler.entries import Derivation
from mesa_tune.profiler.errors.derivation import continued
from mesa_tune.profiler.errors.joint_error import JointError
from mesa_tune.profiler.memory.memory_model import Timeline
from mesa_tune.profiler.memory.meter import measure_step
from mesa_tune.profiler.profile import Profile
from tests.engine.test_deriving import Gated
from tests.profiler.test_profile import MODELS, image_batch, loss, text_batch

BATCH, WIDTH = 8, 64
DIGITS = Path(__file__).parents[2] / "examples" / "digits_vit.py"
# Groups as wide as the rows, with which norms composed by hand store what they keep.
DERIVE = mt.Policy.uniform(level=16, group_size=64, store="derive")
FOUR, EXACT = mt.LayerSettings(level=16), mt.LayerSettings(enable=False)
LEVELS = (4, 16, 256)


class Llama(nn.Module):
    """Two gated perceptrons after RMS norms written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated(), Gated())
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).mean(1))
        return logits


class Dropped(nn.Module):
    """Dropout between what is derived from and who derives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.2)
        self.second, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.embed(x)))
        x = self.second(self.drop(self.act(self.first(x))))
        logits: Tensor = self.head(F.gelu(x).mean(1))
        return logits


class Silu(nn.Module):
    """Convolution, batch norm, SiLU, twice: the SiLU's own input can be derived as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv3, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.bn1(self.conv1(x)))
        x = x + F.silu(self.bn2(self.conv2(x)))
        logits: Tensor = self.head(self.conv3(x).mean((2, 3)))
        return logits


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    **{name: case for name, case in MODELS.items() if case[1] in (text_batch, image_batch)},
    "llama": (Llama, text_batch),
    "dropped": (Dropped, text_batch),
    "silu": (Silu, image_batch),
}


def workload(name: str) -> mt.Workload:
    model, batch = CASES[name]
    return mt.Workload(model, batch, loss, batch_size=BATCH)


@pytest.fixture(scope="module", name="profiles")
def _profiles() -> dict[str, Profile]:
    options = [mt.LayerSettings(level=level) for level in LEVELS]
    return {name: mt.profile(workload(name), options=options, seeds=4) for name in CASES}


def measured(work: mt.Workload, policy: mt.Policy, batch_size: int) -> Any:
    def compressed_loss(model: nn.Module, batch: Any) -> Tensor:
        with mt.compress_saved(policy, seed=0):
            return work.compute_loss(model, batch)

    model = mt.convert(work.build(), policy, seed=0)
    return measure_step(model, work.make_batch(batch_size), compressed_loss, work.make_optimizer(model))


@pytest.mark.parametrize("batch_size", [BATCH, BATCH // 2, 24], ids=["profiled", "half", "other"])
@pytest.mark.parametrize("name", CASES)
def test_predicted_bytes_are_those_of_a_real_step(
    profiles: dict[str, Profile], name: str, batch_size: int
) -> None:
    predicted = profiles[name].predict(DERIVE, batch_size=batch_size)
    found = measured(workload(name), DERIVE, batch_size)
    # A bit per row of a linear layer's input, in whole bytes: not quite on a line between two batch sizes.
    assert predicted.saved_bytes == pytest.approx(found.saved_bytes, abs=8)
    assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=0.05)


@pytest.mark.parametrize("name", CASES)
def test_deriving_keeps_less_than_quantizing(profiles: dict[str, Profile], name: str) -> None:
    derived, stored = (
        profiles[name].predict(one) for one in (DERIVE, mt.Policy.uniform(level=16, group_size=64))
    )
    assert derived.saved_bytes < stored.saved_bytes


def test_only_layers_that_ask_derive(profiles: dict[str, Profile]) -> None:
    rules = "# mesa-tune policy 1\non fc gelu layernorm:\n    by_index: all\n    level: 16\n"
    rules += "\non fc:\n    by_name: blocks.*.fc1\n    store: derive\n"
    policy = mt.Policy.parse(rules)
    found = measured(workload("transformer"), policy, BATCH)
    assert profiles["transformer"].predict(policy).saved_bytes == found.saved_bytes


@pytest.mark.parametrize("layers", [("silu.0",), ("conv2",), ("silu.0", "conv2")], ids="-".join)
def test_an_activation_derives_its_input_only_for_others(
    profiles: dict[str, Profile], layers: tuple[str, ...]
) -> None:
    four, derive = mt.LayerSettings(level=16), mt.LayerSettings(level=16, store="derive")
    policy = mt.Policy.from_assignments(
        (layer.tag, layer.index, layer.name, derive if layer.name in layers else four)
        for layer in profiles["silu"].layers
    )
    found = measured(workload("silu"), policy, BATCH)
    assert profiles["silu"].predict(policy).saved_bytes == found.saved_bytes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_where_only_parts_of_a_chain_derive_bytes_are_those_of_a_real_step(
    profiles: dict[str, Profile], name: str, seed: int
) -> None:
    draw = random.Random(seed)

    def settings() -> mt.LayerSettings:
        level, store = 2 ** draw.randint(1, 8), draw.choice(("exact", "quantize", "derive", "derive"))
        return mt.LayerSettings(level=level, group_size=WIDTH, store=store)

    # Hooks share a copy with a layer of their own 8 bits, which no traced step shows: without them.
    policy = mt.Policy.from_assignments(
        (layer.tag, layer.index, layer.name, EXACT if layer.tag == "other" else settings())
        for layer in profiles[name].layers
    )
    found = measured(workload(name), policy, BATCH)
    assert profiles[name].predict(policy).saved_bytes == pytest.approx(found.saved_bytes, abs=8)


def test_without_the_producer_a_layer_stores(profiles: dict[str, Profile]) -> None:
    policy = mt.Policy.parse(
        "# mesa-tune policy 1\non fc:\n    by_index: all\n    level: 16\n    store: derive\n"
    )
    found = measured(workload("transformer"), policy, BATCH)
    assert profiles["transformer"].predict(policy).saved_bytes == found.saved_bytes


def test_a_profile_file_says_who_derives(profiles: dict[str, Profile], tmp_path: Path) -> None:
    profiles["transformer"].save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == profiles["transformer"]
    sources = {item.layers: item.sources for item in loaded.timeline.kept if item.sources}
    assert sources["blocks.0.fc1",] == ("blocks.0.norm2",)
    assert sources["blocks.0.q", "blocks.0.k", "blocks.0.v"] == ("blocks.0.norm",)


def test_a_timeline_of_before_derives_nothing(profiles: dict[str, Profile]) -> None:
    values = profiles["transformer"].timeline.to_dict()
    values["slots"] = [{k: v for k, v in slot.items() if k != "derived"} for slot in values["slots"]]
    values["kept"] = [{k: v for k, v in item.items() if k != "sources"} for item in values["kept"]]
    older = Timeline.from_dict(values)
    names = [layer.name for layer in profiles["transformer"].layers]
    both = [dict.fromkeys(names, mt.LayerSettings(level=16, store=store)) for store in ("derive", "quantize")]
    assert older.saved_bytes(both[0]) == older.saved_bytes(both[1])


def test_gradients_of_the_batch_are_not_disturbed_by_looking(profiles: dict[str, Profile]) -> None:
    """The step that shows who derives leaves no gradients and no random numbers behind."""
    state = torch.get_rng_state()
    work = workload("transformer")
    model = work.build()
    kept = mt.Workload(lambda: model, text_batch, loss, batch_size=BATCH)
    mt.profile(kept, options=[])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert F.mse_loss(torch.get_rng_state().float(), state.float()) == 0


def joint_error(work: mt.Workload, policy: mt.Policy, seeds: int = 16) -> float:
    """The mean over batches, with two rounding seeds each."""
    pairs = [(number // 2, number) for number in range(seeds)]
    return statistics.fmean(JointError(work).errors(policy, pairs))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_the_error_of_all_that_derives_is_that_of_whole_backwards(
    profiles: dict[str, Profile], name: str, level: int
) -> None:
    policy = mt.Policy.uniform(level=level, store="derive")
    predicted, found = profiles[name].predict(policy).gradient_error, joint_error(workload(name), policy)
    assert predicted is not None
    assert found / 1.5 < predicted < found * 1.5


def test_the_error_of_a_real_vision_transformer_that_derives() -> None:
    work = mt.Workload.load(DIGITS, batch_size=4)
    profile = mt.profile(work, options=[FOUR], seeds=1)
    policy = mt.Policy.uniform(level=16, store="derive")
    predicted, found = profile.predict(policy).gradient_error, joint_error(work, policy, 4)
    assert predicted is not None
    assert found / 1.5 < predicted < found * 1.5
    assert len(profile.derivations) == 18


def only(profile: Profile, one: Derivation, settings: mt.LayerSettings) -> mt.Policy:
    """One derivation takes place, and everything else stores exactly."""
    ways = dict.fromkeys(one.layers, settings) | dict.fromkeys(one.takers, replace(settings, store="derive"))
    return mt.Policy.from_assignments(
        (layer.tag, layer.index, layer.name, ways.get(layer.name, EXACT)) for layer in profile.layers
    )


@pytest.mark.parametrize("level", [4, 16])
@pytest.mark.parametrize("name", ["transformer", "class token"])
def test_each_price_is_that_of_whole_backwards(profiles: dict[str, Profile], name: str, level: int) -> None:
    settings = mt.LayerSettings(level=level)
    for one in profiles[name].derivations:
        policy = only(profiles[name], one, settings)
        errors = one.errors(settings)
        assert errors is not None
        predicted = statistics.fmean(errors)
        assert profiles[name].predict(policy).gradient_error == pytest.approx(predicted)
        assert predicted == pytest.approx(joint_error(workload(name), policy, 16), rel=0.5), one.layers


@pytest.mark.parametrize("name", ["transformer", "class token"])
def test_prices_of_derivations_follow_the_group_size(name: str) -> None:
    small, large = (mt.LayerSettings(level=16, group_size=size) for size in (256, 1024))
    profile, joint = mt.profile(workload(name), options=[small, large], seeds=3), JointError(workload(name))
    pairs = [(1, seed) for seed in range(8)] + [(2, seed) for seed in range(8)]
    assert profile.derivations
    for one in profile.derivations:
        few, many = (only(profile, one, settings) for settings in (small, large))
        predicted = [profile.predict(policy).gradient_error or 0.0 for policy in (few, many)]
        found = [statistics.fmean(joint.errors(policy, pairs)) for policy in (few, many)]
        assert predicted[1] / predicted[0] == pytest.approx(found[1] / found[0], rel=0.15), one.layers


def test_what_is_priced_together(profiles: dict[str, Profile]) -> None:
    found = {one.layers: (one.takers, one.sources) for one in profiles["llama"].derivations}
    way = ("body.1.silu.0", "body.1.mul.2")
    assert found["body.1.silu.0",] == found["body.1.mul.2",] == (("body.1.mul.2", "body.1.down"), way)
    convolutions = {one.layers: (one.takers, one.sources) for one in profiles["convolutions"].derivations}
    assert convolutions["bn1",] == (("conv2",), ("relu", "bn1"))
    names = [name for one in profiles["transformer"].derivations for name in one.takers]
    assert not [name for name in names if "matmul" in name or "softmax" in name]


def test_layers_that_derive_only_err_by_what_is_stored(profiles: dict[str, Profile]) -> None:
    profile = profiles["transformer"]
    stored = {"blocks.0.norm2": FOUR, "blocks.0.fc1": replace(FOUR, store="derive")}
    alone = profile.gradient_error({"blocks.0.norm2": FOUR})
    both = profile.gradient_error(stored)
    assert alone is not None
    assert both is not None
    coarse = profile.gradient_error(stored | {"blocks.0.fc1": replace(FOUR, level=4, store="derive")})
    assert alone < both == coarse
    parted = profile.gradient_error({**stored, "blocks.0.norm2": EXACT})
    assert parted == profile.gradient_error({"blocks.0.fc1": FOUR})


def test_a_profile_of_before_has_no_derivations(profiles: dict[str, Profile], tmp_path: Path) -> None:
    profiles["llama"].save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profiles["llama"]
    values = json.loads((tmp_path / "profile.json").read_text("utf-8"))
    del values["derivations"]
    assert Profile.from_dict(values).derivations == ()


def test_derivations_go_on_in_proportion_to_the_errors_of_their_layers() -> None:
    own = [(1.0, 3.0, 4.0), (1.0, 1.0, 6.0)]
    assert continued((1.0, 2.0), own) == pytest.approx((1.0, 2.0, 5.0))
    assert continued((1.0, 2.0), [(0.0, 0.0, 0.0)]) == (1.0, 2.0, 1.5)
