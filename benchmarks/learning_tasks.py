"""The tasks of `learning.py`: a model, its data, how it is trained, and its score on data it has not seen."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accuracy import load_example
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import mesa_tune as mt

DIGITS = load_example()
LENGTH = 64  # bytes that the GPT sees
WIDTH, DEPTH, HEADS = 64, 2, 2
LEARNING_RATE = 3e-3
WINDOWS = 512  # validation texts of LENGTH bytes, the same for all trainings


class Task(NamedTuple):
    """What is trained: `steps` of `workload` under a one-cycle schedule with this peak learning rate.

    `score`: of a model, on data that it was not trained on; `metric`: its name; `relative`: whether the
    difference of two scores is relative to the plain one. `uninformed`: the score of a guess that ignores
    the input.
    """

    title: str
    workload: mt.Workload
    steps: int
    learning_rate: float
    score: Callable[[nn.Module], float]
    metric: str
    relative: bool
    uninformed: Callable[[], float]


class Trained(NamedTuple):
    """A model after training, in training mode, and the next number of the random generator.

    `drawn` is equal for equal seeds if as many batches were drawn and nothing else drew a number.
    """

    model: nn.Module
    drawn: float


def train(
    task: Task,
    policy: mt.Policy | None,
    seed: int,
    watch: Callable[[int, nn.Module], None] = lambda step, model: None,
) -> Trained:
    """Train from scratch. The seed determines initialization and batches, with and without a policy.

    `watch`: called with the number of steps taken and the model before each step and after the last.
    """
    torch.manual_seed(seed)
    model = task.workload.model().train()
    compressed = DIGITS.compression(model, policy, seed)
    optimizer = task.workload.make_optimizer(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, task.learning_rate, total_steps=task.steps, pct_start=DIGITS.WARMUP
    )
    for step in range(task.steps):
        watch(step, model)
        batch = task.workload.batch(task.workload.batch_size)
        with compressed():
            value = _loss(task, model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    watch(task.steps, model)
    drawn = torch.rand(()).item()
    if policy is not None:
        mt.revert(model)
    return Trained(model, drawn)


def _loss(task: Task, model: nn.Module, batch: object) -> Tensor:
    assert task.workload.loss is not None
    return task.workload.loss(model, batch)


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes of the modules of Python's standard library: for training, and of every tenth."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [file for index, file in enumerate(files) if index % 10], files[::10]
    training, validation = (b"".join(file.read_bytes() for file in part) for part in parts)
    return _tokens(training), _tokens(validation)


def _tokens(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def gpt() -> nn.Module:
    sizes: dict[str, Any] = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS}
    config = GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes)
    config.update({"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})
    return GPT2LMHeadModel(config)


def text_batch(batch_size: int) -> Tensor:
    text = texts()[0]
    return _windows(text, torch.randint(len(text) - LENGTH, (batch_size,)))


def _windows(text: Tensor, starts: Tensor) -> Tensor:
    """Return LENGTH + 1 bytes from each of `starts`: (starts, LENGTH + 1)."""
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


def text_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module) -> float:
    """Return the mean loss per byte, in nats."""
    text = texts()[1]
    batch = _windows(text, torch.linspace(0, len(text) - LENGTH - 1, WINDOWS).long())
    model.eval()
    return text_loss(model, batch).item()


def unigram_loss() -> float:
    """Return the validation loss of the frequencies of bytes in the training text."""
    counts = [torch.bincount(text, minlength=256).double() for text in texts()]
    frequencies = (counts[0] + 1) / (counts[0] + 1).sum()
    return float(-(counts[1] * frequencies.log()).sum() / counts[1].sum())


TASKS = {
    "digits": Task(
        "ViT of 6 blocks on images of handwritten digits",
        mt.Workload(DIGITS.model, DIGITS.batch, DIGITS.loss, DIGITS.optimizer, batch_size=DIGITS.BATCH_SIZE),
        480,
        DIGITS.LEARNING_RATE,
        DIGITS.accuracy,
        "test accuracy",
        relative=False,
        uninformed=lambda: 1 / DIGITS.CLASSES,
    ),
    "text": Task(
        "GPT-2 of 2 blocks on the bytes of Python's standard library",
        mt.Workload(gpt, text_batch, text_loss, DIGITS.optimizer, batch_size=16),
        800,
        LEARNING_RATE,
        validation_loss,
        "validation loss",
        relative=True,
        uninformed=unigram_loss,
    ),
}
