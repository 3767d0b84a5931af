"""`mt.auto` in a training script: a policy for the model at hand, without a trace in it, measured once."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import BatchEncoding

import mesa_tune as mt
from mesa_tune import autotune
from mesa_tune.conversion.model import conversion_of
from mesa_tune.measure import profiling
from mesa_tune.measure.memory.meter import measure_step
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Profile
from mesa_tune.runs.folder import Origin, Run
from mesa_tune.units import format_bytes
from tests import process_group
from tests.builders import (
    Capture,
    Patch,
    conversion,
    cross_entropy,
    descend,
    gpt2,
    images,
    known,
    no_trace,
    own_loss,
    words,
)
from tests.step_memory import Composed


def two_settings(*arguments: Any, **options: Any) -> Profile:
    """Profile two settings of each layer."""
    return mt.profile(*arguments, **{**options, "options": [LayerSettings(level=16), LayerSettings(level=4)]})


@pytest.fixture(name="profiled", autouse=True)
def _profiled(tmp_path: Path, monkeypatch: Patch) -> list[Profile]:
    """The profiles that are measured in the test, which runs in a folder of its own."""
    measured: list[Profile] = []

    def noted(*arguments: Any, **options: Any) -> Profile:
        measured.append(two_settings(*arguments, **options))
        return measured[-1]

    monkeypatch.setattr(autotune, "profile", noted)
    monkeypatch.chdir(tmp_path)
    return measured


@pytest.fixture(name="kept", scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a call for `partly_frozen()` and 16 images has written."""
    folder = tmp_path_factory.mktemp("kept") / "mesa-run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(autotune, "profile", two_settings)
        auto(partly_frozen(), images(16), cross_entropy, run=folder)
    return folder


@pytest.fixture(name="earlier")
def _earlier(kept: Path, profiled: list[Profile]) -> None:
    """That call came before the test, in its folder."""
    shutil.copytree(kept, "mesa-run")
    assert not profiled


def auto(model: nn.Module, batch: Any, loss: Any, budget: Any = "90%", **options: Any) -> nn.Module:
    return mt.auto(model, batch, loss, budget=budget, **{"trials": 0, "fast": True, **options})


def partly_frozen() -> Any:
    """A frozen layer, a trainable one of rank 4 beside it, dropout, and statistics that forwards change."""

    def forward(m: Any, x: Tensor) -> Any:
        hidden = F.gelu(m.norm(m.frozen(x) + m.up(m.down(x))))
        return m.head(F.gelu(m.hidden(m.drop(hidden))).mean(1))

    first = {"frozen": nn.Linear(16, 64).requires_grad_(False), "down": nn.Linear(16, 4, bias=False)}
    between = {"up": nn.Linear(4, 64, bias=False), "norm": nn.BatchNorm1d(24), "drop": nn.Dropout(0.1)}
    return Composed(forward, **first, **between, head=nn.Linear(64, 10), hidden=nn.Linear(64, 64))


@pytest.mark.slow("training")
def test_gpt2_gets_a_policy_within_the_budget(capsys: Capture) -> None:
    torch.manual_seed(0)
    model, batch = gpt2(32, 1), words(8)
    taken = 0

    def batches() -> Iterator[Any]:
        nonlocal taken
        while True:
            taken += 1
            yield BatchEncoding(words(8))

    def popping_loss(model: nn.Module, batch: Any) -> Any:
        labels = batch.pop("labels")  # changes the batch, as people do
        return own_loss(model, {**batch, "labels": labels})

    torch.manual_seed(1)
    plain = own_loss(model, batch)
    assert auto(model, batches(), popping_loss, "70%") is model
    assert 8 <= taken <= 16
    assert Profile.load("mesa-run/profile.json").notes == ()
    assert model.lm_head.weight is model.transformer.wte.weight
    torch.manual_seed(1)
    loss = own_loss(model, batch)
    assert torch.equal(loss, plain)
    loss.backward()
    plan = mt.Plan.load("mesa-run/plan.json")
    policy = mt.Policy.load("mesa-run/policy.txt")
    assert conversion(model).policy == policy == plan.policy
    memory = measure_step(model, batch, own_loss, torch.optim.AdamW(model.parameters()))
    assert memory.peak_bytes <= known(plan.budget_bytes) < plan.baseline.peak_bytes
    before, peak = format_bytes(plan.baseline.peak_bytes), format_bytes(plan.predicted.peak_bytes)
    noise, ratio = plan.predicted.gradient_noise_ratio, policy.header.step_ratio
    step = "" if ratio is None else f"step {ratio:.2f} times plain's, "  # unknown on a busy machine
    *_, predicted, look = capsys.readouterr().err.splitlines()
    assert look.endswith('mt.Monitor(model, loss, remedy="plan"), and after each step monitor.step(batch)')
    assert predicted == (
        f"mesa-tune: predicted peak {before} -> {peak} (budget {policy.header.budget}), "
        f"{step}noise ratio {noise:.1e}; policy in mesa-run/policy.txt"
    )


def test_profile_and_study_leave_no_trace() -> None:
    torch.manual_seed(0)
    model = partly_frozen()
    model.norm.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = images(32)
    descend(optimizer, lambda: cross_entropy(model, batch), 2)
    generator = torch.Generator().manual_seed(7)
    samples: Any = [images(1) for _ in range(40)]  # the last batch has 8
    batches: Any = DataLoader(samples, batch_size=16, shuffle=True, generator=generator)
    loader_state = generator.get_state()
    moments = copy.deepcopy(optimizer.state_dict())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, (batch[0][:, 0], batch[1][:, 0]))

    nn.init.zeros_(model.up.weight)  # the gradient of `down` is zero: a first step is taken
    with no_trace(model):
        auto(model, batches, loss, optimizer=optimizer, trials=2)
    assert mt.Plan.load("mesa-run/plan.json").trials == 2
    assert "1 training step taken" in mt.Profile.load("mesa-run/profile.json").notes[0]
    assert str(optimizer.state_dict()) == str(moments)
    assert torch.equal(generator.get_state(), loader_state)


def test_one_batch_is_noted_and_measured_in_training_mode(profiled: list[Profile], capsys: Capture) -> None:
    torch.manual_seed(0)
    model = partly_frozen().eval()
    auto(model, images(16), cross_entropy)
    assert not any(module.training for module in model.modules())
    assert "drop" in [layer.name for layer in profiled[0].layers]
    note = "one batch of 16 samples was given"
    assert any(note in text for text in Profile.load("mesa-run/profile.json").notes)
    assert note in capsys.readouterr().err
    one = known(profiled[0].gradient_noise)
    auto(partly_frozen(), images, cross_entropy, batch_size=16, run="other")
    many = known(profiled[1].gradient_noise)
    assert 0.5 * many < one < 2 * many  # the bootstrap estimates the noise of batches of this size


def test_a_second_call_measures_nothing(profiled: list[Profile], capsys: Capture) -> None:
    def prepared(seed: int, count: int = 16, **options: Any) -> Any:
        torch.manual_seed(seed)
        model = partly_frozen()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + seed), momentum=0.9)
        auto(model, images(count), cross_entropy, optimizer=optimizer, **options)
        return conversion_of(model)

    first = prepared(0)
    peak = mt.Plan.load("mesa-run/plan.json").predicted.peak_bytes
    said = capsys.readouterr().err.splitlines()
    second = prepared(1)  # other weights and another learning rate
    assert len(profiled) == 1
    assert second.policy == first.policy
    assert capsys.readouterr().err.splitlines() == said[-2:]
    prepared(1, budget="110%")  # another plan from the same profile
    assert len(profiled) == 1
    assert mt.Plan.load("mesa-run/plan.json").predicted.peak_bytes > peak
    prepared(1, count=24)
    assert [profile.batch_size for profile in profiled] == [16, 24]


def test_a_plain_step_that_fits_stays_plain(profiled: list[Profile], capsys: Capture) -> None:
    model, batch = partly_frozen(), images(16)
    assert auto(model, batch, cross_entropy, "10GB") is model
    assert conversion_of(model) is None
    assert "the plain step fits the budget" in capsys.readouterr().err.splitlines()[-1]
    assert not any(layer.options for layer in profiled[0].layers)  # no price is measured
    auto(model, batch, cross_entropy)
    assert conversion_of(model) is not None
    assert any(layer.options for layer in profiled[1].layers)


def test_the_budget_is_what_is_free_and_what_the_model_has(monkeypatch: Patch) -> None:
    free = 10**9
    monkeypatch.setattr(autotune, "free_memory", lambda device: (free, "free"))
    model, batch = partly_frozen(), images(16)
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    auto(model, batch, cross_entropy, "auto")
    plain = mt.Plan.load("mesa-run/plan.json")
    assert plain.budget_bytes == int(0.9 * (free + held))
    auto(model, batch, cross_entropy, "auto")
    assert mt.Plan.load("mesa-run/plan.json") == plain
    needed = plain.predicted.peak_bytes
    free = int(0.95 * needed / 0.9) - held  # the plan of before does not fit any more
    auto(model, batch, cross_entropy, "auto")
    assert mt.Plan.load("mesa-run/plan.json").budget_bytes == int(0.9 * (free + held))
    assert conversion_of(model) is not None


@pytest.mark.usefixtures("earlier")
def test_the_lowest_peak_needs_no_budget() -> None:
    lowest: dict[str, Any] = {"objective": "memory", "max_noise_ratio": float("inf"), "max_slowdown": 100.0}
    auto(partly_frozen(), images(16), cross_entropy, None, **lowest)
    plan = mt.Plan.load("mesa-run/plan.json")
    assert plan.budget_bytes is None
    assert plan.predicted.peak_bytes < plan.baseline.peak_bytes


def test_layers_of_the_loss_stay_exact_unless_pinned() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 128))
    batch = torch.randn(512, 16), torch.zeros(512, dtype=torch.long)
    auto(model, batch, cross_entropy, "95%", objective="error")
    profile, plan = Profile.load("mesa-run/profile.json"), mt.Plan.load("mesa-run/plan.json")
    assert any(layer.name.startswith("loss.") for layer in profile.layers)
    assert not plan.stores_loss(profile)
    auto(model, batch, cross_entropy, "95%", pins={"loss.*": LayerSettings(level=16)})
    assert mt.Plan.load("mesa-run/plan.json").stores_loss(profile)


def test_errors_come_before_anything_is_measured(profiled: list[Profile]) -> None:
    model, batch = partly_frozen(), images(16)
    other = torch.optim.SGD(partly_frozen().parameters())
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (mt.BudgetError, "not an amount", {"budget": "much"}),
        (mt.BudgetError, "without a unit", {"budget": 0.6}),
        (mt.BudgetError, "objective", {"objective": "speed"}),
        (mt.BudgetError, "timeout", {"timeout": 0}),
        (TypeError, "trails", {"trails": 3}),
        (mt.WorkloadError, "no tensor whose first dimension", {"batch": {"n": 3}}),
        (mt.WorkloadError, "the iterable has no batch", {"batch": iter(())}),
        (mt.WorkloadError, "no trainable parameter of the model", {"optimizer": other}),
    ]
    for error, message, given in refused:
        with pytest.raises(error, match=message):
            auto(model, **{"batch": batch, "loss": cross_entropy, **given})
    assert not profiled
    assert conversion_of(model) is None


def test_an_error_of_the_loss_names_its_line() -> None:
    def wrong(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, (batch["images"], batch["labels"]))

    model = partly_frozen()
    with pytest.raises(mt.WorkloadError, match=r"test_autotune.py:\d+: loss\(\) raised"):
        auto(model, images(16), wrong)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("earlier")
def test_files_of_the_user_are_not_overwritten() -> None:
    policy = Path("mesa-run/policy.txt")
    policy.write_text(policy.read_text() + "# mine\n")
    for budget in ("90%", "95%"):  # of the plan that is there, and of another one
        with pytest.raises(mt.RunError, match="edited"):
            auto(partly_frozen(), images(16), cross_entropy, budget)
    assert policy.read_text().endswith("# mine\n")


@pytest.mark.usefixtures("earlier")
def test_files_of_the_other_are_named_as_such(profiled: list[Profile]) -> None:
    run = Run(Path("mesa-run"))
    with pytest.raises(mt.RunError, match=r"^mesa-run/plan.json: was written by mt.auto\n--force overwrites"):
        run.check(run.plan, Origin("of a command"))
    own = Run(Path("mesa-run"), force=True)
    own.write(own.profile, own.profile.read_text(), Origin("of a command"))
    with pytest.raises(mt.RunError) as raised:
        auto(partly_frozen(), images(16), cross_entropy)
    assert str(raised.value).splitlines() == [
        "mesa-run/profile.json: was written by a command of mesa-tune, not by mt.auto",
        'give mt.auto a folder of its own, run="mesa-run-auto", or train with what is there:',
        'mt.convert(model, mt.Policy.load("mesa-run/policy.txt"))',
    ]
    assert not profiled


@pytest.mark.usefixtures("earlier")
def test_a_conversion_is_replaced_and_stays_after_an_error(profiled: list[Profile]) -> None:
    model, batch = partly_frozen(), images(16)
    mt.convert(model, mt.Policy.uniform(level=4))
    before = conversion(model)
    with pytest.raises(mt.BudgetError, match="not reachable"):
        auto(model, batch, cross_entropy, 1000)
    assert conversion(model) is before
    auto(model, batch, cross_entropy)
    assert conversion(model).policy == mt.Policy.load("mesa-run/policy.txt")
    assert not profiled


def test_a_timeout_ends_what_a_plan_can_do_without(
    profiled: list[Profile], capsys: Capture, monkeypatch: Patch
) -> None:
    torch.manual_seed(0)
    model, batch = partly_frozen(), images(16)
    with monkeypatch.context() as slow:
        slow.setattr(profiling, "_TIMED_STEPS", 1e9)  # as if the steps to be timed took all of the time
        auto(model, batch, cross_entropy, fast=False, timeout=60)
    short = profiled[0]
    assert short.notes[-1] == "time was up: errors were measured on 1 batch"
    assert short.notes[-1] in capsys.readouterr().err
    assert short.predict(mt.Policy.uniform(level=16)).gradient_noise_ratio is not None
    assert short.exact_ms is not None
    assert not short.derivations
    assert conversion(model).policy == mt.Policy.load("mesa-run/policy.txt")
    auto(model, batch, cross_entropy, fast=False, timeout=3600)
    assert len(profiled) == 2, "a profile with more time is another one"
    assert not any("time was up" in note for note in profiled[1].notes)
    assert {option.batches for option in profiled[1].layer("hidden").priced} == {autotune.BATCHES}


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    return process_group.results("tests.auto_worker", tmp_path_factory.mktemp("group"))


@pytest.mark.slow("processes")
def test_all_ranks_get_one_plan_and_one_error(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["policy"] == second["policy"]
    assert mt.Policy.parse(first["policy"]).rules
    for one, other in zip(first["gradients"], second["gradients"], strict=True):
        assert torch.equal(one, other)
    assert first["unreachable"].startswith("BudgetError: budget 10.0 kB: not reachable")
    assert second["unreachable"] == first["unreachable"].replace("budget", "rank 0: budget", 1)
    assert first["synchronized"].startswith("RunError: 1 is SyncBatchNorm")
    assert "rank 0: 1 is SyncBatchNorm" in second["synchronized"]
    assert first["said"].count("mesa-tune: predicted peak ") == 1
    assert "mesa-tune: " not in second["said"]
