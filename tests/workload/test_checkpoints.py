from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from mesa_tune.measure.saved_limit import LimitMeter
from mesa_tune.workload.checkpoints import with_checkpoints
from tests.builders import gpt2
from tests.step_memory import Composed


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        layer_type="basic",
        id2label={n: str(n) for n in range(3)},
    )
    return transformers.ResNetForImageClassification(config)


def tokens(model: nn.Module) -> Any:
    ids = torch.arange(256).reshape(4, 64) % 97
    return model(ids, labels=ids).loss  # with dropout


def images(model: nn.Module) -> Any:
    return model(torch.ones(4, 3, 32, 32), labels=torch.arange(4) % 3).loss


def nested() -> nn.Module:
    """Lists in a list, whose elements are called with keywords."""

    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(model: Any, x: Tensor) -> Tensor:
        for first, second in model.parts:
            x = second(input=first(input=x))
        return x

    return Composed(forward, parts=nn.ModuleList(nn.ModuleList([part(), part()]) for _ in range(2)))


def two() -> nn.Module:
    """No list: two parts."""
    parts = (nn.TransformerEncoderLayer(64, 2, 64, batch_first=True) for _ in range(2))
    return Composed(lambda m, x: m.second(m.first(x[None])), first=next(parts), second=next(parts))


def square(model: nn.Module) -> Any:
    return model(torch.ones(256, 64)).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], float]] = {
    "GPT-2": (lambda: gpt2(32, 3, vocab_size=97), tokens, 0.6),
    "ResNet": (resnet, images, 0.9),
    "nested lists": (nested, square, 0.5),
    "children": (two, square, 1.0),
}


@pytest.mark.parametrize(("make", "loss_of", "share"), CASES.values(), ids=list(CASES))
def test_gradients_are_those_of_the_plain_model_with_less_saved(
    make: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Tensor], share: float
) -> None:
    torch.manual_seed(0)
    model = make()
    plain, plain_bytes = gradients(model, loss_of)
    with with_checkpoints(model):
        again, bytes_ = gradients(model, loss_of)
    assert all(map(torch.equal, plain, again))
    assert bytes_ < share * plain_bytes
    assert not any("forward" in vars(module) for module in model.modules())


def gradients(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> tuple[list[Tensor], int]:
    torch.manual_seed(1)
    with LimitMeter("1B") as meter:
        loss_of(model).backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found, meter.most
