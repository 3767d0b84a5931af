"""`MesaTuneCallback` in real runs of Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import mesa_tune as mt
from mesa_tune.conversion.model import conversion_of
from mesa_tune.integrations import compression
from mesa_tune.integrations.lightning import MesaTuneCallback
from tests.builders import Patch, ViT, known
from tests.integrations.conftest import CAMPAIGN, EXACT, FOUR_BITS, LOGGED, PREDICTED, PeakMeter, sharpen


class Dropping(ViT):
    """A vision transformer with dropout before its head, which has so many outputs that a loss is packed."""

    def __init__(self, dropout: float) -> None:
        super().__init__(depth=1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(64, 200)

    def get_features(self, x: Tensor) -> Any:
        return self.dropout(super().get_features(x))


class Classifier(LightningModule):
    """Trains a vision transformer, and notes its losses and what the last one's backward is."""

    def __init__(self, checkpoints: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Dropping(dropout)
        self.checkpoints = checkpoints
        self.losses: list[float] = []
        self.function = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = checkpoint(self.net, images, use_reentrant=False) if self.checkpoints else self.net(images)
        loss = F.cross_entropy(logits, labels)
        self.function = type(loss.grad_fn).__name__
        self.log("loss", loss, on_step=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Policies(Callback):
    """Notes the policy of the module that trains, after each step."""

    def __init__(self) -> None:
        self.policies: list[mt.Policy | None] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        conversion = conversion_of(pl_module)
        self.policies.append(None if conversion is None else conversion.policy)


def random_state(state: Tensor) -> Callback:
    """Load the state of the random generator, which Lightning's checkpoints do not have."""
    return LambdaCallback(on_train_start=lambda *_: torch.set_rng_state(state))


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 24, 16, generator=generator)
    labels = torch.randint(0, 200, (64,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=32)


def fitted(
    folder: Path, *callbacks: Callback, resume: str | None = None, **options: Any
) -> tuple[Classifier, Any]:
    """Train for three steps of an epoch of two; return the module and the Trainer."""
    made = {name: options.pop(name) for name in ("checkpoints", "dropout") if name in options}
    module = options.pop("kind", Classifier)(**made)
    torch.manual_seed(5)
    place: dict[str, Any] = {"default_root_dir": folder, "logger": CSVLogger(folder), "accelerator": "cpu"}
    place |= {"log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False}
    steps: dict[str, Any] = {"devices": 1, "max_steps": 3, **options}
    trainer = LightningTrainer(callbacks=list(callbacks), **place, **steps)
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    return module, trainer


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    others = right.state_dict()
    assert left.state_dict().keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in left.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [{"checkpoints": True}, {"accumulate_grad_batches": 2, "max_steps": 2}, {"precision": "bf16-mixed"}],
    ids=["checkpointing", "accumulation", "bf16"],
)
def test_an_exact_policy_trains_as_plain_and_4_bits_nearly(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, _ = fitted(tmp_path, **options)
    exact, _ = fitted(tmp_path, MesaTuneCallback(EXACT), **options)
    assert exact.losses == plain.losses
    assert_equal(exact, plain)
    module, _ = fitted(tmp_path, MesaTuneCallback(FOUR_BITS), **options)
    assert module.losses[0] == plain.losses[0]
    assert module.losses[-1] != plain.losses[-1]
    assert module.losses[-1] == pytest.approx(plain.losses[-1], rel=0.05)


def test_the_module_is_converted_for_the_training_alone(tmp_path: Path) -> None:
    seen = Policies()
    module, _ = fitted(tmp_path, MesaTuneCallback(FOUR_BITS), seen)
    assert seen.policies == [FOUR_BITS] * 3
    assert conversion_of(module) is None
    assert "training_step" not in vars(module)


def test_a_policy_of_a_part_has_the_names_of_the_part(tmp_path: Path) -> None:
    text = "# mesa-tune policy 1\non fc:\n    by_name: {}blocks.0.fc2\n    level: 4\n"
    losses = [
        fitted(tmp_path, MesaTuneCallback(text.format(prefix), module=module))[0].losses
        for prefix, module in (("net.", ""), ("", "net"))
    ]
    plain, _ = fitted(tmp_path)
    assert losses[0] == losses[1] != plain.losses
    with pytest.raises(mt.PolicyError, match="net"):
        fitted(tmp_path, MesaTuneCallback(text.format("net."), module="net"))


def test_policy_and_predictions_are_logged_once(tmp_path: Path) -> None:
    _, trainer = fitted(tmp_path, MesaTuneCallback(PREDICTED + "on fc:\n    by_index: all\n    level: 16\n"))
    folder = Path(trainer.logger.log_dir)
    assert (folder / "hparams.yaml").read_text().startswith("mesa/policy: 1 rule, digest ")
    names, *rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    logged = [dict(zip(names, row, strict=True)) for row in rows]
    (entry,) = [row for row in logged if row["mesa/peak_bytes"]]
    found = {name: float(value) for name, value in entry.items() if name.startswith("mesa/")}
    assert found == LOGGED


def test_loss_rules_reach_the_loss(tmp_path: Path) -> None:
    rules = "# mesa-tune policy 1\non loss:\n    by_name: loss.cross_entropy.0\n    level: 4\n"
    plain, _ = fitted(tmp_path)
    module, _ = fitted(tmp_path, MesaTuneCallback(rules))
    assert module.losses[0] == plain.losses[0]
    assert plain.function == "NllLossBackward0" != module.function


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_training_is_bitwise_the_uninterrupted(tmp_path: Path) -> None:
    whole, _ = fitted(tmp_path, MesaTuneCallback(FOUR_BITS), max_steps=4)
    half, trainer = fitted(tmp_path, MesaTuneCallback(FOUR_BITS), max_steps=2)
    path = str(tmp_path / "half.ckpt")
    trainer.save_checkpoint(path)
    state = torch.get_rng_state()
    assert torch.load(path)["state_dict"].keys() == Classifier().state_dict().keys()
    resumed, _ = fitted(tmp_path, random_state(state), MesaTuneCallback(FOUR_BITS), resume=path, max_steps=4)
    assert half.losses + resumed.losses == whole.losses
    assert_equal(resumed, whole)


def test_validation_between_steps_changes_no_number(tmp_path: Path) -> None:
    module, _ = fitted(tmp_path, MesaTuneCallback(FOUR_BITS), dropout=0.0, limit_val_batches=0)
    validated, trainer = fitted(tmp_path, MesaTuneCallback(FOUR_BITS), dropout=0.0, val_check_interval=1)
    assert "validation" in trainer.callback_metrics
    assert validated.losses == module.losses


class Peaks(Callback):
    """Measures the most live bytes of each step."""

    def __init__(self) -> None:
        self.meter = PeakMeter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.meter.begin(pl_module, trainer.optimizers[0], batch)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.meter.end()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=CAMPAIGN), {"checkpoints": True}], ids=["", "checkpointing"]
)
def test_steps_under_a_budget_take_no_more_and_are_resumed(tmp_path: Path, options: dict[str, Any]) -> None:
    before, after = Peaks(), Peaks()
    plain, _ = fitted(tmp_path, before, **options)
    budget = int(0.8 * max(before.meter.peaks))
    whole, trainer = fitted(tmp_path, within(budget, tmp_path), after, **options, max_steps=4)
    assert max(after.meter.peaks) <= budget
    assert plain.losses[0] in whole.losses  # others are of measurements
    assert "mesa/noise_ratio" in (Path(trainer.logger.log_dir) / "metrics.csv").read_text()
    half, trainer = fitted(tmp_path, within(budget, tmp_path), **options, max_steps=2)
    assert half.losses == whole.losses[-4:-2]  # those before are of measurements
    path = str(tmp_path / "half.ckpt")
    trainer.save_checkpoint(path)
    state = random_state(torch.get_rng_state())
    resumed, _ = fitted(tmp_path, state, within(budget, tmp_path), **options, resume=path, max_steps=4)
    assert resumed.losses == whole.losses[-2:]
    assert_equal(resumed, whole)


def test_a_budget_is_measured_in_the_steps_of_the_training(tmp_path: Path, monkeypatch: Patch) -> None:
    given = Mock()
    monkeypatch.setattr(compression, "convert_within", given)
    steps: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "max_steps": 1}
    module, _ = fitted(tmp_path, MesaTuneCallback(budget="6GB"), **steps)
    assert given.call_args.args[0] is module
    options = given.call_args.kwargs
    assert (options["budget"], options["autocast"], options["accumulation"]) == ("6GB", "bfloat16", 2)


def within(budget: int, folder: Path) -> MesaTuneCallback:
    return MesaTuneCallback(budget=budget, run=folder / "mesa-run", fast=True, trials=0)


class Sharper(Callback):
    """Makes the attention of the module sharp after its first step, as training may: its noise grows."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 1:
            sharpen(pl_module)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.filterwarnings("ignore:mesa-tune. at step")
@pytest.mark.usefixtures("eager_readings")
def test_a_reading_changes_the_plan_and_a_resumed_training_goes_on_with_it(tmp_path: Path) -> None:
    before, seen = Peaks(), Policies()
    fitted(tmp_path, before)
    budget = int(0.7 * max(before.meter.peaks))
    whole, trainer = fitted(tmp_path, within(budget, tmp_path), Sharper(), seen, max_steps=5)
    first, second, third, *_ = [known(policy).dumps() for policy in seen.policies]
    assert first != second == third
    assert "mesa/measured_noise_ratio" in (Path(trainer.logger.log_dir) / "metrics.csv").read_text()
    _, trainer = fitted(tmp_path, within(budget, tmp_path), Sharper(), max_steps=2)
    path = str(tmp_path / "part.ckpt")
    trainer.save_checkpoint(path)
    state, again = random_state(torch.get_rng_state()), Policies()
    resumed, _ = fitted(tmp_path, state, within(budget, tmp_path), again, resume=path, max_steps=5)
    assert again.policies == seen.policies[2:]
    assert_equal(resumed, whole)


@pytest.mark.slow("training")
def test_retune_measures_at_the_start_and_at_intervals(tmp_path: Path) -> None:
    seen = Policies()
    callback = MesaTuneCallback(budget="80%", retune=2)
    plain, _ = fitted(tmp_path)
    module, trainer = fitted(tmp_path, callback, seen)
    assert all(policy and policy.rules for policy in seen.policies)
    rows = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("mesa/peak_bytes")
    steps = [row.split(",")[rows[0].split(",").index("step")] for row in rows[1:] if row.split(",")[column]]
    assert steps == ["0", "2"]
    assert plain.losses[0] in module.losses  # others are of measurements


class Manual(Classifier):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_manual_optimization_takes_a_policy_but_no_budget(tmp_path: Path) -> None:
    given: dict[str, Any] = {"kind": Manual}
    plain, _ = fitted(tmp_path, **given)
    with pytest.warns(UserWarning, match="manual optimization"):
        module, _ = fitted(tmp_path, MesaTuneCallback(FOUR_BITS), **given)
    assert module.losses[0] == plain.losses[0]
    assert module.losses[-1] != plain.losses[-1]
    assert module.function == plain.function
    with pytest.raises(mt.RunError, match="manual optimization"):
        fitted(tmp_path, MesaTuneCallback(budget="6GB"), **given)
