"""A profile against steps that are really run: bytes, peaks, gradient errors, and what it leaves behind."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiles.entries import LayerEntry, Option, fast_grid
from mesa_tune.profiles.profile import Profile
from tests.builders import cross_entropy, known, mean, policy_of, workload
from tests.measure import models
from tests.measure.models import BATCH, MODELS, SEEDS, WIDTH, profile_of, workload_of
from tests.step_memory import assigned, measured

pytestmark = pytest.mark.usefixtures("without_variants")

INPUT_BYTES = BATCH * models.TOKENS * WIDTH * 4


def policies(profile: Profile) -> dict[str, mt.Policy]:
    chance = random.Random(0)
    finest = mt.LayerSettings(level=256, group_size=64)
    ways = [mt.LayerSettings(enable=False), mt.LayerSettings(level=4), finest]
    tied = {name: tie.layers[0] for tie in profile.ties for name in tie.layers}
    chosen = {tied.get(layer.name, layer.name): chance.choice(ways) for layer in profile.layers}
    return {
        "plain": mt.Policy.parse(""),
        "uniform 16": mt.Policy.uniform(level=16),
        "mixed": assigned(profile, lambda layer: chosen[tied.get(layer.name, layer.name)]),
    }


@pytest.mark.parametrize(
    ("name", "kind", "batch_size"),
    [
        *((name, "mixed", 24) for name in MODELS),
        *((name, "uniform 16", BATCH) for name in MODELS),
        ("transformer", "plain", 24),
        ("convolutions", "plain", BATCH),
        ("convolutions", "uniform 16", 24),
        ("reused", "mixed", BATCH),
    ],
)
def test_predicted_bytes_are_those_of_a_real_step(name: str, kind: str, batch_size: int) -> None:
    policy = policies(profile_of(name))[kind]
    found = measured(workload_of(name), policy, batch_size)
    predicted = profile_of(name).predict(policy, batch_size=batch_size)
    assert predicted.saved_bytes == pytest.approx(found.saved_bytes, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=0.05)


def is_that_of_whole_backwards(
    error: float | None, name: str, profile: Profile, layers: tuple[str, ...], settings: mt.LayerSettings
) -> bool:
    """Whether storing these layers alone has that gradient error, a mean of all `SEEDS` draws but the first.

    Here each draw is one whole forward and backward, on another batch. Chance may do three standard errors of
    the two means.
    """
    draws = errors_of_draws(name, profile, layers, settings)
    chance = 3 * statistics.stdev(draws) * math.sqrt(1 / (SEEDS - 1) + 1 / len(draws))
    middle = statistics.mean(draws)
    return error is not None and middle / 1.25 - chance < error < middle * 1.25 + chance


def errors_of_draws(
    name: str, profile: Profile, layers: tuple[str, ...], settings: mt.LayerSettings
) -> list[float]:
    """The gradient errors on 16 batches, each with a rounding seed of its own."""
    exact_settings = mt.LayerSettings(enable=False)
    policy = assigned(profile, lambda layer: settings if layer.name in layers else exact_settings)
    errors = []
    for draw in range(16):
        exact = gradient(name, draw)
        difference = gradient(name, draw, policy) - exact
        errors.append((difference.square().sum() / exact.square().sum()).item())
    return errors


@cache
def gradient(name: str, draw: int, policy: mt.Policy | None = None) -> Tensor:
    work = workload_of(name)
    model, batch = work.build(), work.make_batch(draw=draw)
    if policy is None:
        work.compute_loss(model, batch).backward()
    else:
        mt.convert(model, policy, seed=draw, force=True)
        with mt.compress_saved(policy, seed=draw):
            value = work.compute_loss(model, batch)
        value.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def cases(profile: Profile, count: int) -> list[tuple[tuple[str, ...], mt.LayerSettings, float]]:
    """Random ties (or layers alone) and options, each with the profile's own error."""
    chance = random.Random(1)
    tied = {name: tie for tie in profile.ties for name in tie.layers}
    found: list[tuple[tuple[str, ...], mt.LayerSettings, float]] = []
    pool = [layer for layer in profile.layers if any(option.gradient_error for option in layer.options)]
    while len(found) < count:
        layer = chance.choice(pool)
        names = tied[layer.name].layers if layer.name in tied else (layer.name,)
        option = chance.choice([option for option in layer.options if option.gradient_error])
        error = known(profile.predict_assignment(dict.fromkeys(names, option.settings)).gradient_error)
        found.append((names, option.settings, error))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_gradient_errors_are_those_of_whole_backwards(name: str) -> None:
    profile = profile_of(name)
    for layers, settings, error in cases(profile, 6):
        assert is_that_of_whole_backwards(error, name, profile, layers, settings), (layers, settings.label)


def test_layers_stored_by_hooks_have_the_errors_of_whole_backwards() -> None:
    profile = profile_of("convolutions")
    hooked = [layer for layer in profile.layers if layer.tag == "other" and len(layer.options) > 1]
    assert hooked
    for layer in hooked:
        settings, error = layer.options[0].settings, layer.options[0].gradient_error
        assert is_that_of_whole_backwards(error, "convolutions", profile, (layer.name,), settings), layer.name


@pytest.mark.parametrize(
    "options", [{"level": 64, "group_size": 64}, {"level": 16, "group_size": None, "quant_groups": 4}]
)
def test_options_without_a_reference_among_them_have_errors_too(options: dict[str, Any]) -> None:
    settings = mt.LayerSettings(**options)
    profile = mt.profile(workload_of("reused"), options=[settings], seeds=SEEDS)
    for name in ("act", "norm"):
        error = profile.predict_assignment({name: settings}).gradient_error
        assert is_that_of_whole_backwards(error, "reused", profile, (name,), settings)


@pytest.mark.parametrize("name", MODELS)
def test_own_bytes_sum_to_the_saved_bytes(name: str) -> None:
    profile = profile_of(name)
    assert sum(layer.own_bytes for layer in profile.layers) == profile.saved_bytes
    assert sum(tensor.bytes for tensor in profile.tensors) == profile.saved_bytes


def test_layers_of_one_input_are_tied_and_own_it_once() -> None:
    layers = {layer.name: layer for layer in profile_of("transformer").layers}
    assert layers["blocks.0.q"].own_bytes == INPUT_BYTES
    assert layers["blocks.0.k"].own_bytes == layers["blocks.0.v"].own_bytes == 0
    assert set(layers["blocks.0.q"].shared_with) == {"blocks.0.k", "blocks.0.v"}
    assert "blocks.0.softmax.0" in layers["blocks.0.matmul.1"].shared_with


def test_a_layer_that_runs_twice_is_one_row_with_both_inputs_and_branches_share_theirs() -> None:
    layers = {layer.name: layer for layer in profile_of("reused").layers}
    assert layers["twice"].bytes == 2 * INPUT_BYTES
    assert [layer.name for layer in profile_of("reused").layers].count("twice") == 1
    assert layers["gelu.0"].tag == "gelu"
    assert layers["left"].shared_with == ("right",)


def stateful() -> nn.Module:
    """Batch statistics that a forward changes, and dropout that draws random numbers."""
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
    return nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), last)


def rows(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, WIDTH), torch.randint(0, 10, (n,))


def state_of(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers and gradients."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.state_dict().values(), *gradients]


def test_everything_is_afterwards_bit_for_bit_as_before() -> None:
    model = stateful().train()
    optimizer = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(torch.randn(99, WIDTH)), torch.zeros(99, dtype=torch.long)).backward()
    optimizer.step()
    before = [tensor.detach().clone() for tensor in state_of(model)]
    state = {k: v.clone() for k, v in optimizer.state_dict()["state"][0].items()}
    dice = torch.get_rng_state()
    work = workload(lambda: model, rows, batch_size=99, optimizer=lambda parameters: optimizer)
    mt.profile(work, options=[mt.LayerSettings(level=4)], seeds=1)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model), strict=True))
    assert all(torch.equal(state[k], v) for k, v in optimizer.state_dict()["state"][0].items())
    assert torch.equal(dice, torch.get_rng_state())
    assert "forward" not in model.__dict__


def test_a_converted_model_goes_on_as_if_it_had_not_been_profiled() -> None:
    policy = policy_of("on fc:\n    by_index: all\n    level: 16\n    ema_decay: 0.9\n")
    batch = rows(99)

    def gradients(profiles: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = mt.convert(stateful().train(), policy, seed=0)
        for step in range(3):
            if profiles and step == 2:
                work = workload(lambda: model, lambda n: batch, batch_size=99)
                mt.profile(work, options=[mt.LayerSettings(level=4)], seeds=1)
            model.zero_grad()
            cross_entropy(model, batch).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_an_interrupted_profile_is_whole_and_taken_up_again(tmp_path: Path) -> None:
    path, work = tmp_path / "profile.json", workload_of("class token")
    two = [mt.LayerSettings(level=level) for level in (4, 16)]
    seen: list[str] = []

    def stop(text: str, share: float) -> None:
        seen.extend([text] * ("first batch" in text))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mt.profile(work, options=two, seeds=1, path=path, progress=stop)
    partial = Profile.load(path)
    done = [layer.name for layer in partial.layers if layer.options]
    assert partial.partial
    assert 0 < len(done) < len(partial.layers)
    again: list[str] = []
    note = lambda text, _: again.append(text)  # noqa: E731
    whole = mt.profile(work, options=two, seeds=1, path=path, progress=note)
    assert not whole.partial
    assert all(layer.options for layer in whole.layers)
    left = [unit for unit in seen_units(whole) if not set(unit) <= set(done)]
    assert len([text for text in again if "first batch" in text]) == len(left)
    # In the end prices are calibrated, by a factor for each number of bits.
    before, after = (untimed(each.layer(done[0])) for each in (partial, whole))
    factors = [b.ratios[0] / a.ratios[0] if a.ratios[0] else 1.0 for a, b in zip(before, after, strict=True)]
    for one, factor, other in zip(before, factors, after, strict=True):
        scaled = one.times(factor)
        assert scaled.ratios == pytest.approx(other.ratios)
        assert scaled.gradient_error == pytest.approx(other.gradient_error)
        assert scaled == replace(other, ratios=scaled.ratios, gradient_error=scaled.gradient_error)
    assert Profile.load(path) == whole


def untimed(layer: LayerEntry) -> list[Option]:
    return [replace(option, encode_ms=0.0, decode_ms=0.0) for option in layer.options]


def seen_units(profile: Profile) -> list[tuple[str, ...]]:
    tied = {name: tie.layers for tie in profile.ties for name in tie.layers}
    return list(dict.fromkeys(tied.get(layer.name, (layer.name,)) for layer in profile.layers))


def test_bytes_only() -> None:
    profile = mt.profile(workload_of("class token"), options=[])
    predicted = profile.predict(mt.Policy.uniform(level=16))
    assert predicted.gradient_error is None
    assert 0 < predicted.saved_bytes < 0.2 * profile.saved_bytes


def test_a_batch_that_does_not_fit_is_halved_and_said() -> None:
    def batch(n: int) -> tuple[Tensor, Tensor]:
        if n > 6:
            raise MemoryError
        return models.text_batch(n)

    profile = mt.profile(workload(models.reused, batch, batch_size=16), options=[])
    assert profile.batch_size == 4
    assert profile.notes == ("out of memory at batch size 16: profiled at 4 instead",)


def test_not_even_one_sample_fits() -> None:
    def batch(n: int) -> tuple[Tensor, Tensor]:
        raise MemoryError

    with pytest.raises(mt.RunError, match="batch size 1"):
        mt.profile(workload(models.reused, batch, batch_size=4), options=[])


def test_options_say_whether_they_were_measured() -> None:
    """Of so many layers, each later batch measures a half."""
    model = lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(18)))  # noqa: E731
    work = workload(model, lambda n: torch.randn(n, WIDTH), mean, batch_size=128)
    layers = mt.profile(work, options=fast_grid(), seeds=2).layers
    first, second = (
        {option.settings.bits: option.measured for option in layer.options[:-1]} for layer in layers[:2]
    )
    assert first == {1: True, 2: True, 3: True, 4: True, 6: False, 8: False}  # one above 2 bits on each batch
    assert second == {1: True, 2: True, 3: False, 4: True, 6: False, 8: False}  # it was not its turn
    assert layers[0].options[-1].settings.exact
