"""Convolutions under a policy: the gradient of the input is PyTorch's, and costs no copy of the input."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure.memory.meter import Meter

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
# Not the transposed one: the place of its input is an expanded scalar, of no layout.
CHANNELS_LAST = ("3 x 3", "1 x 1", "with stride", "by channel", "same, uneven", "unbatched")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in CASES for how in ("", "frozen")),
        *(("3 x 3", torch.bfloat16), ("3 x 3", torch.float64), ("transposed", torch.bfloat16)),
        *((name, torch.channels_last) for name in CHANNELS_LAST),
    ],
    ids=str,
)
def test_gradients_of_input_and_bias_are_bitwise_those_of_pytorch(
    name: str, how: str | torch.dtype | torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "decoded in slices":
        monkeypatch.setattr("mesa_tune.engine.saved.LARGE", 1)
    module, shape = CASES[name]
    dtype = how if isinstance(how, torch.dtype) else torch.float32
    model = nn.Sequential(copy.deepcopy(module)).to(dtype)
    model[0].weight.requires_grad_(how != "frozen")
    x = torch.randn(shape).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if how is torch.channels_last and x.dim() == 4 else x
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
    with Meter() as meter:
        meter.count_older([x, y])
        y.sum().backward()
    # x, dx and what oneDNN rearranges; a copy of x would make it four.
    assert meter.peak < 3.5 * x.nbytes
