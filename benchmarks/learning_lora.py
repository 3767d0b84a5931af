"""A task of `learning.py`: its GPT of the standard library's modules is trained on other text, with LoRA.

The other text is the package `encodings`: tables of characters and their codecs. The GPT is trained once,
with a seed of its own, and kept in `build/learning/`.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from common import ROOT, code_of
from learning_tasks import DIGITS, LENGTH, TASKS, WINDOWS, Task, text_loss, train
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import mesa_tune as mt

SEED = 5000
TARGETS = ["c_attn", "c_fc", "c_proj"]


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes of the package's modules: for training, and of every tenth."""
    files = sorted(Path(sysconfig.get_path("stdlib"), "encodings").glob("*.py"))
    parts = [file for index, file in enumerate(files) if index % 10], files[::10]
    training, validation = (b"".join(file.read_bytes() for file in part) for part in parts)
    return _tokens(training), _tokens(validation)


def _tokens(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


@cache
def trained() -> dict[str, Tensor]:
    """Return the weights of the GPT after plain training."""
    version = code_of((), Path(__file__).with_name("learning_tasks.py"))
    path = ROOT / "build" / "learning" / f"gpt-{version}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(train(TASKS["text"], None, SEED).model.state_dict(), path)
    weights: dict[str, Tensor] = torch.load(path)
    return weights


def adapted() -> nn.Module:
    """Return the trained GPT with new adapters of rank 8."""
    model = TASKS["text"].workload.model()
    model.load_state_dict(trained())
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, fan_in_fan_out=True))


def batch(batch_size: int) -> Tensor:
    text = texts()[0]
    return _windows(text, torch.randint(len(text) - LENGTH, (batch_size,)))


def _windows(text: Tensor, starts: Tensor) -> Tensor:
    """Return LENGTH + 1 bytes from each of `starts`: (starts, LENGTH + 1)."""
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


@torch.no_grad()
def validation_loss(model: nn.Module) -> float:
    """Return the mean loss per byte, in nats."""
    text = texts()[1]
    windows = _windows(text, torch.linspace(0, len(text) - LENGTH - 1, WINDOWS).long())
    model.eval()
    return text_loss(model, windows).item()


LORA = Task(
    "LoRA of that GPT, trained further on the package `encodings`",
    mt.Workload(adapted, batch, text_loss, DIGITS.optimizer, batch_size=16),
    400,
    3e-3,
    validation_loss,
    "validation loss",
    relative=True,
    uninformed=lambda: validation_loss(adapted()),
)
