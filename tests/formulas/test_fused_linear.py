"""`linear_backward`: the kernel gives the products' numbers, whatever the shapes, groups and threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.codecs import quantize
from mesa_tune.ops import fused as fused_ops

SHAPES = {  # rows, in, out
    "rows that begin with a group": (700, 64, 48),
    "groups across rows": (333, 37, 50),
    "few rows": (3, 300, 200),
    "one row": (1, 500, 7),
    "one column": (900, 40, 1),
    "one feature": (900, 1, 40),
    "wide": (150, 90, 700),  # its parts by rows would take more than its input
}
THREADS = (1, 2, 3, 8)


def given(name: str, group_size: int) -> tuple[ops.Quantized, Tensor, Tensor]:
    """A packed input, a gradient and a weight."""
    rows, width, out = SHAPES[name]
    torch.manual_seed(0)
    packed = ops.quantize(torch.randn(rows, width), 4, group_size, seed=1)
    return packed, torch.randn(rows, out), torch.randn(out, width)


def backward(
    packed: ops.Quantized,
    grad: Tensor,
    weight: Tensor | None,
    zeros: Tensor | None = None,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    rest = (packed.shape[-1], transposed, weight is not None, packed.bits, packed.levels, packed.group_size)
    made: tuple[Tensor, Tensor, Tensor] = fused_ops.LINEAR_BACKWARD(
        packed.data, packed.ranges, grad, weight, zeros, *rest
    )
    return made


def products(packed: ops.Quantized, grad: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    x, grad = ops.dequantize(packed).double(), grad.double()
    return grad @ weight.double(), grad.t() @ x, grad.sum(0)


def same(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all((own - exact).norm() <= 2e-6 * exact.norm() for own, exact in zip(found, right, strict=True))


@pytest.mark.parametrize(
    ("name", "group_size"),
    [
        *((name, 64) for name in SHAPES),
        *(("groups across rows", size) for size in (100, 256, 4096)),
        *(("rows that begin with a group", 256), ("wide", 100), ("few rows", 4096)),
    ],
)
def test_the_kernel_gives_the_products(name: str, group_size: int, threads: None) -> None:
    packed, grad, weight = given(name, group_size)
    right = products(packed, grad, weight)
    for count in THREADS:
        torch.set_num_threads(count)
        first, again = (backward(packed, grad, weight) for _ in range(2))
        assert same(first, right)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("count", [1, 8])
def test_any_layout_serves_and_a_weight_may_be_transposed(count: int, threads: None) -> None:
    packed, grad, weight = given("groups across rows", 64)
    torch.set_num_threads(count)
    right = products(packed, grad, weight)
    assert same(backward(packed, grad, weight.t().contiguous().t()), right)
    assert same(backward(packed, grad, weight.repeat(2, 3)[:50, 37:74]), right)
    assert same(backward(packed, grad.t().contiguous().t(), weight), right)
    dx, dw, db = backward(packed, grad.view(9, 37, 50), weight)
    assert same((dx.view(333, 37), dw, db), right)
    assert dx.shape == (9, 37, 37)
    dx, dw, db = backward(packed, grad, weight.t().contiguous(), transposed=True)
    assert dw.is_contiguous()
    assert same((dx, dw.t(), db), right)


LONG = "more rows than are decoded at a time"


@pytest.mark.parametrize(
    ("name", "transposed", "dtype"),
    [
        *((name, False, torch.bfloat16) for name in (*SHAPES, LONG)),
        *((name, True, torch.bfloat16) for name in ("groups across rows", "one column", "one feature")),
        ("wide", True, torch.bfloat16),
        *((name, True, torch.float16) for name in ("rows that begin with a group", "few rows", LONG)),
    ],
    ids=str,
)
def test_16_bits_are_added_in_32(name: str, transposed: bool, dtype: torch.dtype, threads: None) -> None:
    rows, width, out = SHAPES.get(name, (5000, 250, 3))
    torch.manual_seed(0)
    x, grad, weight = torch.randn(rows, width), torch.randn(rows, out), torch.randn(out, width)
    zeros = torch.rand(rows) < 0.1
    parts = torch.ops.mesa_tune.quantize_ends(x.to(dtype), 4, 16, 64, 0, True, torch.tensor([1]))
    decoded = torch.ops.mesa_tune.dequantize(*parts, x.shape, dtype, 4, 16, 64, 0).double()
    given = weight.t().contiguous() if transposed else weight
    grad = grad.to(dtype)
    wide, near = grad.double(), weight.to(dtype).double()
    right = wide @ near, wide.t() @ decoded.masked_fill(zeros[:, None], 0), wide.sum(0)
    for count in THREADS:
        torch.set_num_threads(count)
        for factor in (given, given.to(dtype)):
            dx, dw, db = fused_ops.LINEAR_BACKWARD(
                *parts, grad, factor, ops.pack_bits(zeros), width, transposed, True, 4, 16, 64
            )
            assert [each.dtype for each in (dx, dw, db)] == [dtype] * 3
            assert dw.is_contiguous()
            for own, exact in zip((dx, dw.t() if transposed else dw, db), right, strict=True):
                assert (own - exact).norm() <= torch.finfo(dtype).eps / 2 * exact.norm()


@pytest.mark.parametrize("group_size", [64, 100, 4096])
def test_a_row_that_is_marked_counts_as_zero(group_size: int) -> None:
    packed, grad, weight = given("groups across rows", group_size)
    zeros = torch.arange(333) % 7 == 3
    found = backward(packed, grad, weight, ops.pack_bits(zeros))
    dx, _, db = products(packed, grad, weight)
    assert same(found, (dx, products(packed, grad.masked_fill(zeros[:, None], 0), weight)[1], db))


@pytest.mark.parametrize("rows", [0, 200])
def test_only_what_is_wanted_is_made(rows: int) -> None:
    packed = ops.quantize(torch.randn(rows, 30), 4, 64, seed=1)
    grad = torch.randn(rows, 20)
    dx, dw, db = backward(packed, grad, None)
    assert torch.allclose(dw, grad.t() @ ops.dequantize(packed), atol=1e-4)
    assert dx.shape == db.shape == (0,)


def test_what_is_not_a_number_stays_in_its_place() -> None:
    packed, grad, weight = given("rows that begin with a group", 64)
    grad[500, 7] = torch.nan
    dx, dw, db = backward(packed, grad, weight)
    assert dx[500].isnan().all()
    assert dw[7].isnan().all()
    assert db[7].isnan()
    for each in (dx, dw, db):
        assert each.isnan().sum() == each[0].numel()


def test_what_does_not_fit_is_refused() -> None:
    if not ops.native():
        pytest.skip("the kernels are not loaded")
    packed, grad, weight = given("groups across rows", 64)

    def refused(match: str, **other: Any) -> None:
        arguments: dict[str, Any] = {"data": packed.data, "ranges": packed.ranges, "grad": grad}
        arguments |= {"weight": weight, "zero_rows": None, "width": 37, "transposed": False, "bias": True}
        arguments |= {"bits": 4, "levels": 16, "group_size": 64}
        with pytest.raises(RuntimeError, match=match):
            fused_ops.LINEAR_BACKWARD(**{**arguments, **other})

    refused("expected float32, float16 or bfloat16", grad=grad.double())
    refused("expected a gradient of rows", grad=torch.tensor(1.0))
    refused("expected .* an input of a width", width=0)
    refused(r"expected a weight of shape \(50, 37\)", weight=weight[:, 1:])
    refused("expected float32, float16 or bfloat16", weight=weight.double())
    refused(r"expected a weight of shape \(37, 50\)", transposed=True)
    refused("expected contiguous bits of zero rows of 42", zero_rows=packed.data[:41])
    refused("expected contiguous data", data=packed.data[1:])
    refused("expected contiguous ranges", ranges=packed.ranges[1:])
    refused("expected float32, float16 or bfloat16", ranges=packed.ranges.double())
    refused("expected groups of at most 4096 elements", group_size=5000)


@pytest.mark.parametrize(
    ("dims", "bias", "frozen"),
    [
        ((), True, False),
        ((), False, True),
        ((9,), False, False),
        ((4, 50), True, True),
        ((4, 50), False, False),
    ],
    ids=str,
)
def test_a_linear_layer_is_never_decoded_whole(
    dims: tuple[int, ...], bias: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward_of(decode: Any) -> list[Tensor]:
        layer = nn.Linear(300, 70, bias=bias)
        layer.load_state_dict(state)
        model = mt.convert(nn.Sequential(layer), mt.Policy.uniform(), seed=0, min_elements=0)
        x = given_x * 1.0 if frozen else leaf * 1.0
        with monkeypatch.context() as patched:
            patched.setattr(*decode)
            model(x).pow(2).sum().backward()
        made = [] if frozen else [leaf.grad.clone()]  # type: ignore[union-attr]
        leaf.grad = None
        return [*made, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]

    def refuse(*_: Any) -> Any:
        raise AssertionError("decoded whole")

    given_x = torch.randn(*dims, 300)
    leaf = given_x.clone().requires_grad_()
    state = nn.Linear(300, 70, bias=bias).state_dict()
    whole = backward_of((quantize, "fused", lambda *_: None))
    for own, right in zip(backward_of((quantize, "decode", refuse)), whole, strict=True):
        assert own.shape == right.shape
        assert (own - right).norm() <= 2e-6 * right.norm()
