"""`convert` for Accelerate, in real training loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import mesa_tune as mt
from mesa_tune.conversion.model import conversion_of
from mesa_tune.integrations import compression
from mesa_tune.integrations.accelerate import convert
from tests.builders import Patch, ViT, cross_entropy
from tests.conftest import forget_accelerators
from tests.integrations.conftest import CAMPAIGN, EXACT, FOUR_BITS, LOGGED, PREDICTED, PeakMeter


class Notes(GeneralTracker):  # type: ignore[misc]
    """A tracker that notes what it gets."""

    name = "notes"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append(values)


def checkpointed_loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(lambda x: checkpoint(model, x, use_reentrant=False), batch)  # type: ignore[arg-type]


class Loop:
    """A training loop as Accelerate's documentation writes it; `losses` of all micro-batches.

    `early`: arguments of `convert`, which is called before `prepare`; by default it is not called.
    """

    def __init__(
        self,
        mixed_precision: str = "no",
        accumulation: int = 1,
        checkpoints: bool = False,
        early: dict[str, Any] | None = None,
        depth: int = 1,
    ) -> None:
        self.loss_of = checkpointed_loss if checkpoints else cross_entropy
        forget_accelerators()
        torch.manual_seed(5)
        self.notes, self.peaks, self.losses = Notes(), PeakMeter(), [0.0][:0]
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=accumulation,
            log_with=self.notes,
        )
        self.accelerator.init_trackers("test")
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(96, 24, 16, generator=generator)
        labels = torch.randint(0, 10, (96,), generator=generator)
        self.loader: Any = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
        torch.manual_seed(0)
        self.model = self.plain = ViT(depth=depth)
        self.optimizer: Any = torch.optim.AdamW(self.plain.parameters(), 1e-3)
        if early is not None:
            self.convert(**early)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.model, self.optimizer, self.loader
        )

    def convert(self, policy: mt.Policy | None = None, **search: Any) -> None:
        """Convert the model; a budget gets what the loop has now, which `prepare` wraps."""
        if search:
            search |= {"batches": self.loader, "loss": self.loss_of, "optimizer": self.optimizer}
        assert convert(self.accelerator, self.model, policy, **search) is self.model

    def train(self, epochs: int = 1, compress: mt.Policy | None = None) -> Loop:
        for _ in range(epochs):
            for batch in self.loader:
                self.peaks.begin(self.plain, self.optimizer.optimizer, batch)
                with self.accelerator.accumulate(self.model):
                    loss = self.loss_of(self.model, batch)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())
                self.peaks.end()
        return self


def converted(early: bool = False, options: dict[str, Any] | None = None, **given: Any) -> Loop:
    """A loop whose model is converted with the arguments `given`, before `prepare` or after it."""
    loop = Loop(**(options or {}), early=given if early else None)
    if not early:
        loop.convert(**given)
    return loop


PLACES = pytest.mark.parametrize("early", [True, False], ids=["before prepare", "after prepare"])


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({}, True),
        ({"checkpoints": True}, False),
        ({"mixed_precision": "bf16"}, True),  # `prepare` puts autocast around the forward
        ({"mixed_precision": "bf16"}, False),
        ({"accumulation": 2}, True),
    ],
    ids=["before", "checkpointing, after", "bf16, before", "bf16, after", "accumulation, before"],
)
def test_an_exact_policy_trains_as_plain_and_4_bits_nearly(options: dict[str, Any], early: bool) -> None:
    plain, exact = Loop(**options).train(2), converted(early, options, policy=EXACT).train(2)
    assert exact.losses == plain.losses
    assert all(map(torch.equal, exact.plain.parameters(), plain.plain.parameters()))
    loop = converted(early, options, policy=FOUR_BITS).train(2)
    assert loop.losses[0] == plain.losses[0]
    assert loop.losses[-1] != plain.losses[-1]
    assert loop.losses[-1] == pytest.approx(plain.losses[-1], rel=0.05)


@PLACES
def test_a_resumed_training_is_bitwise_the_uninterrupted(tmp_path: Path, early: bool) -> None:
    whole = converted(early, policy=FOUR_BITS).train()
    whole.accelerator.save_state(str(tmp_path))
    first = len(whole.losses)
    whole.train()
    resumed = converted(early, policy=FOUR_BITS)
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.train().losses == whole.losses[first:]
    assert all(map(torch.equal, resumed.plain.parameters(), whole.plain.parameters()))


def test_trackers_get_the_policy_and_its_predictions() -> None:
    loop = converted(policy=mt.Policy.parse(PREDICTED + FOUR_BITS.dumps()))
    (entry,) = loop.notes.logged
    assert entry.pop("mesa/policy").startswith(f"{len(FOUR_BITS.rules)} rules, digest ")
    assert entry == LOGGED


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({"checkpoints": True}, True),
        pytest.param({"mixed_precision": "bf16"}, True, marks=CAMPAIGN),
        pytest.param({"mixed_precision": "bf16"}, False, marks=CAMPAIGN),
        # Of one block, gradients are too much of the peak.
        pytest.param({"accumulation": 2, "depth": 2}, False, marks=CAMPAIGN),
    ],
    ids=["checkpointing, before", "bf16, before", "bf16, after", "accumulation, after"],
)
def test_steps_under_a_budget_take_no_more_and_are_resumed(
    tmp_path: Path, options: dict[str, Any], early: bool
) -> None:
    plain = Loop(**options).train()
    budget = int(0.8 * max(plain.peaks.peaks))
    search = {"budget": budget, "run": tmp_path / "run", "fast": True, "trials": 0}
    loop = converted(early, options, **search).train()
    assert conversion_of(loop.accelerator.unwrap_model(loop.model)) is not None
    assert loop.losses[0] == plain.losses[0]
    assert max(loop.peaks.peaks) <= budget
    assert loop.notes.logged[0]["mesa/peak_bytes"] <= 1.01 * budget
    loop.accelerator.save_state(str(tmp_path / "state"))
    first = len(loop.losses)
    loop.train()
    resumed = converted(early, options, **search)
    resumed.accelerator.load_state(str(tmp_path / "state"))
    assert resumed.train().losses == loop.losses[first:]
    assert all(map(torch.equal, resumed.plain.parameters(), loop.plain.parameters()))


def test_a_model_is_measured_on_the_device_and_in_the_steps_of_its_training(monkeypatch: Patch) -> None:
    loop, measured, given = Loop(mixed_precision="bf16", accumulation=2), ViT(depth=1), Mock()
    monkeypatch.setattr(compression, "convert_within", given)
    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))
    convert(
        loop.accelerator, measured, budget="6GB", batches=[], loss=cross_entropy, optimizer=loop.optimizer
    )
    assert all(parameter.is_meta for parameter in measured.parameters())
    options = given.call_args.kwargs
    assert (options["budget"], options["autocast"], options["accumulation"]) == ("6GB", "bfloat16", 2)


def test_a_budget_without_a_loss_is_refused() -> None:
    loop = Loop()
    with pytest.raises(mt.PolicyError, match="loss and optimizer"):
        convert(loop.accelerator, loop.model, budget="6GB", batches=loop.loader)
