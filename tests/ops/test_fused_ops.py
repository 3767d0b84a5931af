"""What is made while it is encoded, or used while it is decoded: the reference's bytes, the true values."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, product
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
from tests.builders import known
from tests.cuda_cases import randn as tensor
from tests.ops.test_ops_kernels import needs_library, same_numbers

SEED = torch.tensor([5])
RAW = torch.ops.mesa_tune
Kernels = tuple[Any, Any]  # the op, and its function in PyTorch
CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
SIZES = (0, 1, 7, 8, 1000, 4096, 4097, 20_011)


def with_strides(x: Tensor) -> tuple[Tensor, Tensor]:
    """x, and x again in another order of its elements in memory."""
    return x, x.mT.contiguous().mT if x.dim() > 1 else x


def assert_same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Packed tensors have the same dtypes and bytes, with NaN as good as NaN."""
    assert all(same_numbers(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", CURVES)
def test_derivatives_are_those_of_autograd(kind: str) -> None:
    x = torch.cat([torch.linspace(-120, 120, 20_001), 4 * tensor(20_000)])
    exact = x.double().requires_grad_()
    CURVES[kind](exact).sum().backward()
    assert (maps.apply(x, maps.KINDS[kind], None, None, 1) - known(exact.grad)).abs().max() < 3e-6


def test_probabilities_are_those_of_their_logarithms() -> None:
    x = torch.linspace(-86.9, 88, 100_001)
    ends = torch.tensor([0.0, -100.0, -math.inf, math.nan])
    made, at_ends = (maps.apply(each, maps.KINDS["exp"], None, None, 1) for each in (x, ends))
    assert (made / x.double().exp() - 1).abs().max() < 3e-7
    assert at_ends.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", maps.KINDS)
def test_maps_are_encoded_as_they_are_made(kind: str) -> None:
    for case in cuda_cases.mapped(kind):
        found = fused_ops.QUANTIZE_MAP(case.x, *case.arguments())
        assert_same(found, fused_ops.quantize_map(case.x, *case.arguments()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_means_of_16_bits_are_made_again(dtype: torch.dtype) -> None:
    for inner in (5, 48, 5000):
        x = (100 + tensor(30, inner)).to(dtype)
        wide = x.float()
        mean, rstd = wide.double().mean(1).float(), wide.var(1, correction=0).rsqrt().to(dtype)
        settings = (inner, 4, 16, 256, True, SEED)
        normalize = partial(fused_ops.QUANTIZE_MAP, x, maps.KINDS["normalize"])
        found = normalize(mean.to(dtype), rstd, *settings)
        assert_same(found, normalize(mean, rstd.float(), *settings))
        again = fused_ops.quantize_map(x, maps.KINDS["normalize"], mean.to(dtype), rstd, *settings)
        assert_same(found, again)


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
    for dtype, kept in ((torch.float32, maps.Deferred), (torch.bfloat16, Tensor)):
        x = tensor(5, 8, 6).to(dtype)
        made = forward((sizes, 1e-5, torch.float32), (True, True, True), x, *weights).lossy[0]
        assert isinstance(made, kept)
        assert (made.source if isinstance(made, maps.Deferred) else made).dtype == dtype


@needs_library
def test_an_unknown_map_is_refused() -> None:
    for wrong in (0, 7, -1):
        with pytest.raises(RuntimeError, match="expected a map from 1 to 6"):
            fused_ops.QUANTIZE_MAP(tensor(8), wrong, None, None, 1, 4, 16, 256, True, SEED)


def test_decoding_and_multiplying_is_one() -> None:
    for x, sizes, factor in cuda_cases.products():
        parts = cuda_cases.packed(x, sizes)
        expected = factor * RAW.dequantize(*parts, x.shape, torch.float32, *sizes)
        kernels: Kernels = (fused_ops.DEQUANTIZE_MUL, fused_ops.dequantize_mul)
        for given, op in product(with_strides(factor), kernels):
            assert same_numbers(op(*parts, given, *sizes[:3]), expected)


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_gates_pass_what_lies_above_the_limit(dtype: torch.dtype) -> None:
    for x, limit, grad, slope, inner in chain.from_iterable(cuda_cases.gates(size, dtype) for size in SIZES):
        assert torch.equal(fused_ops.PACK_AT_MOST(x, limit), ops.pack_bits(x <= limit))
        mask = (x.view(-1, inner)[:, :1] <= limit).expand(-1, inner).reshape(-1)
        expected = torch.where(mask, grad * slope if slope else torch.zeros((), dtype=dtype), grad)
        bits = ops.pack_bits(x.view(-1, inner)[:, 0] <= limit)
        for op in (fused_ops.MASK_GRAD, fused_ops.mask_grad):
            assert same_numbers(op(grad, bits, slope, inner), expected)


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_a_norm_goes_backward_from_what_is_packed(dtype: torch.dtype) -> None:
    rounding = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for case in cuda_cases.norms(dtype, (500, 250)):
        parts, grad, rstd, weight, *rest, sizes = case
        exact = cuda_cases.exact_norm_backward(case)
        kernels: Kernels = (fused_ops.NORM_BACKWARD, fused_ops.norm_backward)
        for op in kernels:
            for found, right in zip(op(*parts, grad, rstd, weight, *rest, *sizes), exact, strict=True):
                assert found.dtype == dtype
                assert (found - right).norm() <= rounding * right.norm()


def test_a_norm_s_wide_and_unknown_ranges_decode_as_ever() -> None:
    x = tensor(4, 64)
    x[0, 3], x[1, 0], x[1, 1], x[3, 5] = torch.inf, 3e38, -3e38, torch.nan
    packed = ops.quantize(x, 4, 64, seed=1)
    rest = (torch.ones(4, 64), torch.ones(4), torch.ones(64), False, torch.inf, 4, 16, 64)
    kernels: Kernels = (fused_ops.NORM_BACKWARD, fused_ops.norm_backward)
    for found, right in zip(*(op(packed.data, packed.ranges, *rest) for op in kernels), strict=True):
        assert torch.equal(found.isfinite(), right.isfinite())


@needs_library
def test_a_norm_s_groups_may_not_be_larger_than_the_cache() -> None:
    packed = ops.quantize(tensor(2, 5000), 4, 5000, seed=1)
    rest = (torch.ones(2, 5000), torch.ones(2), torch.ones(5000), True, torch.inf, 4, 16, 5000)
    with pytest.raises(RuntimeError, match="groups of at most 4096 elements, but got 5000"):
        fused_ops.NORM_BACKWARD(packed.data, packed.ranges, *rest)


def test_a_batch_norm_goes_backward_from_what_is_packed() -> None:
    for case in cuda_cases.batch_norms():
        case.assert_right(*fused_ops.BATCH_NORM_BACKWARD(*case.arguments()))
        case.assert_right(*fused_ops.batch_norm_backward(*case.arguments()))
        other = case._replace(weight=torch.full_like(case.rstd, 2.0) if case.weight is None else None)
        other.assert_right(*fused_ops.BATCH_NORM_BACKWARD(*other.arguments()))


def test_a_softmax_goes_backward_from_what_is_packed() -> None:
    shapes = ((0, 8), (3, 0), (1,), (7, 10), (2, 31, 197), (3, 5000))
    for parts, grad, sizes in cuda_cases.softmaxes(shapes):
        y = RAW.dequantize(*parts, grad.shape, torch.float32, *sizes, 0).double()
        right = y * (grad - (y * grad).sum(-1, keepdim=True))
        for given in with_strides(grad):
            found = fused_ops.SOFTMAX_BACKWARD(*parts, given, *sizes)
            assert found.is_contiguous()
            assert (found - right).norm() <= 1e-6 * right.norm()


def test_a_cross_entropy_goes_backward_from_what_is_packed() -> None:
    for case in cuda_cases.cross_entropies(0.0, widest=50_257):
        parts, target, surplus, weight, grad, classes, mean, sizes = case
        own, counted = torch.zeros(target.shape), target >= 0
        own[counted] = 1.0 if weight is None else weight[target[counted]]
        at = F.one_hot(target.clamp_min(0), max(1, classes)).bool() & counted[..., None]
        p = RAW.dequantize(*parts, (*target.shape, classes), torch.float32, *sizes, 0).double()
        right = torch.where(at[..., :classes], surplus[..., None].double(), p)
        right = right * (own * grad / (own.sum() if mean and own.any() else 1)).unsqueeze(-1)
        kernels: Kernels = (fused_ops.CROSS_ENTROPY_BACKWARD, fused_ops.cross_entropy_backward)
        for given, op in product((grad, grad.expand(target.shape)), kernels):
            found = op(*case._replace(grad=given).arguments())
            assert found.shape == right.shape
            assert (found - right).norm() <= 1e-6 * right.norm()


@needs_library
def test_what_a_cross_entropy_cannot_take_is_refused() -> None:
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


@needs_library
def test_what_a_batch_norm_or_a_softmax_cannot_take_is_refused() -> None:
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
            *(packed.data, packed.ranges, torch.arange(6), x[:, 0].contiguous(), x[0].abs(), torch.ones(())),
            *(50, 3, True, 4, 16, 64),
        ),
        "linear_backward": (packed.data, packed.ranges, x, tensor(50, 50), None, 50, False, True, 4, 16, 64),
        "attention_backward": (
            *(*[heads] * 4, None, None, 0, 0.3, True, 1.0),
            *[heads.clone() for _ in range(3)],
        ),
    }
    torch.library.opcheck(getattr(torch.ops.mesa_tune, name).default, arguments[name])
