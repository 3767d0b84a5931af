"""What is made while it is encoded, or used while it is decoded: the reference's bytes, the true values."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import fused_ops, maps, ops
from mesa_tune.codecs import quantize
from mesa_tune.functional import held, norm
from mesa_tune.functional.held import Held

SEED = torch.tensor([5])
CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
SIZES = (0, 1, 7, 8, 1000, 4096, 4097, 20_011)


def tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", CURVES)
def test_derivatives_are_those_of_autograd(kind: str) -> None:
    x = torch.cat([torch.linspace(-120, 120, 20_001), 4 * tensor(20_000)])
    exact = x.double().requires_grad_()
    CURVES[kind](exact).sum().backward()
    assert exact.grad is not None
    assert (maps.apply(x, maps.KINDS[kind], None, None, 1) - exact.grad).abs().max() < 3e-6


@pytest.mark.parametrize("group_size", [64, 256, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", CURVES)
def test_derivatives_are_encoded_as_they_are_made(kind: str, dtype: torch.dtype, group_size: int) -> None:
    x = (3 * tensor(20_011)).to(dtype)
    arguments = (maps.KINDS[kind], None, None, 1, 8, 256, group_size, True, SEED)
    for found, expected in zip(
        fused_ops.QUANTIZE_MAP(x, *arguments), fused_ops.quantize_map(x, *arguments), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("group_size", [100, 256, 6000])
@pytest.mark.parametrize("centred", [True, False], ids=["mean", "no-mean"])
@pytest.mark.parametrize(
    ("shape", "count", "inner"),
    [((8, 50, 48), 400, 48), ((19_200,), 192, 1), ((4, 8, 7, 7), 8, 49), ((3, 5), 15, 1)],
    ids=["rows", "last-dimension", "channels", "each"],
)
def test_normalized_inputs_are_encoded_as_they_are_made(
    shape: tuple[int, ...], count: int, inner: int, centred: bool, group_size: int
) -> None:
    x, rstd = tensor(*shape), 0.5 + torch.rand(count)
    mean = tensor(count) if centred else None
    arguments = (maps.KINDS["normalize"], mean, rstd, inner, 4, 16, group_size, True, SEED)
    for found, expected in zip(
        fused_ops.QUANTIZE_MAP(x, *arguments), fused_ops.quantize_map(x, *arguments), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("forward", "sizes", "weights"),
    [
        (norm.layer_norm_forward, (6,), (None, None)),
        (norm.rms_norm_forward, (6,), (None,)),
        (norm.group_norm_forward, 4, (None, None)),
    ],
    ids=["layer", "rms", "group"],
)
def test_what_is_computed_in_more_bits_is_kept_in_those_of_the_input(
    forward: Callable[..., Any], sizes: Any, weights: tuple[None, ...]
) -> None:
    x, needs = tensor(5, 8, 6), (True, True, True)
    for dtype, kept in ((torch.float32, maps.Mapped), (torch.bfloat16, Tensor)):
        made = forward((sizes, 1e-5, torch.float32), needs, x.to(dtype), *weights).lossy[0]
        assert isinstance(made, kept)
        assert (made.source if isinstance(made, maps.Mapped) else made).dtype == dtype


@pytest.mark.parametrize("wrong", [0, 5, -1])
def test_an_unknown_map_is_refused(wrong: int) -> None:
    if not ops.native():
        pytest.skip("the kernels are not loaded")
    with pytest.raises(RuntimeError, match="expected a map from 1 to 4"):
        fused_ops.QUANTIZE_MAP(tensor(8), wrong, None, None, 1, 4, 16, 256, True, SEED)


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("group_size", [64, 256, 5000])
@pytest.mark.parametrize("shape", [(0,), (1000,), (7, 4099), (64, 256)], ids=str)
def test_decoding_and_multiplying_is_one(shape: tuple[int, ...], group_size: int, bits: int) -> None:
    packed = ops.quantize(tensor(*shape), bits, group_size, seed=1)
    factor = torch.randn(shape)
    sizes = (bits, 1 << bits, group_size)
    found = fused_ops.DEQUANTIZE_MUL(packed.data, packed.ranges, factor, *sizes)
    assert torch.equal(found, factor * ops.dequantize(packed))
    turned = torch.randn(tuple(reversed(shape))).permute(*reversed(range(len(shape))))
    found = fused_ops.DEQUANTIZE_MUL(packed.data, packed.ranges, turned, *sizes)
    assert torch.equal(found, turned * ops.dequantize(packed))


@pytest.mark.parametrize("size", SIZES)
def test_gates_pass_what_lies_above_the_limit(size: int) -> None:
    x = tensor(size)
    x[::5] = 0
    if size > 8:
        x[3], x[4] = torch.nan, torch.inf
    for limit in (0.0, 0.25):
        assert torch.equal(fused_ops.PACK_AT_MOST(x, limit), ops.pack_bits(x <= limit))
    shut, grad = fused_ops.PACK_AT_MOST(x, 0.25), torch.randn(size)
    for slope in (0.0, 0.01, -2.0):
        expected = torch.where(x <= 0.25, grad * slope if slope else torch.zeros(()), grad)
        assert torch.equal(fused_ops.GATE(grad, shut, slope), expected)


@pytest.mark.parametrize("group_size", [64, 100, 256, 4096])
@pytest.mark.parametrize("centered", [True, False], ids=["mean", "no-mean"])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (7, 10), (331, 48), (500, 250), (3, 5000)], ids=str)
def test_a_norm_goes_backward_from_what_is_packed(
    shape: tuple[int, int], centered: bool, group_size: int
) -> None:
    packed = ops.quantize(tensor(*shape), 3, group_size, seed=1)
    grad, rstd, weight = torch.randn(shape), 0.5 + torch.rand(shape[0], 1), torch.randn(shape[1])
    arguments = (packed.data, packed.ranges, grad, rstd, weight, centered, 3, 8, group_size)
    dx, *sums = fused_ops.NORM_BACKWARD(*arguments)
    x = ops.dequantize(packed).double()
    scaled = grad.double() * weight
    expected = scaled - x * (scaled * x).mean(1, keepdim=True)
    expected = (expected - scaled.mean(1, keepdim=True) if centered else expected) * rstd
    assert (dx - expected).norm() <= 1e-6 * expected.norm()
    for found, right in zip(sums, [(grad * x).sum(0), grad.double().sum(0)], strict=True):
        assert (found - right).norm() <= 1e-6 * right.norm()


def test_a_norm_s_wide_and_unknown_ranges_decode_as_ever() -> None:
    x = tensor(4, 64)
    x[0, 3], x[1, 0], x[1, 1], x[3, 5] = torch.inf, 3e38, -3e38, torch.nan
    packed = ops.quantize(x, 4, 64, seed=1)
    rest = (torch.ones(4, 64), torch.ones(4), torch.ones(64), False, 4, 16, 64)
    for found, right in zip(
        fused_ops.NORM_BACKWARD(packed.data, packed.ranges, *rest),
        fused_ops.norm_backward(packed.data, packed.ranges, *rest),
        strict=True,
    ):
        assert torch.equal(found.isfinite(), right.isfinite())


def test_a_norm_s_groups_may_not_be_larger_than_the_cache() -> None:
    if not ops.native():
        pytest.skip("the kernels are not loaded")
    packed = ops.quantize(tensor(2, 5000), 4, 5000, seed=1)
    rest = (torch.ones(2, 5000), torch.ones(2), torch.ones(5000), True, 4, 16, 5000)
    with pytest.raises(RuntimeError, match="groups of at most 4096 elements, but got 5000"):
        fused_ops.NORM_BACKWARD(packed.data, packed.ranges, *rest)


@pytest.mark.parametrize("group_size", [64, 100, 4096])
@pytest.mark.parametrize("fixed", [False, True], ids=["of-batch", "fixed"])
@pytest.mark.parametrize("last", [False, True], ids=["rows", "last"])
@pytest.mark.parametrize(
    "shape",
    [(0, 8), (3, 0, 5), (1, 1), (331, 48), (6, 8, 9, 9), (3, 90, 7, 7), (2, 3, 5000), (4, 70, 1)],
    ids=str,
)
def test_a_batch_norm_goes_backward_from_what_is_packed(
    shape: tuple[int, ...], last: bool, fixed: bool, group_size: int
) -> None:
    packed, grad = ops.quantize(tensor(*shape), 3, group_size, seed=1), torch.randn(shape)
    axis = len(shape) - 1 if last else 1
    rstd, weight = 0.5 + torch.rand(shape[axis]), torch.randn(shape[axis])
    arguments = (packed.data, packed.ranges, grad, rstd)
    dx, *sums = fused_ops.BATCH_NORM_BACKWARD(*arguments, weight, last, fixed, 3, 8, group_size)
    x, wide = (each.double().movedim(axis, -1) for each in (ops.dequantize(packed), grad))
    axes = [*range(len(shape) - 1)]
    expected = wide if fixed else wide - wide.mean(axes) - x * (wide * x).mean(axes)
    dx, expected = dx.movedim(axis, -1), expected * rstd * weight
    assert (dx - expected).norm() <= 1e-6 * expected.norm()
    for found, terms in zip(sums, (wide * x, wide), strict=True):  # a sum may be small beside its terms
        assert (found - terms.sum(axes)).norm() <= 1e-6 * terms.norm()
    plain = fused_ops.BATCH_NORM_BACKWARD(*arguments, None, last, fixed, 3, 8, group_size)[0]
    assert (plain.movedim(axis, -1) * weight - dx).norm() <= 1e-6 * dx.norm()


@pytest.mark.parametrize("group_size", [64, 100, 4096])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1,), (7, 10), (2, 31, 197), (3, 5000)], ids=str)
def test_a_softmax_goes_backward_from_what_is_packed(shape: tuple[int, ...], group_size: int) -> None:
    packed, grad = ops.quantize(tensor(*shape).softmax(-1), 3, group_size, seed=1), torch.randn(shape)
    y = ops.dequantize(packed).double()
    right = y * (grad - (y * grad).sum(-1, keepdim=True))
    for given in (grad, grad.mT.contiguous().mT if grad.dim() > 1 else grad):
        found = fused_ops.SOFTMAX_BACKWARD(packed.data, packed.ranges, given, 3, 8, group_size)
        assert found.is_contiguous()
        assert (found - right).norm() <= 1e-6 * right.norm()


def test_what_a_batch_norm_or_a_softmax_cannot_take_is_refused() -> None:
    if not ops.native():
        pytest.skip("the kernels are not loaded")
    grad, numbers = tensor(6, 50), torch.ones(50)
    packed = ops.quantize(grad, 4, 64, seed=1)
    parts, sizes = (packed.data, packed.ranges), (True, False, 4, 16, 64)
    for match, given in {
        "reciprocal deviations of 50": (grad, numbers[1:], None),
        "contiguous weight of 50": (grad, numbers, numbers.double()),
        "contiguous float32 gradient": (grad.double(), numbers, None),
        "a gradient of samples and channels": (grad[0], numbers, None),
        "contiguous data": (grad[1:], numbers, None),
    }.items():
        with pytest.raises(RuntimeError, match=match):
            fused_ops.BATCH_NORM_BACKWARD(*parts, *given, *sizes)
    with pytest.raises(RuntimeError, match="contiguous float32 gradient"):
        fused_ops.SOFTMAX_BACKWARD(*parts, grad.double(), 4, 16, 64)
    with pytest.raises(RuntimeError, match="contiguous data"):
        fused_ops.SOFTMAX_BACKWARD(*parts, grad[1:], 4, 16, 64)


@pytest.mark.parametrize("name", [*fused_ops.NAMES])
def test_ops_are_what_they_say_to_compilers(name: str) -> None:
    x = tensor(6, 50)
    packed = ops.quantize(x, 4, 64, seed=1)
    heads = tensor(2, 3, 5, 8)
    arguments = {
        "quantize_map": (x, 2, None, None, 1, 4, 16, 64, True, SEED),
        "dequantize_mul": (packed.data, packed.ranges, x, 4, 16, 64),
        "pack_at_most": (x, 0.0),
        "gate": (x, ops.pack_bits(x <= 0), 0.1),
        "norm_backward": (packed.data, packed.ranges, x, x[:, 0].clone(), x[0], True, 4, 16, 64),
        "batch_norm_backward": (packed.data, packed.ranges, x, x[0], x[1], True, False, 4, 16, 64),
        "softmax_backward": (packed.data, packed.ranges, x, 4, 16, 64),
        "linear_backward": (packed.data, packed.ranges, x, tensor(50, 50), 50, False, True, 4, 16, 64),
        "attention_backward": (
            *[heads] * 4,
            None,
            None,
            0,
            0.3,
            True,
            1.0,
            *[heads.clone() for _ in range(3)],
        ),
    }
    torch.library.opcheck(getattr(torch.ops.mesa_tune, name).default, arguments[name])


class Rearranged(nn.Module):
    """A layer on images whose channels lie next to one another."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x.contiguous(memory_format=torch.channels_last))
        return made


class Halved(nn.Module):
    """The input in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


class Squared(nn.Module):
    """A batch of products."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ (x.mT * 0.5)


class Product(nn.Module):
    """A function of the input and a matrix that is computed, or, where that is a matrix product, a weight."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(0.5 + torch.rand(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight if self.weight.shape[0] == x.shape[-1] else self.weight.cos())


class Loss(nn.Module):
    """Cross-entropy for class indices, of which some are ignored."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(x.numel() // x.shape[1]).view(x.shape[0], *x.shape[2:]) % x.shape[1]
        return F.cross_entropy(x, target.masked_fill(target == 3, -100), **self.arguments)


WEIGHTED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear-48": (nn.Linear(48, 8), (7, 331, 48)),
    "linear-250": (nn.Linear(250, 8), (7, 331, 250)),
    "conv": (nn.Conv2d(8, 6, 3, padding=1), (6, 8, 16, 18)),
    "conv-same": (nn.Conv1d(6, 4, 4, padding="same"), (64, 6, 40)),
    "conv-transposed": (nn.ConvTranspose2d(8, 6, 3, stride=2, bias=False), (5, 8, 16, 16)),
    "layer-norm": (nn.LayerNorm([4, 30]), (5, 67, 4, 30)),
    "layer-norm-without-weights": (nn.LayerNorm(48, elementwise_affine=False), (7, 331, 48)),
    "rms-norm": (nn.RMSNorm(48), (7, 331, 48)),
    "conv-channels-last": (Rearranged(nn.Conv2d(8, 6, 3, padding=1)), (6, 8, 16, 18)),
    "batch-norm": (nn.BatchNorm2d(8), (10, 8, 16, 18)),
    "batch-norm-channels-last": (Rearranged(nn.BatchNorm2d(8)), (10, 8, 16, 18)),
    "batch-norm-without-weights": (nn.BatchNorm1d(32, affine=False), (64, 32, 20)),
    "batch-norm-fixed": (nn.BatchNorm2d(8).eval(), (10, 8, 16, 18)),
    "group-norm": (nn.GroupNorm(4, 8), (10, 8, 16, 18)),
    "softmax": (nn.Softmax(-1), (10, 3, 20, 32)),
    "softmax-dim": (nn.Softmax(2), (10, 3, 20, 32)),
    "loss": (Loss(), (67, 48)),
    "loss-smoothed": (Loss(label_smoothing=0.1, weight=torch.rand(16)), (13, 16, 20)),
    "loss-each": (Loss(reduction="none"), (13, 16, 20)),
    "product": (Squared(), (9, 4, 30, 32)),
    "conv-grouped": (nn.Conv3d(8, 4, 2, groups=2), (9, 8, 8, 4, 4)),
}


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
    whole_run = Held._decoded

    def counted(self: Held, *sizes: Any) -> Iterator[tuple[int, Tensor]]:
        used.append(1)
        return whole_run(self, *sizes)

    torch.manual_seed(0)
    model, x = nn.Sequential(layer), torch.randn(shape, requires_grad=True)
    mt.convert(model, mt.Policy.uniform(level), seed=0, min_elements=0)
    with monkeypatch.context() as patch:
        patch.setattr(Held, "_decoded", counted)
        patch.setattr(held, "LARGE", large)
        patch.setattr(quantize, "LARGEST_GROUP", 0)  # what goes backward in one pass needs no pieces
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x * 1.0)
        weights = torch.linspace(1, 2, y.numel()).view(y.shape)
        found = torch.autograd.grad((y.float() ** 2 * weights).sum(), [*layer.parameters(), x])
    return list(found), len(used)


FUSED: dict[str, tuple[str, nn.Module, tuple[int, ...]]] = {
    "layer": ("decode_norm", nn.LayerNorm([4, 12]), (7, 331, 4, 12)),
    "layer-without-weights": ("decode_norm", nn.LayerNorm(48, elementwise_affine=False), (7, 331, 48)),
    "layer-without-bias": ("decode_norm", nn.LayerNorm(48, bias=False), (7, 331, 48)),
    "rms": ("decode_norm", nn.RMSNorm(48), (7, 331, 48)),
    "frozen": ("decode_norm", nn.LayerNorm(48).requires_grad_(False), (7, 331, 48)),
    "batch": ("decode_batch_norm", nn.BatchNorm2d(8), (10, 8, 16, 18)),
    "batch-without-weights": ("decode_batch_norm", nn.BatchNorm1d(30, affine=False), (64, 30)),
    "batch-channels-last": ("decode_batch_norm", Rearranged(nn.BatchNorm2d(8)), (10, 8, 16, 18)),
    "batch-fixed": ("decode_batch_norm", nn.BatchNorm2d(8).eval(), (10, 8, 16, 18)),
    "batch-frozen": ("decode_batch_norm", nn.BatchNorm2d(8).requires_grad_(False), (10, 8, 16, 18)),
    "instance": ("decode_batch_norm", nn.InstanceNorm2d(8, affine=True), (10, 8, 16, 18)),
    "softmax": ("decode_softmax", nn.Softmax(-1), (10, 3, 20, 32)),
    "softmax-of-a-row": ("decode_softmax", nn.Softmax(0), (500,)),
    "matmul": ("decode_linear", Product(torch.matmul, 48, 30), (7, 31, 48)),
    "addmm": ("decode_linear", Product(partial(torch.addmm, torch.ones(30), alpha=0.5), 48, 30), (77, 48)),
    "mul": ("decode_times", Product(torch.mul, 77, 48), (77, 48)),
    "div": ("decode_times", Product(torch.div, 77, 48), (77, 48)),
    "addcmul": ("decode_times", Product(partial(torch.addcmul, torch.ones(48), value=0.5), 77, 48), (77, 48)),
    "glu": ("decode_times", nn.GLU(), (77, 48)),
}


@pytest.mark.parametrize("name", FUSED)
def test_gradients_in_one_pass_are_those_in_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    decode, layer, shape = FUSED[name]
    fused = getattr(quantize, decode)

    def run(possible: bool) -> list[Tensor]:
        def counted(*arguments: Any) -> Any:
            used.append(possible)
            return fused(*arguments) if possible else None

        monkeypatch.setattr(quantize, decode, counted)
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


@pytest.mark.parametrize("name", WEIGHTED)
def test_and_as_good_under_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shape = WEIGHTED[name]
    given = nn.Sequential(nn.LayerNorm(list(shape[1:])), Halved(), layer)  # what comes in has 16 bits
    whole, _ = gradients(given, shape, 1 << 40, monkeypatch, 256, True)
    found, _ = gradients(given, shape, 1, monkeypatch, 256, True)
    exact, _ = gradients(nn.Sequential(given[0], layer), shape, 1 << 40, monkeypatch, 256)
    assert [each.dtype for each in found] == [each.dtype for each in whole]
    for one, other, true in zip(found, whole, exact, strict=True):
        assert (one - true).norm() < 1.2 * (other - true).norm() + 1e-3 * true.norm()
