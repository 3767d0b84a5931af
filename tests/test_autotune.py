"""`mt.auto` in a training script: a policy for the model at hand, without a trace in it, measured once."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mesa_tune as mt
from mesa_tune import autotune
from mesa_tune.conversion.model import conversion_of
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiler import profiling
from mesa_tune.profiler.memory.meter import measure_step
from mesa_tune.profiler.profile import Profile
from mesa_tune.runs.folder import Origin, Run
from mesa_tune.units import format_bytes
from tests import auto_worker

hf: Any = transformers
ROOT = Path(__file__).parents[1]
Texts = dict[str, Tensor]


@pytest.fixture(name="profiled", autouse=True)
def _profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """The profiles that are measured in the test, which runs in a folder of its own."""
    measured: list[Profile] = []

    def counted(*arguments: Any, **options: Any) -> Profile:
        options["options"] = [LayerSettings(level=16), LayerSettings(level=4)]
        measured.append(mt.profile(*arguments, **options))
        return measured[-1]

    monkeypatch.setattr(autotune, "profile", counted)
    monkeypatch.chdir(tmp_path)
    return measured


def auto(model: nn.Module, batch: Any, loss: Any, budget: Any = "90%", **options: Any) -> nn.Module:
    return mt.auto(model, batch, loss, budget=budget, **{"trials": 0, "fast": True, **options})


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, n_positions=64, vocab_size=128, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


def texts(count: int = 70, length: int = 64) -> list[Texts]:
    ids = torch.randint(128, (count, length))
    return [{"input_ids": each, "labels": each} for each in ids]


def text_loss(model: nn.Module, batch: Texts) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def loader(samples: Any, **options: Any) -> Any:
    return DataLoader(samples, **options)


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 24, 16), torch.randint(0, 10, (count,))


class Frozen(nn.Module):
    """A frozen layer, a trainable one of rank 4 beside it, dropout, and statistics that forwards change."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, width).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, width, bias=False)
        self.norm, self.drop, self.head = nn.BatchNorm1d(24), nn.Dropout(0.1), nn.Linear(width, 10)
        self.hidden = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Samples of 24 tokens of width 16 to logits."""
        hidden = F.gelu(self.norm(self.frozen(x) + self.up(self.down(x))))
        logits: Tensor = self.head(F.gelu(self.hidden(self.drop(hidden))).mean(1))
        return logits


def states() -> list[Any]:
    """The states of all random generators."""
    return [
        torch.get_rng_state().tolist(),
        torch.initial_seed(),
        random.getstate(),
        repr(np.random.get_state()),
    ]


def test_gpt2_gets_a_policy_within_the_budget_and_its_losses_stay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model, batches = gpt2(), loader(texts(), batch_size=8, shuffle=True)  # the last batch has 6 samples
    batch = next(iter(batches))
    torch.manual_seed(1)
    plain = text_loss(model, batch)
    assert auto(model, batches, text_loss, "70%") is model
    torch.manual_seed(1)
    loss = text_loss(model, batch)
    assert torch.equal(loss, plain)
    loss.backward()
    plan = mt.Plan.load("mesa-run/plan.json")
    policy = mt.Policy.load("mesa-run/policy.txt")
    conversion = conversion_of(model)
    assert conversion is not None
    assert conversion.policy == policy == plan.policy
    memory = measure_step(model, batch, text_loss, torch.optim.AdamW(model.parameters()))
    assert plan.budget_bytes is not None
    assert memory.peak_bytes <= plan.budget_bytes < plan.baseline.peak_bytes
    before, peak = format_bytes(plan.baseline.peak_bytes), format_bytes(plan.predicted.peak_bytes)
    step, noise = policy.header.step_ratio, plan.predicted.gradient_noise_ratio
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"mesa-tune: predicted peak {before} -> {peak} (budget {policy.header.budget}), "
        f"step {step:.2f} times plain's, noise ratio {noise:.1e}; policy in mesa-run/policy.txt"
    )


def test_no_trace() -> None:
    torch.manual_seed(0)
    model = Frozen()
    model.norm.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = images(32)
    for _ in range(2):
        optimizer.zero_grad()
        image_loss(model, batch).backward()
        optimizer.step()
    generator = torch.Generator().manual_seed(7)
    batches = loader([images(1) for _ in range(40)], batch_size=16, shuffle=True, generator=generator)
    loader_state = generator.get_state()
    before, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [(parameter.grad, copy.deepcopy(parameter.grad)) for parameter in model.parameters()]
    random_states = states()
    auto(
        model,
        batches,
        lambda model, batch: image_loss(model, (batch[0][:, 0], batch[1][:, 0])),
        optimizer=optimizer,
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(moments)
    for parameter, (gradient, values) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert str(gradient) == str(values)
    assert states() == random_states
    assert torch.equal(generator.get_state(), loader_state)
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)


def test_a_model_in_evaluation_mode_is_measured_in_training_mode(profiled: list[Profile]) -> None:
    model = Frozen().eval()
    auto(model, images(32), image_loss)
    assert not any(module.training for module in model.modules())
    assert "drop" in [layer.name for layer in profiled[0].layers]


def test_one_batch_is_enough_and_noted(profiled: list[Profile], capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    auto(Frozen(), images(16), image_loss)
    note = "one batch of 16 samples was given"
    assert any(note in text for text in Profile.load("mesa-run/profile.json").notes)
    assert note in capsys.readouterr().err
    one = profiled[0].gradient_noise
    auto(Frozen(), images, image_loss, batch_size=16, run="other")
    many = profiled[1].gradient_noise
    assert one is not None
    assert many is not None
    assert 0.5 * many < one < 2 * many  # the bootstrap estimates the noise of batches of this size


def test_a_second_call_measures_nothing(profiled: list[Profile], capsys: pytest.CaptureFixture[str]) -> None:
    def prepared(seed: int, width: int = 64, count: int = 16, **options: Any) -> Any:
        torch.manual_seed(seed)
        model = Frozen(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + seed), momentum=0.9)
        auto(model, images(count), image_loss, optimizer=optimizer, **options)
        return conversion_of(model)

    first = prepared(0)
    peak = mt.Plan.load("mesa-run/plan.json").predicted.peak_bytes
    said = capsys.readouterr().err.splitlines()
    second = prepared(1)  # other weights and another learning rate
    assert len(profiled) == 1
    assert second.policy == first.policy
    assert capsys.readouterr().err.splitlines() == said[-1:]
    prepared(1, budget="110%")  # another plan from the same profile
    assert len(profiled) == 1
    assert mt.Plan.load("mesa-run/plan.json").predicted.peak_bytes > peak
    prepared(1, count=24)
    prepared(1, width=32)
    assert [profile.batch_size for profile in profiled] == [16, 24, 16]


def test_a_plain_step_that_fits_stays_plain(
    profiled: list[Profile], capsys: pytest.CaptureFixture[str]
) -> None:
    model, batch = Frozen(), images(16)
    assert auto(model, batch, image_loss, "10GB") is model
    assert conversion_of(model) is None
    assert "the plain step fits the budget" in capsys.readouterr().err.splitlines()[-1]
    assert not any(layer.options for layer in profiled[0].layers)  # no price is measured
    auto(model, batch, image_loss)
    assert conversion_of(model) is not None
    assert any(layer.options for layer in profiled[1].layers)


def test_the_budget_is_what_is_free_and_what_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10**9
    monkeypatch.setattr(autotune, "free_memory", lambda device: (free, "free"))
    model, batch = Frozen(), images(16)
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    auto(model, batch, image_loss, "auto")
    plain = mt.Plan.load("mesa-run/plan.json")
    assert plain.budget_bytes == int(0.9 * (free + held))
    auto(model, batch, image_loss, "auto")
    assert mt.Plan.load("mesa-run/plan.json") == plain
    needed = plain.predicted.reserved_bytes
    assert needed is not None
    free = int(0.95 * needed / 0.9) - held  # the plan of before does not fit any more
    auto(model, batch, image_loss, "auto")
    assert mt.Plan.load("mesa-run/plan.json").budget_bytes == int(0.9 * (free + held))
    assert conversion_of(model) is not None


def test_the_lowest_peak_needs_no_budget() -> None:
    auto(
        Frozen(),
        images(16),
        image_loss,
        None,
        objective="memory",
        max_noise_ratio=float("inf"),
        max_slowdown=100.0,
    )
    plan = mt.Plan.load("mesa-run/plan.json")
    assert plan.budget_bytes is None
    assert plan.predicted.peak_bytes < plan.baseline.peak_bytes


def test_layers_of_the_loss_stay_exact_unless_pinned() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(16, 64), nn.Linear(64, 128)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(F.gelu(self.hidden(x)))
            return logits

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))

    batch = torch.randn(512, 16)
    auto(Logits(), batch, loss, "95%", objective="error")
    profile, plan = Profile.load("mesa-run/profile.json"), mt.Plan.load("mesa-run/plan.json")
    assert any(layer.name.startswith("loss.") for layer in profile.layers)
    assert not plan.stores_loss(profile)
    auto(Logits(), batch, loss, "95%", pins={"loss.*": LayerSettings(level=16)})
    assert mt.Plan.load("mesa-run/plan.json").stores_loss(profile)


def test_errors_come_before_anything_is_measured(profiled: list[Profile]) -> None:
    model, batch = Frozen(), images(16)
    with pytest.raises(mt.BudgetError, match="not an amount"):
        auto(model, batch, image_loss, "much")
    with pytest.raises(mt.BudgetError, match="without a unit"):
        auto(model, batch, image_loss, 0.6)
    with pytest.raises(mt.BudgetError, match="objective"):
        auto(model, batch, image_loss, objective="speed")
    with pytest.raises(TypeError, match="trails"):
        auto(model, batch, image_loss, trails=3)
    with pytest.raises(mt.WorkloadError, match="no tensor whose first dimension"):
        auto(model, {"n": 3}, image_loss)
    with pytest.raises(mt.WorkloadError, match="the iterable has no batch"):
        auto(model, iter(()), image_loss)
    with pytest.raises(mt.WorkloadError, match="no trainable parameter"):
        auto(model, batch, image_loss, optimizer=torch.optim.SGD(Frozen().parameters()))
    assert not profiled
    with pytest.raises(mt.BudgetError, match="not reachable"):
        auto(model, batch, image_loss, 1000)
    assert conversion_of(model) is None


def test_an_error_of_the_loss_names_its_line() -> None:
    def wrong(model: nn.Module, batch: Any) -> Tensor:
        return image_loss(model, (batch["images"], batch["labels"]))

    model = Frozen()
    with pytest.raises(mt.WorkloadError, match=r"test_autotune.py:\d+: loss\(\) raised"):
        auto(model, images(16), wrong)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_files_of_the_user_are_not_overwritten(profiled: list[Profile]) -> None:
    auto(Frozen(), images(16), image_loss)
    policy = Path("mesa-run/policy.txt")
    policy.write_text(policy.read_text() + "# mine\n")
    for budget in ("90%", "95%"):  # of the plan that is there, and of another one
        with pytest.raises(mt.RunError, match="edited"):
            auto(Frozen(), images(16), image_loss, budget)
    assert policy.read_text().endswith("# mine\n")


def test_files_of_the_other_are_named_as_such(profiled: list[Profile]) -> None:
    auto(Frozen(), images(16), image_loss)
    run = Run(Path("mesa-run"))
    with pytest.raises(mt.RunError, match=r"^mesa-run/plan.json: was written by mt.auto\n--force overwrites"):
        run.check(run.plan, Origin("of a command"))
    profiled.clear()
    own = Run(Path("mesa-run"), force=True)
    own.write(own.profile, own.profile.read_text(), Origin("of a command"))
    with pytest.raises(mt.RunError) as raised:
        auto(Frozen(), images(16), image_loss)
    assert str(raised.value).splitlines() == [
        "mesa-run/profile.json: was written by a command of mesa-tune, not by mt.auto",
        'give mt.auto a folder of its own, run="mesa-run-auto", or train with what is there:',
        'mt.convert(model, mt.Policy.load("mesa-run/policy.txt"))',
    ]
    assert not profiled


def test_a_conversion_is_replaced_and_stays_after_an_error() -> None:
    model, batch = Frozen(), images(16)
    mt.convert(model, mt.Policy.uniform(level=4))
    before = conversion_of(model)
    with pytest.raises(mt.BudgetError):
        auto(model, batch, image_loss, 1000)
    assert conversion_of(model) is before
    auto(model, batch, image_loss)
    after = conversion_of(model)
    assert after is not None
    assert after.policy == mt.Policy.load("mesa-run/policy.txt")


def test_tied_weights_and_batches_of_an_iterator() -> None:
    torch.manual_seed(0)
    model: Any = gpt2()
    taken = 0

    def batches() -> Iterator[Any]:
        nonlocal taken
        while True:
            taken += 1
            yield hf.BatchEncoding(dict(next(iter(loader(texts(4), batch_size=4)))))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        labels = batch.pop("labels")  # changes the batch, as people do
        return text_loss(model, {**batch, "labels": labels})

    auto(model, batches(), loss, optimizer=torch.optim.AdamW(model.parameters()))
    assert 16 <= taken <= 64
    assert model.lm_head.weight is model.transformer.wte.weight
    assert Profile.load("mesa-run/profile.json").notes == ()


def test_a_timeout_ends_what_a_plan_can_do_without(
    profiled: list[Profile], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, batch = Frozen(), images(16)
    with monkeypatch.context() as slow:
        slow.setattr(profiling, "_TIMED_STEPS", 1e9)  # as if the steps to be timed took all of the time
        auto(model, batch, image_loss, fast=False, timeout=60)
    short = profiled[0]
    assert short.notes[-1] == "time was up: errors were measured on 1 batch"
    assert short.notes[-1] in capsys.readouterr().err
    assert short.predict(mt.Policy.uniform(level=16)).gradient_noise_ratio is not None
    assert short.exact_ms is not None
    assert not short.derivations
    conversion = conversion_of(model)
    assert conversion is not None
    assert conversion.policy == mt.Policy.load("mesa-run/policy.txt")
    auto(model, batch, image_loss, fast=False, timeout=3600)
    assert len(profiled) == 2, "a profile with more time is another one"
    assert not any("time was up" in note for note in profiled[1].notes)
    assert {option.batches for option in profiled[1].layer("hidden").priced} == {autotune.BATCHES}
    with pytest.raises(mt.BudgetError, match="timeout"):
        auto(model, batch, image_loss, timeout=0)


def test_a_study_leaves_no_trace_either() -> None:
    torch.manual_seed(0)
    model = Frozen()
    image_loss(model, images(16)).backward()
    before, random_states = copy.deepcopy(model.state_dict()), states()
    gradients = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    auto(model, images, image_loss, batch_size=16, trials=2)
    assert mt.Plan.load("mesa-run/plan.json").trials == 2
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert str([parameter.grad for parameter in model.parameters()]) == str(gradients)
    assert states() == random_states


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("group")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.auto_worker"]
    group = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            cwd=ROOT,
            env=environment,
            stderr=(folder / f"said{rank}").open("w"),
        )
        for rank in range(auto_worker.WORLD)
    ]
    try:
        assert [process.wait(timeout=240) for process in group] == [0] * auto_worker.WORLD
    finally:
        for process in group:
            process.kill()
    return [
        torch.load(folder / f"results{rank}") | {"said": (folder / f"said{rank}").read_text()}
        for rank in range(auto_worker.WORLD)
    ]


@pytest.mark.slow
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
