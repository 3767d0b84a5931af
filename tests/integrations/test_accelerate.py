"""`convert` for Accelerate, in real training loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import mesa_tune as mt
from mesa_tune.conversion.model import conversion_of
from mesa_tune.integrations import compression
from mesa_tune.integrations.accelerate import convert
from tests.builders import ViT
from tests.conftest import forget_accelerators
from tests.integrations.conftest import PeakMeter

FOUR_BITS = mt.Policy.uniform(level=16)
EXACT = mt.Policy.parse("# mesa-tune policy 1\n")


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


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def checkpointed_loss(model: nn.Module, batch: Any) -> Tensor:
    logits: Any = checkpoint(model, batch[0], use_reentrant=False)
    return F.cross_entropy(logits, batch[1])


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
        depth: int = 2,
    ) -> None:
        self.loss_of = checkpointed_loss if checkpoints else loss_of
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


OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"checkpoints": True}, {"mixed_precision": "bf16"}, {"accumulation": 2}],
    ids=["", "checkpointing", "bf16", "accumulation"],
)


def converted(early: bool = False, options: dict[str, Any] | None = None, **given: Any) -> Loop:
    """A loop whose model is converted with the arguments `given`, before `prepare` or after it."""
    loop = Loop(**(options or {}), early=given if early else None)
    if not early:
        loop.convert(**given)
    return loop


PLACES = pytest.mark.parametrize("early", [True, False], ids=["before prepare", "after prepare"])


@PLACES
@OPTIONS
def test_the_first_loss_is_plains_and_later_ones_are_not(options: dict[str, Any], early: bool) -> None:
    plain, loop = Loop(**options).train(2), converted(early, options, policy=FOUR_BITS).train(2)
    assert loop.losses[0] == plain.losses[0]
    assert loop.losses[-1] != plain.losses[-1]
    assert loop.losses[-1] == pytest.approx(plain.losses[-1], rel=0.05)


@PLACES
@OPTIONS
def test_an_exact_policy_trains_bitwise_as_plain(options: dict[str, Any], early: bool) -> None:
    plain, loop = Loop(**options).train(), converted(early, options, policy=EXACT).train()
    assert loop.losses == plain.losses
    assert all(map(torch.equal, loop.plain.parameters(), plain.plain.parameters()))


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
    text = "# mesa-tune policy 1\n# predicted: peak 5.71 GB, noise ratio 2.0e-02\n" + FOUR_BITS.dumps()
    loop = converted(policy=mt.Policy.parse(text))
    (entry,) = loop.notes.logged
    assert entry.pop("mesa/policy").startswith(f"{len(FOUR_BITS.rules)} rules, digest ")
    assert entry == {"mesa/peak_bytes": 5.71e9, "mesa/noise_ratio": 0.02}


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({"depth": 1}, True),
        ({"depth": 1}, False),
        ({"depth": 1, "mixed_precision": "bf16"}, True),  # `prepare` puts autocast around the forward
        ({"depth": 1, "mixed_precision": "bf16"}, False),
        ({"depth": 1, "checkpoints": True}, True),
        ({"depth": 1, "checkpoints": True}, False),
        ({"accumulation": 2}, True),  # of one block, gradients are too much of the peak
        ({"accumulation": 2}, False),
    ],
    ids=[
        f"{kind} {place}"
        for kind in ("", "bf16", "checkpointing", "accumulation")
        for place in ("before", "after")
    ],
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


def test_a_model_is_measured_on_the_device_of_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, measured = Loop(), ViT()
    monkeypatch.setattr(compression, "auto", lambda model, *_, **__: model)
    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))
    convert(loop.accelerator, measured, budget="6GB", batches=[], loss=loss_of, optimizer=loop.optimizer)
    assert all(parameter.is_meta for parameter in measured.parameters())


def test_a_budget_without_a_loss_is_refused() -> None:
    loop = Loop()
    with pytest.raises(mt.PolicyError, match="loss and optimizer"):
        convert(loop.accelerator, loop.model, budget="6GB", batches=loop.loader)
