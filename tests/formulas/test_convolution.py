"""Convolutions under a policy: the gradient of the input is PyTorch's, and costs no copy of the input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiler.memory.workspaces import WorkspaceMeter

CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "3 x 3": (nn.Conv2d(16, 32, 3, padding=1), (8, 16, 32, 32)),
    "1 x 1": (nn.Conv2d(16, 32, 1), (8, 16, 32, 32)),
    "with stride": (nn.Conv2d(16, 32, 3, stride=2, padding=1), (8, 16, 32, 32)),
    "dilated": (nn.Conv2d(16, 32, 3, dilation=2), (8, 16, 32, 32)),
    "by channel": (nn.Conv2d(16, 16, 3, padding=1, groups=16), (8, 16, 32, 32)),
    "same, uneven": (nn.Conv2d(16, 16, 4, padding="same"), (8, 16, 32, 32)),
    "transposed": (nn.ConvTranspose2d(16, 32, 3, stride=2, padding=1, output_padding=1), (8, 16, 32, 32)),
    "without bias": (nn.Conv2d(16, 32, 3, bias=False), (8, 16, 32, 32)),
    "1 dimension": (nn.Conv1d(16, 32, 3), (8, 16, 1024)),
    "3 dimensions": (nn.Conv3d(4, 8, 3), (4, 4, 16, 16, 16)),
    "decoded in slices": (nn.Conv2d(16, 16, 3), (32, 16, 96, 96)),
    "unbatched": (nn.Conv3d(4, 8, 3), (4, 32, 32, 32)),
    "unbatched, channels last": (nn.Conv3d(4, 8, 3), (4, 32, 32, 32)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_gradients_of_input_and_bias_are_bitwise_those_of_pytorch(
    name: str, dtype: torch.dtype, layout: torch.memory_format, frozen: bool
) -> None:
    if name == "transposed" and layout is torch.channels_last:
        pytest.skip("the input's place is an expanded scalar, of no layout")
    module, shape = CASES[name]
    model = nn.Sequential(module).to(dtype)
    module.weight.requires_grad_(not frozen)
    x = torch.randn(shape).to(dtype)
    x = x.contiguous(memory_format=layout) if x.dim() == 4 else x
    plain = _gradients(model, x)
    mt.convert(model, mt.Policy.uniform(level=16), seed=0)
    converted = _gradients(model, x)
    mt.revert(model)
    for expected, gradient in zip(plain, converted, strict=True):
        assert torch.equal(expected, gradient)


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_(True)
    bias: Any = model.get_parameter("0.bias") if model[0].bias is not None else None  # type: ignore[index]
    wanted = [x] if bias is None else [x, bias]
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
