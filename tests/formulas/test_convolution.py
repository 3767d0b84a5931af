"""Convolutions under a policy: the gradient of the input is PyTorch's, and costs no copy of the input."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiler.memory.workspaces import WorkspaceMeter

CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "3 x 3": (nn.Conv2d(16, 32, 3, padding=1), (8, 16, 16, 16)),
    "1 x 1": (nn.Conv2d(16, 32, 1), (8, 16, 16, 16)),
    "with stride": (nn.Conv2d(16, 32, 3, stride=2, padding=1), (8, 16, 16, 16)),
    "dilated": (nn.Conv2d(16, 32, 3, dilation=2), (8, 16, 16, 16)),
    "by channel": (nn.Conv2d(16, 16, 3, padding=1, groups=16), (8, 16, 16, 16)),
    "same, uneven": (nn.Conv2d(16, 16, 4, padding="same"), (8, 16, 16, 16)),
    "transposed": (nn.ConvTranspose2d(16, 32, 3, stride=2, padding=1, output_padding=1), (8, 16, 16, 16)),
    "without bias": (nn.Conv2d(16, 32, 3, bias=False), (8, 16, 16, 16)),
    "1 dimension": (nn.Conv1d(16, 32, 3), (8, 16, 1024)),
    "3 dimensions": (nn.Conv3d(4, 8, 3), (4, 4, 16, 16, 16)),
    "decoded in slices": (nn.Conv2d(16, 16, 3), (8, 16, 16, 16)),
    "unbatched": (nn.Conv3d(4, 8, 3), (4, 16, 16, 16)),
}
OTHER_DTYPES = [("3 x 3", torch.bfloat16), ("3 x 3", torch.float64), ("transposed", torch.bfloat16)]
CHANNELS_LAST = ("3 x 3", "1 x 1", "with stride", "by channel", "same, uneven", "unbatched")
"""Not the transposed one: the place of its input is an expanded scalar, of no layout."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_gradients_of_input_and_bias_are_bitwise_those_of_pytorch(
    name: str, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "decoded in slices":
        monkeypatch.setattr("mesa_tune.engine.saved.LARGE", 1)
    check(name, frozen=frozen)


@pytest.mark.parametrize(("name", "dtype"), OTHER_DTYPES, ids=str)
def test_also_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


@pytest.mark.parametrize("name", CHANNELS_LAST)
def test_also_with_channels_last(name: str) -> None:
    check(name, layout=torch.channels_last)


def check(
    name: str,
    dtype: torch.dtype = torch.float32,
    layout: torch.memory_format = torch.contiguous_format,
    frozen: bool = False,
) -> None:
    """The gradients are bitwise those of the layer before it was converted."""
    module, shape = CASES[name]
    model = nn.Sequential(copy.deepcopy(module)).to(dtype)
    model[0].weight.requires_grad_(not frozen)
    x = torch.randn(shape).to(dtype)
    x = x.contiguous(memory_format=layout) if x.dim() == 4 else x
    plain = _gradients(model, x)
    mt.convert(model, mt.Policy.uniform(level=16), seed=0)
    for expected, gradient in zip(plain, _gradients(model, x), strict=True):
        assert torch.equal(expected, gradient)


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_(True)
    wanted = [x, *(parameter for name, parameter in model.named_parameters() if name == "0.bias")]
    return list(torch.autograd.grad(model(x).square().sum(), wanted))


def test_the_gradient_of_the_input_copies_no_input() -> None:
    model = nn.Sequential(nn.Conv2d(16, 1, 3, bias=False)).requires_grad_(False)
    mt.convert(model, mt.Policy.uniform(level=16))
    x = torch.randn(64, 16, 32, 32, requires_grad=True)
    y = model(x)
    with WorkspaceMeter([x, y]) as meter:
        y.sum().backward()
    # x, dx and what oneDNN rearranges; a copy of x would make it four.
    assert meter.most < 3.5 * x.nbytes
