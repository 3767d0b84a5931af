"""`store: derive` in profiles: what is predicted beside what is measured."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mesa_tune as mt
from mesa_tune.measure.errors.derivation import continued
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.profiles.entries import Derivation, Option
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.memory_model import Timeline
from tests.builders import known, mean_error, workload
from tests.measure.by_hand import OwnByHand, flat
from tests.measure.models import BATCH, CHAINS, DIGITS, WIDTH, profile_of, text_batch, workload_of
from tests.step_memory import assigned, measured

pytestmark = pytest.mark.usefixtures("without_variants")

# Groups as wide as the rows, with which norms composed by hand store what they keep.
DERIVE = mt.Policy.uniform(level=16, group_size=64, store="derive")
FOUR, EXACT = mt.LayerSettings(level=16), mt.LayerSettings(enable=False)
SIZES = {"transformer": (BATCH, 24), "llama": (BATCH // 2,), "silu": (BATCH // 2, 24)}


@pytest.mark.parametrize(
    ("name", "batch_size"), [(name, size) for name in CHAINS for size in SIZES.get(name, (24,))]
)
def test_predicted_bytes_are_those_of_a_real_step(name: str, batch_size: int) -> None:
    predicted = profile_of(name).predict(DERIVE, batch_size=batch_size)
    found = measured(workload_of(name), DERIVE, batch_size)
    # A bit per row of a linear layer's input, in whole bytes: not quite on a line between two batch sizes.
    assert predicted.saved_bytes == pytest.approx(found.saved_bytes, abs=8)
    assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=0.05)
    stored = profile_of(name).predict(mt.Policy.uniform(level=16, group_size=64), batch_size=batch_size)
    assert predicted.saved_bytes < stored.saved_bytes


ALL_OF = "# mesa-tune policy 1\non {}:\n    by_index: all\n    level: 16\n"


@pytest.mark.parametrize(
    "rules",
    [
        ALL_OF.format("fc gelu layernorm") + "\non fc:\n    by_name: blocks.*.fc1\n    store: derive\n",
        ALL_OF.format("fc") + "    store: derive\n",
    ],
    ids=["only layers that ask derive", "without the producer a layer stores"],
)
def test_who_derives(rules: str) -> None:
    policy = mt.Policy.parse(rules)
    found = measured(workload_of("transformer"), policy)
    assert profile_of("transformer").predict(policy).saved_bytes == found.saved_bytes


@pytest.mark.parametrize("layers", [("silu.0",), ("conv2",), ("silu.0", "conv2")], ids="-".join)
def test_an_activation_derives_its_input_only_for_others(layers: tuple[str, ...]) -> None:
    derive = replace(FOUR, store="derive")
    policy = assigned(profile_of("silu"), lambda layer: derive if layer.name in layers else FOUR)
    found = measured(workload_of("silu"), policy)
    assert profile_of("silu").predict(policy).saved_bytes == found.saved_bytes


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CHAINS)
def test_where_only_parts_of_a_chain_derive_bytes_are_those_of_a_real_step(name: str, seed: int) -> None:
    draw = random.Random(seed)

    def settings() -> mt.LayerSettings:
        level, store = 2 ** draw.randint(1, 8), draw.choice(("exact", "quantize", "derive", "derive"))
        return mt.LayerSettings(level=level, group_size=WIDTH, store=store)

    # Hooks share a copy with a layer of their own 8 bits, which no traced step shows: without them.
    policy = assigned(profile_of(name), lambda layer: EXACT if layer.tag == "other" else settings())
    found = measured(workload_of(name), policy)
    assert profile_of(name).predict(policy).saved_bytes == pytest.approx(found.saved_bytes, abs=8)


def test_a_profile_file_says_who_derives(tmp_path: Path) -> None:
    profile_of("transformer").save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == profile_of("transformer")
    sources = {item.layers: item.sources for item in loaded.timeline.kept if item.sources}
    assert sources["blocks.0.fc1",] == ("blocks.0.norm2",)
    assert sources["blocks.0.q", "blocks.0.k", "blocks.0.v"] == ("blocks.0.norm",)


def test_a_timeline_of_before_derives_nothing() -> None:
    values = profile_of("transformer").timeline.to_dict()
    values["slots"] = [{k: v for k, v in slot.items() if k != "derived"} for slot in values["slots"]]
    values["kept"] = [{k: v for k, v in item.items() if k != "sources"} for item in values["kept"]]
    older = Timeline.from_dict(values)
    names = [layer.name for layer in profile_of("transformer").layers]
    both = [dict.fromkeys(names, mt.LayerSettings(level=16, store=store)) for store in ("derive", "quantize")]
    assert older.saved_bytes(both[0]) == older.saved_bytes(both[1])


def test_gradients_of_the_batch_are_not_disturbed_by_looking() -> None:
    """The step that shows who derives leaves no gradients and no random numbers behind."""
    state = torch.get_rng_state()
    model = workload_of("dropped").build()
    assert mt.profile(workload(lambda: model, text_batch), options=[]).timeline.kept
    assert all(parameter.grad is None for parameter in model.parameters())
    assert F.mse_loss(torch.get_rng_state().float(), state.float()) == 0


@cache
def joint(name: str) -> JointError:
    return JointError(workload_of(name))


def joint_error(name: str, policy: mt.Policy) -> float:
    """The mean over batches, with two rounding seeds each."""
    return mean_error(joint(name), policy, [(number // 2, number) for number in range(16)])


@cache
def own_of(name: str) -> OwnByHand:
    """The own noise of the parameters, from 32 batches."""
    table = torch.stack([flat(joint(name).gradients(mt.Policy(()), draw, 0)[0]) for draw in range(32)])
    return OwnByHand(joint(name).model, table)


def joint_ratio(name: str, policy: mt.Policy) -> float:
    """The mean noise ratio over batches, with two rounding seeds each."""
    pairs = [joint(name).gradients(policy, number // 2, number) for number in range(8)]
    return own_of(name).mean_ratio(torch.stack([flat(changed) - flat(exact) for exact, changed in pairs]))


@pytest.mark.parametrize(
    ("name", "level"), [(name, 16) for name in CHAINS] + [("llama", 4), ("transformer", 256)]
)
def test_the_error_of_all_that_derives_is_that_of_whole_backwards(name: str, level: int) -> None:
    policy = mt.Policy.uniform(level=level, store="derive")
    predicted, found = profile_of(name).predict(policy).gradient_noise_ratio, joint_ratio(name, policy)
    assert found / 1.5 < known(predicted) < found * 1.5


@pytest.mark.slow("sweep")
def test_the_error_of_a_real_vision_transformer_that_derives() -> None:
    work = mt.Workload.load(DIGITS, batch_size=4)
    profile = mt.profile(work, options=[FOUR], seeds=1)
    policy = mt.Policy.uniform(level=16, store="derive")
    found = mean_error(JointError(work), policy, [(number // 2, number) for number in range(4)])
    predicted = profile.predict(policy).gradient_error
    assert found / 1.5 < known(predicted) < found * 1.5
    assert len(profile.derivations) == 18


def only(profile: Profile, one: Derivation, settings: mt.LayerSettings) -> mt.Policy:
    """One derivation takes place, and everything else stores exactly."""
    ways = dict.fromkeys(one.layers, settings) | dict.fromkeys(one.takers, replace(settings, store="derive"))
    return assigned(profile, lambda layer: ways.get(layer.name, EXACT))


@pytest.mark.parametrize(("name", "level"), [("transformer", 4), ("class token", 16)])
def test_each_price_is_that_of_whole_backwards(name: str, level: int) -> None:
    settings = mt.LayerSettings(level=level)
    for one in profile_of(name).derivations:
        policy = only(profile_of(name), one, settings)
        price = known(one.like(settings))
        assert profile_of(name).noise_ratio(profile_of(name).assignment(policy)) == pytest.approx(
            price.noise_ratio
        )
        predicted = known(profile_of(name).predict(policy).gradient_error)
        assert predicted == pytest.approx(price.gradient_error)
        assert predicted == pytest.approx(joint_error(name, policy), rel=0.5), one.layers


def test_prices_of_derivations_follow_the_group_size() -> None:
    small, large = (mt.LayerSettings(level=16, group_size=size) for size in (256, 1024))
    profile = mt.profile(workload_of("transformer"), options=[small, large], seeds=3)
    pairs = [(draw, seed) for draw in (1, 2) for seed in range(4)]
    assert profile.derivations
    for one in profile.derivations:
        few, many = (only(profile, one, settings) for settings in (small, large))
        predicted = [profile.predict(policy).gradient_error or 0.0 for policy in (few, many)]
        found = [mean_error(joint("transformer"), policy, pairs) for policy in (few, many)]
        assert predicted[1] / predicted[0] == pytest.approx(found[1] / found[0], rel=0.15), one.layers


def test_what_is_priced_together() -> None:
    found = {one.layers: (one.takers, one.sources) for one in profile_of("llama").derivations}
    way = ("body.1.silu.0", "body.1.mul.2")
    assert found["body.1.silu.0",] == found["body.1.mul.2",] == (("body.1.mul.2", "body.1.down"), way)
    convolutions = {one.layers: (one.takers, one.sources) for one in profile_of("convolutions").derivations}
    assert convolutions["bn1",] == (("conv2",), ("relu", "bn1"))
    names = [name for one in profile_of("transformer").derivations for name in one.takers]
    assert not [name for name in names if "matmul" in name or "softmax" in name]


def test_layers_that_derive_only_err_by_what_is_stored() -> None:
    profile = profile_of("transformer")
    stored = {"blocks.0.norm2": FOUR, "blocks.0.fc1": replace(FOUR, store="derive")}
    alone = known(profile.noise_ratio({"blocks.0.norm2": FOUR}))
    both = known(profile.noise_ratio(stored))
    coarse = profile.noise_ratio(stored | {"blocks.0.fc1": replace(FOUR, level=4, store="derive")})
    assert alone < both == coarse
    parted = profile.noise_ratio({**stored, "blocks.0.norm2": EXACT})
    assert parted == profile.noise_ratio({"blocks.0.fc1": FOUR})


def test_a_profile_of_before_has_no_derivations() -> None:
    values = json.loads(json.dumps(profile_of("llama").to_dict()))
    assert Profile.from_dict(values) == profile_of("llama")
    del values["derivations"]
    assert Profile.from_dict(values).derivations == ()


def test_derivations_go_on_in_proportion_to_the_errors_of_their_layers() -> None:
    own = [(1.0, 3.0, 4.0), (1.0, 1.0, 6.0)]
    option = Option(FOUR, 10, 0.1, 0.3, (1.0, 2.0), True, 0.0, 0.0, screened=False)
    found = continued(option, own)
    assert found.ratios == pytest.approx((1.0, 2.0, 5.0))
    assert found.gradient_error == pytest.approx(0.3 * (8 / 3) / 1.5)  # in proportion to the mean ratio
    without = continued(option, [(0.0, 0.0, 0.0)])
    assert (without.ratios, without.gradient_error) == ((1.0, 2.0, 1.5), 0.3)
