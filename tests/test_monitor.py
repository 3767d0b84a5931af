"""`mt.Monitor`: gradient error and noise ratio measured in a training, which goes on as without it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mesa_tune as mt
from mesa_tune.codecs import Spec, quantize
from mesa_tune.conversion.model import conversion_of
from mesa_tune.measure.errors.sampled import slice_size
from tests.builders import BatchNormMLP, conversion, cross_entropy, known, no_trace, workload

Batch = tuple[Tensor, Tensor]
SIZE, TOKENS, WIDTH, CLASSES = 32, 16, 32, 10
GROUPS_OF_SECOND = mt.Policy.uniform(level=16).with_settings(
    "fc", ["second"], mt.LayerSettings(level=16, group_size=32)
)


class LayerNormMLP(BatchNormMLP):
    """The same with layer norm: a sample's gradient does not depend on the others of its batch."""

    def __init__(self) -> None:
        super().__init__(TOKENS)
        self.norm = nn.LayerNorm(64)


LINEAR = mt.Policy.parse("# mesa-tune policy 1\non fc:\n    by_index: all\n    level: 16\n")


def draw(size: int = SIZE) -> Batch:
    labels = torch.randint(0, CLASSES, (size,))
    return torch.randn(size, TOKENS, WIDTH) + F.one_hot(labels, WIDTH).unsqueeze(1), labels


def made(kind: Callable[[], nn.Module] = LayerNormMLP, level: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return mt.convert(kind(), mt.Policy.uniform(level=level), seed=1)


def trained(
    model: nn.Module, steps: int, watch: Callable[[Batch], object] | None = None
) -> tuple[list[float], torch.optim.Optimizer]:
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for _ in range(steps):
        batch = draw()
        optimizer.zero_grad()
        value = cross_entropy(model, batch)
        value.backward()
        optimizer.step()
        if watch is not None:
            watch(batch)
        values.append(value.item())
    return values, optimizer


def test_readings_are_those_of_verify() -> None:
    model = made(level=4)
    state = copy.deepcopy(model.state_dict())

    def build() -> nn.Module:
        fresh = LayerNormMLP()
        fresh.load_state_dict(state)
        return fresh

    monitor = mt.Monitor(model, cross_entropy, every=1, limit=1e3)
    readings = [monitor.step(draw()) for _ in range(8)]
    verified = mt.verify(workload(build, draw, batch_size=SIZE), mt.Policy.uniform(level=4))
    inside = 0
    for reading in map(known, readings):
        least, most = known(reading.noise_ratio_interval)
        inside += least < known(verified.gradient_noise_ratio) < most
        assert most < 8 * least
        least, most = known(reading.gradient_error_interval)
        inside += least < known(verified.gradient_error) < most
    assert inside >= 14  # 93 % intervals


def test_training_goes_on_bit_for_bit() -> None:
    results = []
    for watched in (False, True):
        model = made(partial(BatchNormMLP, TOKENS))
        monitor = mt.Monitor(model, cross_entropy, every=2)
        values, optimizer = trained(model, 6, monitor.step if watched else None)
        assert len(monitor.history) == (3 if watched else 0)
        parameters = [*model.state_dict().values(), *(parameter.grad for parameter in model.parameters())]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        noise = mt.state_dict(model)["conversions"][""]["key"]
        results.append((values, [*parameters, *moments, noise, torch.get_rng_state()]))
    (values, tensors), (others, other_tensors) = results
    assert values == others
    assert all(map(torch.equal, tensors, other_tensors))


@pytest.mark.slow("compile")
def test_a_compiled_training_goes_on_without_compiling_again() -> None:
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(TOKENS * WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        model: Any = torch.compile(mt.convert(net, LINEAR), backend="eager")
        monitor = mt.Monitor(model, cross_entropy, every=2)
        watch = monitor.step if watched else None
        values = trained(model, 2, watch)[0]
        with torch.compiler.set_stance("fail_on_recompile"):
            values += trained(model, 2, watch)[0]
        results.append(values)
        assert len(monitor.history) == (2 if watched else 0)
    assert results[0] == results[1]


def test_gradients_and_their_hooks_are_left_alone() -> None:
    model, scale = made(), nn.Parameter(torch.ones(()))
    calls: list[object] = []

    def scaled(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(scale * model(batch[0]), batch[1])

    scaled(model, draw()).backward()
    parameters, batch = [*model.parameters(), scale], draw()
    handles = [parameter.register_post_accumulate_grad_hook(calls.append) for parameter in parameters]
    with no_trace(nn.ParameterList(parameters)), no_trace(model):
        assert mt.Monitor(model, scaled, every=1).step(batch) is not None
    assert not calls
    scaled(model, batch).backward()
    assert len(calls) == len(handles)


def test_a_high_ratio_warns_once_per_crossing() -> None:
    model = made(level=2)
    monitor = mt.Monitor(model, cross_entropy, every=1, limit=0.0123)
    with pytest.warns(UserWarning, match=r"at step 1 the gradient noise ratio is .*above the limit of 0.012"):
        monitor.step(draw())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.step(draw())
        mt.convert(model, mt.Policy.parse(""))
        assert known(monitor.step(draw())).noise_ratio == 0
    mt.convert(model, mt.Policy.uniform(level=2))
    with pytest.warns(UserWarning, match="at step 4"):
        monitor.step(draw())


@pytest.mark.parametrize(("promised", "limit"), [("1.0e-05", "0.015"), ("4.0e-02", "0.12")])
def test_the_limit_is_three_times_that_of_a_search_or_of_the_policy(promised: str, limit: str) -> None:
    model = made(level=2)
    header = f"# mesa-tune policy 1\n# predicted: peak 1.0 MB, own noise ratio {promised}, step 1.1x\n"
    mt.convert(model, mt.Policy.parse(header + mt.Policy.uniform(level=2).dumps().split("\n", 1)[1]))
    with pytest.warns(UserWarning, match=f"above the limit of {limit}"):
        mt.Monitor(model, cross_entropy, every=1).step(draw())


def test_falling_back_to_exact_brings_the_ratio_below_the_limit() -> None:
    model = made(level=2)
    monitor = mt.Monitor(model, cross_entropy, every=1, limit=0.3, remedy="exact")
    with pytest.warns(UserWarning, match="now exact: .*; noise ratio after it"):
        after = monitor.step(draw())
    before, last = monitor.history
    assert last is after
    assert known(before.noise_ratio) > 0.3 >= known(last.noise_ratio) > 0
    cross_entropy(model, draw())
    tags = {name: tag for tag, _, name in conversion(model).catalog.layers()}
    assert all(conversion(model).policy.settings(tags[name], None, name).exact for name in last.exact)
    assert 0 < len(last.exact) < len(tags)


def test_a_retune_places_the_bits_again() -> None:
    model = made(level=2)
    retune = mt.Retune(model, cross_entropy, "80%")
    monitor = mt.Monitor(model, cross_entropy, every=1, limit=0.07, remedy=retune)
    with pytest.warns(UserWarning, match="the policy was searched again"):
        monitor.step(draw())
    before, after = monitor.history
    assert known(before.noise_ratio) > 0.07 > known(after.noise_ratio)
    assert conversion(model).policy == retune.policy


@pytest.mark.parametrize("remedy", [None, "exact"])
def test_a_codec_that_returns_nan_is_named(monkeypatch: pytest.MonkeyPatch, remedy: Any) -> None:
    model = mt.convert(made(), GROUPS_OF_SECOND)

    def broken(encode: Any, x: Tensor, spec: Spec, *arguments: Any) -> list[Tensor]:
        data, ranges, *zero_rows = encode(x, spec, *arguments)
        return [data, ranges * math.nan if spec.group_size == 32 else ranges, *zero_rows]

    for name in ("encode", "encode_rows"):
        monkeypatch.setattr(quantize, name, partial(broken, getattr(quantize, name)))
    monitor = mt.Monitor(model, cross_entropy, every=1, remedy=remedy)
    with pytest.warns(UserWarning, match="because of what these layers store: second"):
        monitor.step(draw())
    first = monitor.history[0]
    assert first.faulty == ("second",)
    assert first.gradient_error == first.noise_ratio == math.inf
    if remedy:
        last = monitor.history[1]
        assert last.exact == ("second",)
        assert 0 < known(last.gradient_error) < 1


def test_a_model_that_is_not_finite_is_not_blamed_on_a_codec() -> None:
    model = made()
    monitor = mt.Monitor(model, lambda m, b: cross_entropy(m, b) * math.nan, every=1, remedy="exact")
    with pytest.warns(UserWarning, match="not finite either: it is the model"):
        reading = monitor.step(draw())
    assert reading == mt.Reading(1, None, None, None, None)


def test_layers_of_the_loss_are_measured_where_it_compresses_them() -> None:
    torch.manual_seed(0)
    model = mt.convert(nn.Linear(32, 500), mt.Policy.parse(""))
    policy = mt.Policy.uniform(level=4)

    def compressed(model: nn.Module, batch: Batch) -> Tensor:
        with mt.compress_saved(policy):
            return cross_entropy(model, batch)

    batch = torch.randn(64, 32), torch.randint(0, 500, (64,))
    monitors = [mt.Monitor(model, each, every=1, samples=16) for each in (cross_entropy, compressed)]
    plain, lossy = (known(monitor.step(batch)) for monitor in monitors)
    assert plain.gradient_error == 0
    assert known(lossy.gradient_error) > 1e-6


def test_one_sample_has_an_error_and_no_noise() -> None:
    batch = torch.randn(1, 8 * TOKENS, WIDTH), torch.tensor([1])
    reading = known(mt.Monitor(made(), cross_entropy, every=1).step(batch))
    assert known(reading.gradient_error) > 0
    assert reading.noise_ratio is None
    assert (reading.gradient_error_interval, reading.noise_ratio_interval) == (None, None)


def test_slices_are_a_small_share_of_the_batch() -> None:
    for model, expected in (
        (LayerNormMLP(), {128: 4, 32: 2, 5: 1, 1: 1}),
        (BatchNormMLP(), {512: 16, 64: 8, 16: 4}),
    ):
        assert {size: slice_size(model, size) for size in expected} == expected
        assert all(slice_size(model.eval(), size) <= most for size, most in expected.items())


def test_bad_arguments() -> None:
    model = made()
    bad: dict[str, dict[str, Any]] = {
        "every >= 1": {"every": 0},
        "samples >= 1": {"samples": 0},
        "limit > 0": {"limit": 0},
        "remedy": {"remedy": "fix"},
    }
    for message, given in bad.items():
        with pytest.raises(ValueError, match=message):
            mt.Monitor(model, cross_entropy, **given)
    with pytest.raises(mt.RunError, match="it is not converted"):
        mt.Monitor(mt.revert(model), cross_entropy, every=1).step(draw())
    model = LayerNormMLP()
    mt.convert(model.first, mt.Policy.uniform(level=16))
    mt.convert(model.second, mt.Policy.uniform(level=16))
    with pytest.raises(mt.RunError, match="one by one"):
        mt.Monitor(model, cross_entropy, every=1).step(draw())


def test_a_converted_part_is_measured() -> None:
    torch.manual_seed(0)
    model = LayerNormMLP()
    mt.convert(model.second, mt.Policy.uniform(level=2))
    with pytest.warns(UserWarning, match="now exact: the converted module itself;"):
        reading = mt.Monitor(model, cross_entropy, every=1, limit=1e-5, remedy="exact").step(draw())
    assert known(reading).gradient_error == 0
    assert conversion_of(model.first) is None
