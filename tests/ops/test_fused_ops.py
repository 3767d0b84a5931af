"""What is made while it is encoded, or used while it is decoded: the reference's bytes, the true values."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune import ops
from mesa_tune.formulas.norms import layer_norm
from mesa_tune.ops import fused as fused_ops
from mesa_tune.ops import maps
from tests import cuda_cases
from tests.ops.test_ops_kernels import same_numbers

SEED = torch.tensor([5])
RAW = torch.ops.mesa_tune
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


def test_probabilities_are_those_of_their_logarithms() -> None:
    x = torch.linspace(-86.9, 88, 100_001)
    made = maps.apply(x, maps.KINDS["exp"], None, None, 1)
    assert (made / x.double().exp() - 1).abs().max() < 3e-7
    ends = torch.tensor([0.0, -100.0, -math.inf, math.nan])
    made = maps.apply(ends, maps.KINDS["exp"], None, None, 1)
    assert torch.equal(made, torch.tensor([1.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("group_size", [64, 256, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [*CURVES, "exp", "definite"])
def test_derivatives_are_encoded_as_they_are_made(kind: str, dtype: torch.dtype, group_size: int) -> None:
    x = (3 * tensor(20_011)).to(dtype)
    if kind in ("exp", "definite"):
        x[::100] = math.nan
    arguments = (maps.KINDS[kind], None, None, 1, 8, 256, group_size, True, SEED)
    for found, expected in zip(
        fused_ops.QUANTIZE_MAP(x, *arguments), fused_ops.quantize_map(x, *arguments), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [100, 256, 6000])
@pytest.mark.parametrize("centred", [True, False], ids=["mean", "no-mean"])
@pytest.mark.parametrize(
    ("shape", "count", "inner"),
    [((8, 50, 48), 400, 48), ((19_200,), 192, 1), ((4, 8, 7, 7), 8, 49), ((3, 5), 15, 1)],
    ids=["rows", "last-dimension", "channels", "each"],
)
def test_normalized_inputs_are_encoded_as_they_are_made(
    shape: tuple[int, ...], count: int, inner: int, centred: bool, group_size: int, dtype: torch.dtype
) -> None:
    x, rstd = tensor(*shape).to(dtype), 0.5 + torch.rand(count)
    mean = tensor(count) if centred else None
    arguments = (maps.KINDS["normalize"], mean, rstd, inner, 4, 16, group_size, True, SEED)
    for found, expected in zip(
        fused_ops.QUANTIZE_MAP(x, *arguments), fused_ops.quantize_map(x, *arguments), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inner", [5, 48, 5000])
def test_means_of_16_bits_are_made_again(inner: int, dtype: torch.dtype) -> None:
    x = (100 + tensor(30, inner)).to(dtype)
    wide = x.float()
    mean, rstd = wide.double().mean(1).float(), wide.var(1, correction=0).rsqrt().to(dtype)
    settings = (inner, 4, 16, 256, True, SEED)
    normalize = partial(fused_ops.QUANTIZE_MAP, x, maps.KINDS["normalize"])
    found, expected = normalize(mean.to(dtype), rstd, *settings), normalize(mean, rstd.float(), *settings)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    again = fused_ops.quantize_map(x, maps.KINDS["normalize"], mean.to(dtype), rstd, *settings)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_derivative_of_16_bits_is_stored_as_one_that_was_computed_before(dtype: torch.dtype) -> None:
    x = (3 * tensor(20_011)).to(dtype)
    derivative = maps.apply(x, maps.KINDS["gelu"], None, None, 1).to(dtype)
    settings = (4, 16, 64)
    found = fused_ops.QUANTIZE_MAP(x, maps.KINDS["gelu"], None, None, 1, *settings, True, SEED)
    expected = RAW.quantize_ends(derivative, *settings, 0, True, SEED)
    assert found[1].dtype == dtype
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("forward", "sizes", "weights"),
    [
        (layer_norm.layer_norm_forward, (6,), (None, None)),
        (layer_norm.rms_norm_forward, (6,), (None,)),
        (layer_norm.group_norm_forward, 4, (None, None)),
    ],
    ids=["layer", "rms", "group"],
)
def test_what_is_computed_in_more_bits_is_kept_in_those_of_the_input(
    forward: Callable[..., Any], sizes: Any, weights: tuple[None, ...]
) -> None:
    x, needs = tensor(5, 8, 6), (True, True, True)
    for dtype, kept in ((torch.float32, maps.Deferred), (torch.bfloat16, Tensor)):
        made = forward((sizes, 1e-5, torch.float32), needs, x.to(dtype), *weights).lossy[0]
        assert isinstance(made, kept)
        assert (made.source if isinstance(made, maps.Deferred) else made).dtype == dtype


@pytest.mark.parametrize("wrong", [0, 7, -1])
def test_an_unknown_map_is_refused(wrong: int) -> None:
    if not ops.native():
        pytest.skip("the kernels are not loaded")
    with pytest.raises(RuntimeError, match="expected a map from 1 to 6"):
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


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_gates_pass_what_lies_above_the_limit(size: int, dtype: torch.dtype) -> None:
    for x, limit, grad, slope, inner in cuda_cases.gates(size, dtype):
        shut = fused_ops.PACK_AT_MOST(x, limit)
        assert torch.equal(shut, ops.pack_bits(x <= limit))
        bits = ops.pack_bits(x.view(-1, inner)[:, 0] <= limit)
        mask = (x.view(-1, inner)[:, :1] <= limit).expand(-1, inner).reshape(-1)
        expected = torch.where(mask, grad * slope if slope else torch.zeros((), dtype=dtype), grad)
        assert same_numbers(fused_ops.MASK_GRAD(grad, bits, slope, inner), expected)


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [64, 100, 256, 4096])
@pytest.mark.parametrize("centered", [True, False], ids=["mean", "no-mean"])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (7, 10), (331, 48), (500, 250), (3, 5000)], ids=str)
def test_a_norm_goes_backward_from_what_is_packed(
    shape: tuple[int, int], centered: bool, group_size: int, dtype: torch.dtype
) -> None:
    quantize = RAW.quantize if dtype == torch.float32 else RAW.quantize_ends
    parts, sizes = quantize(tensor(*shape).to(dtype), 3, 8, group_size, 0, True, SEED), (3, 8, group_size)
    grad, rstd, weight = torch.randn(shape), 0.5 + torch.rand(shape[0], 1), torch.randn(shape[1])
    rstd[5:6], limit = 9.0, 8.0  # a row that is constant
    grad, rstd, weight = grad.to(dtype), rstd.to(dtype), weight.to(dtype)
    dx, *sums = fused_ops.NORM_BACKWARD(*parts, grad, rstd, weight, centered, limit, *sizes)
    x = RAW.dequantize(*parts, shape, torch.float32, *sizes, 0).double().masked_fill(rstd >= limit, 0)
    scaled = grad.double() * weight
    expected = scaled - x * (scaled * x).mean(1, keepdim=True)
    expected = (expected - scaled.mean(1, keepdim=True) if centered else expected) * rstd
    rounding = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    assert (dx - expected).norm() <= rounding * expected.norm()
    for found, right in zip(sums, [(grad * x).sum(0), grad.double().sum(0)], strict=True):
        assert (found - right).norm() <= rounding * right.norm()
    assert [each.dtype for each in (dx, *sums)] == [dtype] * 3


def test_a_norm_s_wide_and_unknown_ranges_decode_as_ever() -> None:
    x = tensor(4, 64)
    x[0, 3], x[1, 0], x[1, 1], x[3, 5] = torch.inf, 3e38, -3e38, torch.nan
    packed = ops.quantize(x, 4, 64, seed=1)
    rest = (torch.ones(4, 64), torch.ones(4), torch.ones(64), False, torch.inf, 4, 16, 64)
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
    rest = (torch.ones(2, 5000), torch.ones(2), torch.ones(5000), True, torch.inf, 4, 16, 5000)
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
        assert ((found - terms.sum(axes)).abs() <= 1e-6 * terms.abs().sum(axes)).all()
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


@pytest.mark.parametrize("group_size", [64, 100, 4096])
@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (9,), (6, 1), (67, 48), (3, 50_257)], ids=str)
def test_a_cross_entropy_goes_backward_from_what_is_packed(
    shape: tuple[int, ...], weighted: bool, mean: bool, group_size: int
) -> None:
    rows, classes = shape[:-1], shape[-1]
    packed = ops.quantize(tensor(*shape).softmax(-1), 3, group_size, seed=1)
    target = torch.randint(max(1, classes), rows)
    target = target.masked_fill(torch.rand(rows) < (0.2 if classes else 2), -100)
    weight, surplus = torch.rand(classes) if weighted else None, torch.randn(rows)
    own = torch.zeros(rows)
    own[target >= 0] = 1.0 if weight is None else weight[target[target >= 0]]
    right = ops.dequantize(packed).double()
    at = F.one_hot(target.clamp_min(0), max(1, classes)).bool() & (target >= 0)[..., None]
    right = torch.where(at[..., :classes], surplus[..., None].double(), right)
    for grad in (torch.tensor(2.5), torch.randn(()).expand(rows), torch.randn(rows)):
        sizes = (classes, -100, mean, 3, 8, group_size)
        found = fused_ops.CROSS_ENTROPY_BACKWARD(*packed[:2], target, surplus, weight, grad, *sizes)
        expected = right * (own * grad / (own.sum() if mean and own.any() else 1)).unsqueeze(-1)
        assert found.shape == shape
        assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_what_a_cross_entropy_cannot_take_is_refused() -> None:
    if not ops.native():
        pytest.skip("the kernels are not loaded")
    packed, target, grad = ops.quantize(tensor(6, 50), 4, 64, seed=1), torch.arange(6), tensor(6)
    for match, given in {
        "a target below 50, but got 50": (target + 45, grad, None, grad),
        "a target below 50, but got -1": (target - 1, grad, None, grad),
        "int64 targets of 6": (target.int(), grad, None, grad),
        "float32 surplus of 6": (target, grad[1:], None, grad),
        "class weights of 50": (target, grad, torch.ones(49), grad),
        "float32 gradient of 6": (target, grad, None, grad[1:]),
        "contiguous data": (target[1:], grad[1:], None, grad[1:]),
    }.items():
        with pytest.raises(RuntimeError, match=match):
            fused_ops.CROSS_ENTROPY_BACKWARD(packed.data, packed.ranges, *given, 50, -100, True, 4, 16, 64)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_op_decodes_ends(dtype: torch.dtype) -> None:
    x, grad, numbers, sizes = tensor(6, 50), torch.randn(6, 50), torch.rand(50), (4, 16, 64)
    parts = RAW.quantize_ends(x.to(dtype), *sizes, 0, True, SEED)
    target, row = torch.arange(6), torch.randn(6)
    arguments: dict[str, tuple[Any, ...]] = {
        "dequantize_mul": (grad,),
        "norm_backward": (grad, row.abs(), numbers, True, torch.inf),
        "batch_norm_backward": (grad, numbers, None, True, False),
        "softmax_backward": (grad,),
        "cross_entropy_backward": (target, row, None, torch.ones(()), 50, -100, True),
        "linear_backward": (grad[:, :9].contiguous(), torch.randn(9, 50), None, 50, False, True),
    }
    for name, given in arguments.items():
        found = getattr(RAW, name)(*parts, *given, *sizes)
        expected = getattr(fused_ops, name)(*parts, *given, *sizes)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*fused_ops.NAMES])
def test_ops_are_what_they_say_to_compilers(name: str) -> None:
    x = tensor(6, 50)
    packed = ops.quantize(x, 4, 64, seed=1)
    heads = tensor(2, 3, 5, 8)
    arguments = {
        "quantize_map": (x, 2, None, None, 1, 4, 16, 64, True, SEED),
        "dequantize_mul": (packed.data, packed.ranges, x, 4, 16, 64),
        "pack_at_most": (x, 0.0),
        "gate": (x, ops.pack_bits(x <= 0), 0.1, 1),
        "norm_backward": (packed.data, packed.ranges, x, x[:, 0].clone(), x[0], True, 0.5, 4, 16, 64),
        "batch_norm_backward": (packed.data, packed.ranges, x, x[0], x[1], True, False, 4, 16, 64),
        "softmax_backward": (packed.data, packed.ranges, x, 4, 16, 64),
        "cross_entropy_backward": (
            packed.data,
            packed.ranges,
            torch.arange(len(x)),
            x[:, 0].contiguous(),
            x[0].abs(),
            torch.ones(()),
            x.shape[1],
            3,
            True,
            4,
            16,
            64,
        ),
        "linear_backward": (packed.data, packed.ranges, x, tensor(50, 50), None, 50, False, True, 4, 16, 64),
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
