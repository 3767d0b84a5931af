"""A `Monitor` that solves its plan again, by prices corrected with what it read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.measure.memory.meter import Meter, gradients_of, tensors_in
from mesa_tune.profiles.own_noise import OwnNoise, ParameterNoise
from mesa_tune.search.again.correction import corrected, read_over_predicted
from mesa_tune.search.again.replan import Replan
from tests.builders import ViT, conversion, cross_entropy, images, known, workload

SIZE = 16
LEVELS = [mt.LayerSettings(level=level) for level in (2, 4, 16)]


def vit() -> nn.Module:
    torch.manual_seed(0)
    return ViT(depth=1)


@pytest.fixture(autouse=True)
def _each_warning_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_given", set())


@pytest.fixture(scope="module", name="profile")
def _profile() -> mt.Profile:
    """A profile with the same times for all layers: then no plan depends on what was measured."""
    measured = mt.profile(workload(vit, images, batch_size=SIZE), options=LEVELS, seeds=2)

    def timed(entry: Any, **ms: float) -> Any:
        each = [(option, 0.0 if option.settings.exact else 0.2) for option in entry.options]
        options = tuple([replace(option, encode_ms=time, decode_ms=time) for option, time in each])
        return replace(entry, options=options, **ms)

    tiled = measured.tiled
    return replace(
        measured,
        step_ms=100.0,
        routing_ms=5.0,
        overlap_ms=0.0,
        layers=tuple([timed(layer, call_ms=1.0) for layer in measured.layers]),
        derivations=tuple([timed(derivation, call_ms=1.0) for derivation in measured.derivations]),
        modules=tuple([timed(module, rerun_ms=20.0) for module in measured.modules]),
        tiled=tiled and replace(tiled, modules=tuple([timed(one, rerun_ms=10.0) for one in tiled.modules])),
    )


@pytest.fixture(name="run")
def _run(profile: mt.Profile, tmp_path: Path) -> Path:
    return searched(profile, tmp_path, "78%", max_noise_ratio=0.03)


def searched(profile: mt.Profile, folder: Path, budget: str, **options: Any) -> Path:
    profile.save(folder / "profile.json")
    mt.search_policy(profile, budget, trials=0, **options).save(folder / "plan.json")
    return folder


def converted(run: Path) -> nn.Module:
    return mt.convert(vit(), mt.Plan.load(run / "plan.json").policy, seed=1)


def grown(model: nn.Module) -> None:
    """Make the model's attention sharp: errors of q and k are then ten times as large beside their noise."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".q." in name or ".k." in name:
                parameter.mul_(6.0)
    torch.manual_seed(3)


def test_a_part_with_little_of_the_noise_has_the_factor_of_all_and_another_goes_halfway_to_it() -> None:
    noise = OwnNoise(tuple([ParameterNoise(name, 1000, 1.0) for name in "abcd"]))
    predicted = np.array([1.0, 0.99, 0.004, 0.006])
    read = np.array([7.0, 0.99, 0.002, 0.008])
    assert read_over_predicted(noise, predicted, read) == pytest.approx([28**0.5, 2.0, 4.0, 4.0])
    assert read_over_predicted(noise, predicted, 3 * predicted) == pytest.approx([3.0] * 4)


def test_corrected_prices_predict_what_was_read(profile: mt.Profile) -> None:
    policy, names = mt.Policy.uniform(level=4), [one.name for one in profile.parameters]
    before = known(profile.predict(policy).gradient_noise_ratio)
    doubled = corrected(profile, dict.fromkeys(names, 2.0))
    assert known(doubled.predict(policy).gradient_noise_ratio) == pytest.approx(2 * before)
    own = profile.own_ratios(policy)
    assert doubled.own_ratios(policy) == pytest.approx(2 * own)
    largest = int(own.argmax())
    one = corrected(profile, {names[largest]: 5.0}).own_ratios(policy)
    assert one[largest] == pytest.approx(5 * own[largest], rel=0.1)  # shares below 1 % are not known
    others = np.arange(len(names)) != largest
    assert one[others] == pytest.approx(own[others], rel=0.1)
    assert profile.predict(policy).worst_own_ratio == pytest.approx(own[largest])


def test_readings_are_after_50_steps_and_each_doubling(run: Path) -> None:
    monitor, due = mt.Monitor(converted(run), cross_entropy), []
    for step in range(1000):
        due += [step + 1] if monitor.is_next_due else []
        monitor.steps += 1
    assert due == [50, 100, 200, 400, 800]


def test_a_reading_that_has_outgrown_the_plan_solves_it_again_within_its_budget(
    profile: mt.Profile, run: Path
) -> None:
    plan, model = mt.Plan.load(run / "plan.json"), converted(run)
    monitor = mt.Monitor(model, cross_entropy, every=1, limit=0.02, remedy="plan", run=run)
    grown(model)
    with pytest.warns(UserWarning, match="above the limit of 0.02\nsolved again within"):
        before = known(monitor.step(images(SIZE)))
    policy = conversion(model).policy
    assert policy != plan.policy
    assert profile.predict(policy).peak_bytes <= known(plan.budget_bytes)
    readings = [known(monitor.step(images(SIZE))).noise_ratio for _ in range(4)]
    assert max(map(known, readings)) < known(before.noise_ratio)
    assert monitor.state_dict()["policy"] == policy.dumps()


def test_a_checkpoint_goes_on_with_its_policy_and_its_corrections(run: Path) -> None:
    model = converted(run)
    monitor = mt.Monitor(model, cross_entropy, every=1, limit=0.02, remedy="plan", run=run)
    grown(model)
    with pytest.warns(UserWarning, match="solved again"):
        monitor.step(images(SIZE))
    other = converted(run)
    resumed = mt.Monitor(other, cross_entropy, every=1, limit=0.02, remedy="plan", run=run)
    resumed.load_state_dict(monitor.state_dict())
    assert conversion(other).policy == conversion(model).policy
    assert resumed.state_dict() == monitor.state_dict()
    assert any(abs(factor - 1) > 0.1 for factor in resumed.state_dict()["corrections"].values())


def test_where_no_plan_helps_the_warning_names_the_budget_that_would(
    profile: mt.Profile, tmp_path: Path
) -> None:
    run = searched(profile, tmp_path, "62%")
    model = converted(run)
    grown(model)
    monitor = mt.Monitor(model, cross_entropy, every=1, limit=1e-6, remedy="plan", run=run)
    with pytest.warns(UserWarning, match=r"; a budget of ([\d.]+) MB would do"):
        monitor.step(images(SIZE))
    assert profile.predict(conversion(model).policy).peak_bytes <= known(Replan(run).plan.budget_bytes)


def test_a_compiled_model_is_read_and_warned_of_but_stays(run: Path) -> None:
    model = converted(run)
    policy = conversion(model).policy
    compiled: Any = torch.compile(model, backend="eager")
    monitor = mt.Monitor(compiled, cross_entropy, every=1, limit=1e-6, remedy="plan", run=run)
    with pytest.warns(UserWarning, match="compiled, so its policy stays"):
        reading = monitor.step(images(SIZE))
    assert known(reading).noise_ratio
    assert conversion(model).policy is policy


def test_few_samples_are_read_over_the_micro_batches_of_the_step_or_not(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = mt.Monitor(converted(run), cross_entropy, every=1, limit=1e3, remedy="plan", run=run)
    assert monitor.step(images(3)) is None
    assert "no reading of the noise ratio: a step of fewer than 4 samples" in capsys.readouterr().err
    assert not monitor.history
    reading = monitor.step(*[images(2) for _ in range(8)])
    assert 0 < known(known(reading).noise_ratio) < 1


def test_a_run_without_files_and_a_plan_of_before_say_what_to_type(run: Path, tmp_path: Path) -> None:
    values = json.loads((run / "plan.json").read_text())
    del values["request"]
    (run / "plan.json").write_text(json.dumps(values))
    with pytest.raises(mt.RunError, match="mesa-tune search --force"):
        _ = Replan(run).plan
    with pytest.raises(mt.RunError, match="run `mesa-tune profile` first"):
        _ = Replan(tmp_path / "other").profile


@pytest.mark.parametrize("budget", ["65%", "80%"])
def test_a_reading_takes_no_more_memory_than_the_plan(
    profile: mt.Profile, tmp_path: Path, budget: str
) -> None:
    run = searched(profile, tmp_path, budget)
    model, batch = converted(run), images(SIZE)
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = mt.Monitor(model, cross_entropy, every=1, limit=1e3, remedy="plan", run=run)
    peaks = []
    for _ in range(2):
        cross_entropy(model, batch).backward()
        optimizer.step()
        with Meter() as meter:
            older: list[Tensor] = [*model.parameters(), *model.buffers(), *batch]
            meter.count_older([*older, *gradients_of(model), *tensors_in(optimizer.state)])
            assert monitor.step(batch) is not None
        peaks.append(meter.tensor_peak)
        optimizer.zero_grad()
    assert max(peaks) <= mt.Plan.load(run / "plan.json").predicted.peak_bytes


def test_the_time_of_a_reading_is_that_of_two_steps_by_its_samples(run: Path) -> None:
    samples = list[int]()

    def counting(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        samples.append(len(batch[0]))
        return cross_entropy(model, batch)

    monitor = mt.Monitor(converted(run), counting, every=1, limit=1e3, remedy="plan", run=run)
    for size in (4, 8, SIZE, 64):
        samples.clear()
        assert monitor.step(images(size)) is not None
        assert 4 <= sum(samples) <= 1.75 * size, (size, samples)  # a compressed sample takes up to 1.5
