"""`MesaTuneCallback` in real runs of transformers' Trainer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.conversion.model import conversion_of
from mesa_tune.integrations import compression
from mesa_tune.integrations.compression import Compression, Training
from mesa_tune.integrations.transformers import MesaTuneCallback
from mesa_tune.runs.folder import digest
from mesa_tune.workload.instance import rank_zero
from tests.builders import Capture, Patch, gpt2, known
from tests.integrations.conftest import CAMPAIGN, EXACT, FOUR_BITS, LOGGED, PREDICTED, PeakMeter, sharpen

LENGTH = 32
LOSS = "on loss:\n    by_name: loss.cross_entropy.*\n    level: 4\n"


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens; every sample is its own."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def text_model(dropout: float = 0.1, layers: int = 1) -> Any:
    torch.manual_seed(0)
    dropouts: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return gpt2(64, layers, n_positions=LENGTH, vocab_size=64, **dropouts)


class Policies(TrainerCallback):
    """Notes the policy of the model that trains, after each step."""

    def __init__(self) -> None:
        self.policies: list[mt.Policy | None] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        conversion = conversion_of(kwargs["model"])
        self.policies.append(None if conversion is None else conversion.policy)


def trainer(folder: Path, *callbacks: TrainerCallback, model: Any = None, **options: Any) -> Trainer:
    given = {"max_steps": 3, "save_strategy": "no", **options}
    kind = given.pop("kind", Trainer)
    others = {name: given.pop(name) for name in ("eval_dataset",) if name in given}
    quiet: dict[str, Any] = {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=8, **quiet, **given)
    model = text_model() if model is None else model
    made: Trainer = kind(model, arguments, train_dataset=Texts(), callbacks=list(callbacks), **others)
    return made


def trained(folder: Path, *callbacks: TrainerCallback, resume: str | None = None, **options: Any) -> Trainer:
    """Make a Trainer, which seeds the random generators, and train."""
    run = trainer(folder, *callbacks, **options)
    run.train(resume_from_checkpoint=resume)
    return run


def losses(run: Trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in run.state.log_history if "loss" in entry]


def weights(run: Trainer) -> dict[str, Tensor]:
    assert isinstance(run.model, nn.Module)
    return run.model.state_dict()


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def assert_begins_nearly_as(run: Trainer, plain: Trainer) -> None:
    """The first loss is equal, its gradient nearly."""
    assert losses(run)[0] == losses(plain)[0]
    norms = [losses(each, "grad_norm")[0] for each in (run, plain)]
    assert norms[0] != norms[1]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


@pytest.mark.parametrize(
    "options",
    [{"activation_checkpointing": True}, {"gradient_accumulation_steps": 2}, {"bf16": True}],
    ids=["checkpointing", "accumulation", "bf16"],
)
def test_an_exact_policy_trains_as_plain_and_4_bits_nearly(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, exact = trained(tmp_path, **options), trained(tmp_path, MesaTuneCallback(EXACT), **options)
    assert losses(exact) == losses(plain)
    assert_equal(weights(exact), weights(plain))
    assert_begins_nearly_as(trained(tmp_path, MesaTuneCallback(FOUR_BITS), **options), plain)


def test_the_model_is_converted_for_the_training_alone(tmp_path: Path) -> None:
    seen = Policies()
    run = trained(tmp_path, MesaTuneCallback(FOUR_BITS), seen)
    assert seen.policies == [FOUR_BITS] * 3
    assert conversion_of(run.model) is None  # type: ignore[arg-type]
    assert "compute_loss" not in vars(run)


def test_policy_and_predictions_are_logged_once(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "policy.txt"
    path.write_text(PREDICTED + "on fc:\n    by_index: all\n    level: 16\n")
    run = trained(tmp_path, MesaTuneCallback(path))
    entry, *others = [entry for entry in run.state.log_history if "mesa/policy" in entry]
    assert not others
    assert {name: value for name, value in entry.items() if name.startswith("mesa/")} == {
        "mesa/policy": f"{path} (1 rule, digest {digest(mt.Policy.load(path).dumps())[:6]})",
    } | LOGGED
    predicted = PREDICTED.splitlines()[1].removeprefix("# predicted: ")
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("mesa-tune: ")] == [
        f"mesa-tune: activations are stored by {path} (predicted {predicted})"
    ]


def test_only_the_first_of_several_processes_says_something(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(rank_zero, "processes", lambda: 2)
    for rank, lines in ((1, 0), (0, 1)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        Compression(FOUR_BITS).start(Training(text_model(), None, list, None))
        assert capsys.readouterr().err.count("mesa-tune: activations are stored by") == lines


class OwnLoss(Trainer):
    """Computes the loss outside the model, and notes which function autograd will run backward."""

    functions: set[str]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        loss = nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())
        self.functions = {type(loss.grad_fn).__name__}
        return loss


def test_loss_rules_reach_a_loss_outside_the_model(tmp_path: Path) -> None:
    policy = PREDICTED + LOSS
    ways: tuple[Any, ...] = ((), (MesaTuneCallback(policy),))
    plain, run = [cast(OwnLoss, trained(tmp_path, *way, kind=OwnLoss)) for way in ways]
    assert losses(run)[0] == losses(plain)[0]
    assert losses(run) != losses(plain)
    assert plain.functions == {"NllLossBackward0"}
    assert plain.functions != run.functions


@pytest.mark.parametrize("restore", [False, True], ids=["", "restored callbacks"])
def test_a_resumed_training_is_bitwise_the_uninterrupted(tmp_path: Path, restore: bool) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options["restore_callback_states_from_checkpoint"] = restore
    whole = trained(tmp_path, MesaTuneCallback(FOUR_BITS), **options)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = trained(tmp_path, MesaTuneCallback(FOUR_BITS), resume=checkpoint, **options)
    assert losses(resumed) == losses(whole)
    assert_equal(weights(resumed), weights(whole))


def test_checkpoints_are_those_of_the_plain_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trained(tmp_path / "plain", **options)
    trained(tmp_path / "run", MesaTuneCallback(FOUR_BITS), **options)
    files, others = (
        {path.name for path in tmp_path.glob(f"{name}/checkpoint-2/*")} for name in ("plain", "run")
    )
    assert files == others
    GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "checkpoint-2")
    for name, callbacks in (("plain", [MesaTuneCallback(FOUR_BITS)]), ("run", [])):
        checkpoint = str(tmp_path / name / "checkpoint-2")
        run = trained(tmp_path / name, *callbacks, resume=checkpoint, **options)
        assert run.state.global_step == 4


def test_evaluation_between_steps_changes_no_number(tmp_path: Path) -> None:
    run = trained(tmp_path, MesaTuneCallback(FOUR_BITS), model=text_model(dropout=0.0))
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": Texts()}
    evaluated = trained(tmp_path, MesaTuneCallback(FOUR_BITS), model=text_model(dropout=0.0), **options)
    assert "eval_loss" in evaluated.state.log_history[2]
    assert losses(evaluated) == losses(run)
    assert_equal(weights(evaluated), weights(run))


class Peaks(TrainerCallback):
    """Measures the most live bytes of each step, from its first micro-batch to its update."""

    def __init__(self) -> None:
        self.meter = PeakMeter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.begin(kwargs["model"], kwargs["optimizer"].optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.end()


FAST: dict[str, Any] = {"fast": True, "trials": 0}


def assert_within_a_budget(folder: Path, model: Callable[[], Any], **options: Any) -> Trainer:
    """A training within 3/4 of plain's peak takes no more, says so, begins as plain does, and can resume."""
    plain, run = Peaks(), Peaks()
    options = {"save_strategy": "steps", "save_steps": 2, **options}
    before = trained(folder / "plain", plain, model=model(), **options)
    budget = int(0.75 * max(plain.meter.peaks))

    def callback() -> MesaTuneCallback:
        return MesaTuneCallback(budget=budget, run=folder / "mesa-run", **FAST)

    after = trained(folder, callback(), run, model=model(), **options)
    assert losses(after)[0] == losses(before)[0]
    assert max(run.meter.peaks) <= budget
    (entry,) = [entry for entry in after.state.log_history if "mesa/policy" in entry]
    assert str(entry["mesa/policy"]).startswith(f"{folder / 'mesa-run' / 'policy.txt'} (")
    assert 0 < entry["mesa/saved_bytes"] < entry["mesa/peak_bytes"] <= 1.01 * budget
    assert entry["mesa/noise_ratio"] > 0
    checkpoint = str(folder / "checkpoint-2")
    resumed = trained(folder, callback(), model=model(), resume=checkpoint, **options)
    assert losses(resumed) == losses(after)
    assert_equal(weights(resumed), weights(after))
    return after


@CAMPAIGN
@pytest.mark.parametrize(
    ("layers", "options"),
    # Of one layer, gradients that are kept are too much of the peak.
    [(1, {"activation_checkpointing": True}), (2, {"gradient_accumulation_steps": 2})],
    ids=["checkpointing", "accumulation"],
)
def test_steps_under_a_budget_take_no_more(tmp_path: Path, layers: int, options: dict[str, Any]) -> None:
    assert_within_a_budget(tmp_path, lambda: text_model(layers=layers), **options)


@pytest.mark.slow("training")
def test_a_training_under_a_budget_is_resumed_with_its_policy(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(notice, "_given", set())
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = assert_within_a_budget(tmp_path, text_model, **options)
    checkpoint = str(tmp_path / "checkpoint-2")

    def resumed(policy: mt.Policy | Path) -> Trainer:
        return trained(tmp_path, MesaTuneCallback(policy), resume=checkpoint, **options)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "mesa-tune")
        again = resumed(tmp_path / "mesa-run" / "policy.txt")
    assert losses(again) == losses(whole)
    assert_equal(weights(again), weights(whole))
    with pytest.warns(UserWarning, match="another policy or budget"):
        resumed(FOUR_BITS)


def test_a_budget_is_measured_in_the_steps_of_the_training(tmp_path: Path, monkeypatch: Patch) -> None:
    given = Mock()
    monkeypatch.setattr(compression, "convert_within", given)
    steps: dict[str, Any] = {"bf16": True, "gradient_accumulation_steps": 2, "max_steps": 1}
    run = trained(tmp_path, MesaTuneCallback(budget="6GB"), **steps)
    assert given.call_args.args[0] is run.model
    options = given.call_args.kwargs
    assert (options["budget"], options["autocast"], options["accumulation"]) == ("6GB", "bfloat16", 2)


def test_a_budget_that_plain_fits_trains_bitwise_as_plain(tmp_path: Path) -> None:
    plain = trained(tmp_path)
    run = trained(tmp_path, MesaTuneCallback(budget="1TB", run=tmp_path / "mesa-run", **FAST))
    assert losses(run) == losses(plain)
    assert_equal(weights(run), weights(plain))
    (entry,) = [entry for entry in run.state.log_history if "mesa/policy" in entry]
    assert str(entry["mesa/policy"]) == "nothing is compressed"


class Sharper(TrainerCallback):
    """Makes the attention of the model sharp after its first step, as training may: its noise grows."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            sharpen(kwargs["model"])


@pytest.mark.filterwarnings("ignore:mesa-tune. at step")
@pytest.mark.usefixtures("eager_readings")
@pytest.mark.parametrize(
    "options",
    [{"gradient_checkpointing": True}, pytest.param({"gradient_accumulation_steps": 2}, marks=CAMPAIGN)],
    ids=["checkpointing", "accumulation"],
)
def test_a_reading_changes_the_plan_and_is_logged(tmp_path: Path, options: dict[str, Any]) -> None:
    peaks, seen = Peaks(), Policies()
    trained(tmp_path, peaks, **options)
    budget = int(0.8 * max(peaks.meter.peaks))
    callback = MesaTuneCallback(budget=budget, run=tmp_path / "mesa-run", **FAST)
    run = trained(tmp_path, callback, Sharper(), seen, **options)
    first, second, third = [known(policy).dumps() for policy in seen.policies]
    assert first != second == third
    entries = [entry for entry in run.state.log_history if "mesa/policy" in entry]
    assert [entry["step"] for entry in entries] == [0, 2]
    assert entries[1]["mesa/measured_noise_ratio"] > 0
    assert entries[1]["mesa/noise_ratio"] != entries[0]["mesa/noise_ratio"]
    assert known(callback.compression.saved)["monitor"]["corrections"]


def test_every_step_gives_its_batch_to_retune(tmp_path: Path, monkeypatch: Patch) -> None:
    retune = Mock()
    retune.return_value.configure_mock(plan=None, **{"step.return_value": True})
    monkeypatch.setattr(compression, "Retune", retune)
    run = trained(tmp_path, MesaTuneCallback(budget="70%", retune=2), max_steps=2)
    batches = [call.args[0] for call in retune.return_value.step.call_args_list]
    assert len(batches) == 3  # one before the first
    assert all(batch.keys() >= {"input_ids", "labels"} for batch in batches)
    assert len([entry for entry in run.state.log_history if "mesa/policy" in entry]) == 3


@CAMPAIGN
def test_retune_measures_at_the_start_and_at_intervals(tmp_path: Path, capsys: Capture) -> None:
    def run(*callbacks: TrainerCallback, **options: Any) -> Trainer:
        callback = MesaTuneCallback(budget="70%", retune=2)
        options = {"save_strategy": "steps", "save_steps": 1, **options}
        return trained(tmp_path, callback, *callbacks, **options)

    seen = Policies()
    whole = run(seen)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mesa-tune: ")]
    assert len(said) == 2
    assert all(line.startswith("mesa-tune: predicted peak ") for line in said)
    entries = [entry for entry in whole.state.log_history if "mesa/policy" in entry]
    assert [entry["step"] for entry in entries] == [0, 2]
    assert all(entry["mesa/peak_bytes"] > entry["mesa/saved_bytes"] > 0 for entry in entries)
    assert all(re.fullmatch(r"\d+ rules?, digest \w{6}", str(entry["mesa/policy"])) for entry in entries)
    assert all(policy and policy.rules for policy in seen.policies)
    resumed = run(resume=str(tmp_path / "checkpoint-1"))
    assert losses(resumed) == losses(whole)
    assert_equal(weights(resumed), weights(whole))


def test_bad_arguments_are_refused_at_once() -> None:
    apart: list[dict[str, Any]] = [
        {},
        {"policy": FOUR_BITS, "budget": "6GB"},
        {"policy": FOUR_BITS, "retune": 2},
    ]
    for given in apart:
        with pytest.raises(mt.PolicyError, match="give"):
            MesaTuneCallback(**given)
    amounts: list[dict[str, Any]] = [{"budget": 0.6}, {"budget": "6"}, {"budget": "auto", "retune": 2}]
    for given in amounts:
        with pytest.raises(mt.BudgetError, match="write it like"):
            MesaTuneCallback(**given)


def test_a_callback_outside_a_trainer_says_so() -> None:
    with pytest.raises(mt.RunError, match=r"Trainer\(…, callbacks="):
        MesaTuneCallback(FOUR_BITS).on_train_begin(None, None, None)
