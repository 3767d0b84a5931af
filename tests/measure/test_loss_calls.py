"""The source of a loss, run again, computes the loss: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.errors import RunError
from mesa_tune.measure.recording.loss_calls import LossCalls

LABELS = torch.tensor([0, 2, 1])
WEIGHT = torch.rand(3)


def in_place(output: dict[str, Tensor]) -> Tensor:
    loss: Tensor = output["x"].square().mean()
    loss.add_(output["x"].abs().mean())
    return loss


def detached(output: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        weight = output["x"].softmax(1)
    return (weight * output["x"]).sum()


def several_results(output: dict[str, Tensor]) -> Any:
    largest, _ = output["x"].max(dim=1)
    return (largest - output["x"][..., 0]).square().sum() / output["x"].T.norm()


LOSSES: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "cross entropy": lambda output: F.cross_entropy(output["x"], LABELS, weight=WEIGHT),
    "the output itself": lambda output: output["x"],
    "half of it": lambda output: output["x"].mean() / 2,
    "unused calls": lambda output: [output["x"].exp(), output["x"].sum()][1],
    "indices": lambda output: output["x"][0:2, [0, 2]].sum(),
    "infinity": lambda output: output["x"].masked_fill(WEIGHT > 2, float("-inf")).logsumexp(0).sum(),
    "dtype and device": lambda output: output["x"].to(torch.device("cpu"), torch.float64).sum(),
    "in place": in_place,
    "without gradients": detached,
    "several results": several_results,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_source_computes_the_loss(name: str) -> None:
    x = torch.randn(3, 3, requires_grad=True)
    output = {"x": x * 1}
    with LossCalls(None) as calls:
        loss = LOSSES[name](output)
    source = calls.source({"args": []}, output, loss, 2)
    names = {"torch": torch, "F": F, "output": {"x": x * 1}, "others": source.others}
    *lines, value = source.written()
    exec("\n".join([*lines, f"result = {value}"]), names)
    result = names["result"]
    assert isinstance(result, Tensor)
    factor = 2 if name == "half of it" else 1  # left to ACCUMULATION
    torch.testing.assert_close(result, factor * loss)
    expected, found = (torch.autograd.grad(each.sum(), x)[0] for each in (factor * loss, result))
    torch.testing.assert_close(found, expected)
    assert "exp" not in "".join(lines) + value.replace("logsumexp", "")


def test_a_result_that_is_used_once_has_no_name() -> None:
    output = torch.randn(3, 3)
    with LossCalls(None) as calls:
        loss = F.cross_entropy(output.view(-1, 3), LABELS)
    source = calls.source({"args": [LABELS]}, output, loss, 1)
    assert source.written() == ['F.cross_entropy(output.view(-1, 3), batch["args"][0])']


def test_what_cannot_be_written() -> None:
    output = torch.randn(3, 3)
    with LossCalls(None) as calls:
        loss = output.sum() * torch.ones(1, requires_grad=True)
    with pytest.raises(RunError, match="a trained tensor that is neither"):
        calls.source({}, output, loss, 1)
