"""Layers whose backward uses what is packed, in one pass or in pieces: the gradients of a whole copy."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.codecs import quantize
from mesa_tune.engine import saved
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.ops import fused as ops
from tests.builders import Calling
from tests.step_memory import Composed


def rearranged(layer: nn.Module) -> nn.Module:
    """A layer on images whose channels lie next to one another."""
    return nn.Sequential(Calling(lambda x: x.contiguous(memory_format=torch.channels_last)), layer)


def product(function: Callable[..., Tensor], *shape: int) -> nn.Module:
    """A function of the input and a matrix that is computed, or, where that is a matrix product, a weight."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return function(x, model.weight if shape[0] == x.shape[-1] else model.weight.cos())

    return Composed(forward, weight=nn.Parameter(0.5 + torch.rand(shape)))


def loss(**arguments: Any) -> nn.Module:
    """Cross-entropy for class indices, of which some are ignored."""

    def forward(x: Tensor) -> Tensor:
        target = torch.arange(x.numel() // x.shape[1]).view(x.shape[0], *x.shape[2:]) % x.shape[1]
        return F.cross_entropy(x, target.masked_fill(target == 3, -100), **arguments)

    return Calling(forward)


WEIGHTED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear-48": (nn.Linear(48, 8), (7, 331, 48)),
    "linear-250": (nn.Linear(250, 8), (7, 331, 250)),
    "conv": (nn.Conv2d(8, 6, 3, padding=1), (6, 8, 16, 18)),
    "conv-same": (nn.Conv1d(6, 4, 4, padding="same"), (64, 6, 40)),
    "conv-transposed": (nn.ConvTranspose2d(8, 6, 3, stride=2, bias=False), (5, 8, 16, 16)),
    "layer-norm": (nn.LayerNorm([4, 30]), (5, 67, 4, 30)),
    "layer-norm-without-weights": (nn.LayerNorm(48, elementwise_affine=False), (7, 331, 48)),
    "rms-norm": (nn.RMSNorm(48), (7, 331, 48)),
    "conv-channels-last": (rearranged(nn.Conv2d(8, 6, 3, padding=1)), (6, 8, 16, 18)),
    "batch-norm": (nn.BatchNorm2d(8), (10, 8, 16, 18)),
    "batch-norm-channels-last": (rearranged(nn.BatchNorm2d(8)), (10, 8, 16, 18)),
    "batch-norm-without-weights": (nn.BatchNorm1d(32, affine=False), (64, 32, 20)),
    "batch-norm-fixed": (nn.BatchNorm2d(8).eval(), (10, 8, 16, 18)),
    "group-norm": (nn.GroupNorm(4, 8), (10, 8, 16, 18)),
    "softmax": (nn.Softmax(-1), (10, 3, 20, 32)),
    "softmax-dim": (nn.Softmax(2), (10, 3, 20, 32)),
    "loss": (loss(), (67, 48)),
    "loss-weighted": (loss(weight=torch.rand(48), reduction="sum"), (67, 48)),
    "loss-of-rows": (loss(reduction="none"), (67, 48)),
    "loss-square": (loss(), (13, 16, 16)),
    "loss-smoothed": (loss(label_smoothing=0.1, weight=torch.rand(16)), (13, 16, 20)),
    "loss-each": (loss(reduction="none"), (13, 16, 20)),
    "product": (Calling(lambda x: x @ (x.mT * 0.5)), (9, 4, 30, 32)),
    "conv-grouped": (nn.Conv3d(8, 4, 2, groups=2), (9, 8, 8, 4, 4)),
}


AUTOCAST = (
    *("linear-48", "conv-same", "conv-transposed", "layer-norm", "rms-norm", "batch-norm", "softmax-dim"),
    *("batch-norm-channels-last", "group-norm", "loss", "loss-smoothed", "product", "conv-grouped"),
)


def gradients(
    layer: nn.Module,
    shape: tuple[int, ...],
    large: int,
    monkeypatch: pytest.MonkeyPatch,
    level: int = 4,
    autocast: bool = False,
) -> tuple[list[Tensor], int]:
    """Of the weights and the input, and how many tensors were decoded in pieces."""
    used: list[int] = []
    whole_run = SavedTensor._decoded

    def counted(self: SavedTensor, *sizes: Any) -> Iterator[tuple[int, Tensor]]:
        used.append(1)
        return whole_run(self, *sizes)

    torch.manual_seed(0)
    model, x = nn.Sequential(layer), torch.randn(shape, requires_grad=True)
    mt.convert(model, mt.Policy.uniform(level), seed=0, min_elements=0)
    with monkeypatch.context() as patch:
        patch.setattr(SavedTensor, "_decoded", counted)
        patch.setattr(saved, "LARGE", large)
        patch.setattr(quantize, "LARGEST_GROUP", 0)  # what goes backward in one pass needs no pieces
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x * 1.0)
        weights = torch.linspace(1, 2, y.numel()).view(y.shape)
        found = torch.autograd.grad((y.float() ** 2 * weights).sum(), [*layer.parameters(), x])
    return list(found), len(used)


ADDMM = partial(torch.addmm, torch.ones(30), alpha=0.5)
ADDCMUL = partial(torch.addcmul, torch.ones(48), value=0.5)
FUSED: dict[str, tuple[ops.Fused, nn.Module, tuple[int, ...]]] = {
    "layer": (ops.NORM_BACKWARD, nn.LayerNorm([4, 12]), (7, 331, 4, 12)),
    "layer-without-weights": (ops.NORM_BACKWARD, nn.LayerNorm(48, elementwise_affine=False), (7, 331, 48)),
    "layer-without-bias": (ops.NORM_BACKWARD, nn.LayerNorm(48, bias=False), (7, 331, 48)),
    "rms": (ops.NORM_BACKWARD, nn.RMSNorm(48), (7, 331, 48)),
    "frozen": (ops.NORM_BACKWARD, nn.LayerNorm(48).requires_grad_(False), (7, 331, 48)),
    "batch": (ops.BATCH_NORM_BACKWARD, nn.BatchNorm2d(8), (10, 8, 16, 18)),
    "batch-without-weights": (ops.BATCH_NORM_BACKWARD, nn.BatchNorm1d(30, affine=False), (64, 30)),
    "batch-channels-last": (ops.BATCH_NORM_BACKWARD, rearranged(nn.BatchNorm2d(8)), (10, 8, 16, 18)),
    "batch-fixed": (ops.BATCH_NORM_BACKWARD, nn.BatchNorm2d(8).eval(), (10, 8, 16, 18)),
    "batch-frozen": (ops.BATCH_NORM_BACKWARD, nn.BatchNorm2d(8).requires_grad_(False), (10, 8, 16, 18)),
    "instance": (ops.BATCH_NORM_BACKWARD, nn.InstanceNorm2d(8, affine=True), (10, 8, 16, 18)),
    "softmax": (ops.SOFTMAX_BACKWARD, nn.Softmax(-1), (10, 3, 20, 32)),
    "softmax-of-a-row": (ops.SOFTMAX_BACKWARD, nn.Softmax(0), (500,)),
    "loss": (ops.CROSS_ENTROPY_BACKWARD, loss(), (67, 48)),
    "loss-weighted": (ops.CROSS_ENTROPY_BACKWARD, loss(weight=torch.rand(48), reduction="sum"), (67, 48)),
    "loss-of-rows": (ops.CROSS_ENTROPY_BACKWARD, loss(reduction="none"), (67, 48)),
    "matmul": (ops.LINEAR_BACKWARD, product(torch.matmul, 48, 30), (7, 31, 48)),
    "addmm": (ops.LINEAR_BACKWARD, product(ADDMM, 48, 30), (77, 48)),
    "mul": (ops.DEQUANTIZE_MUL, product(torch.mul, 77, 48), (77, 48)),
    "div": (ops.DEQUANTIZE_MUL, product(torch.div, 77, 48), (77, 48)),
    "addcmul": (ops.DEQUANTIZE_MUL, product(ADDCMUL, 77, 48), (77, 48)),
    "glu": (ops.DEQUANTIZE_MUL, nn.GLU(), (77, 48)),
}


@pytest.mark.parametrize("name", FUSED)
def test_gradients_in_one_pass_are_those_in_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    expected, layer, shape = FUSED[name]
    fused = quantize.fused

    def run(possible: bool) -> list[Tensor]:
        def counted(op: ops.Fused, *arguments: Any) -> Any:
            if op is expected:
                used.append(possible)
            return fused(op, *arguments) if possible or op is not expected else None

        monkeypatch.setattr(quantize, "fused", counted)
        torch.manual_seed(0)
        x, own = torch.randn(shape, requires_grad=True), copy.deepcopy(layer)
        model = mt.convert(nn.Sequential(own), mt.Policy.uniform(4), seed=0, min_elements=0)
        y = model(x * 1.0)
        wanted = [each for each in own.parameters() if each.requires_grad]
        return list(torch.autograd.grad((y * torch.randn(y.shape)).sum(), [*wanted, x]))

    for one, other in zip(run(True), run(False), strict=True):
        assert one.stride() == other.stride()
        assert (one - other).norm() < 1e-6 * other.norm()
    assert used.count(True) == used.count(False) > 0


def test_classes_that_do_not_lie_last_are_not_taken_for_such() -> None:
    """In a square, shapes do not tell."""
    x = torch.randn(13, 16, 16, requires_grad=True)
    model = mt.convert(nn.Sequential(loss()), mt.Policy.uniform(256), seed=0, min_elements=0)
    (found,) = torch.autograd.grad(model(x * 1.0), x)
    (exact,) = torch.autograd.grad(loss()(x), x)
    assert (found - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("name", WEIGHTED)
def test_gradients_in_pieces_are_the_whole_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are cut where groups end; the last one ends with the tensor."""
    layer, shape = WEIGHTED[name]
    whole, none = gradients(layer, shape, 1 << 40, monkeypatch)
    found, some = gradients(layer, shape, 1, monkeypatch)
    assert not none
    assert some
    for one, other in zip(found, whole, strict=True):
        assert (one - other).norm() < 3e-6 * other.norm()


@pytest.mark.parametrize("name", AUTOCAST)
def test_and_as_good_under_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shape = WEIGHTED[name]
    # What comes in has 16 bits.
    given = nn.Sequential(nn.LayerNorm(list(shape[1:])), Calling(lambda x: x.bfloat16()), layer)
    whole, _ = gradients(given, shape, 1 << 40, monkeypatch, 256, True)
    found, _ = gradients(given, shape, 1, monkeypatch, 256, True)
    exact, _ = gradients(nn.Sequential(given[0], layer), shape, 1 << 40, monkeypatch, 256)
    assert [each.dtype for each in found] == [each.dtype for each in whole]
    for one, other, true in zip(found, whole, exact, strict=True):
        assert (one - true).norm() < 1.2 * (other - true).norm() + 1e-3 * true.norm()
