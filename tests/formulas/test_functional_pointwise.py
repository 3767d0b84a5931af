"""Elementwise functions: what each keeps, in-place forms, sharing, masks, edges of equations."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.formulas.curves import CURVES
from mesa_tune.formulas.einsum import spelled_out
from mesa_tune.policy import Policy
from tests.builders import mean, workload
from tests.conformance.running import saved_bytes
from tests.functional_cases import EIGHT, RAW, gradients, served
from tests.step_memory import Composed

pytestmark = pytest.mark.usefixtures("without_variants")


def model_of(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> nn.Module:
    """A model that is `function` of an activation, and of what further parameters it takes."""
    shift = nn.Parameter(torch.zeros(64, 64))
    others = nn.ParameterList([torch.rand(shape) + 0.5 for shape in shapes])
    return Composed(lambda m, x: function(x + m.shift, *m.others), shift=shift, others=others)


def _kept(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> int:
    """Bytes that a converted model of `function` keeps at 8 bits, however small; by the outside meter."""
    torch.manual_seed(0)
    model = mt.convert(model_of(function, *shapes), Policy.uniform(256), min_elements=0)
    return saved_bytes(model, torch.randn(64, 64))


EYE = nn.Parameter(torch.eye(64))
ONE = 64 * 64 + 8 * 16
"""Bytes of one tensor of 64 by 64 at 8 bits, ranges of 16 groups included."""


@pytest.mark.parametrize(
    ("function", "copies"),
    [
        pytest.param(lambda h: h * torch.sigmoid(1.702 * h), 2, id="quick-gelu-shares-the-gate"),
        pytest.param(lambda h: h * h.pow(2).mean(-1, keepdim=True), 1, id="rms-shares-the-input"),
        pytest.param(lambda h: h.exp() * h.exp().detach(), 2, id="exp-shares-nothing-with-another-exp"),
        pytest.param(lambda h: F.linear(h.exp(), EYE), 1, id="exp-shares-its-output"),
        pytest.param(lambda h: (e := h.exp()) * e, 2, id="a-square-has-groups-within-rows"),
        pytest.param(lambda h: h * 2 / 3, 0, id="numbers-keep-nothing"),
        pytest.param(F.silu, 1, id="silu"),
        pytest.param(lambda h: F.glu(h, 0), 1, id="glu"),
        pytest.param(lambda h: h + 1 - h, 0, id="sums-keep-nothing"),
    ],
)
def test_copies_kept(function: Callable[[Tensor], Tensor], copies: int) -> None:
    rows = 4 * 64  # what is exact: a number a row; and where groups end with rows, a range for each
    assert copies * ONE <= _kept(function) <= copies * ONE + 3 * rows


def test_a_parameter_is_kept_by_reference() -> None:
    assert _kept(lambda h, w: h * w, (64, 64)) == ONE
    assert _kept(lambda h, w: h + F.softplus(w), (64, 64)) == 0
    assert _kept(lambda h, w: h / w, (64, 64)) == ONE
    assert _kept(lambda h, w: h + w.exp(), (64, 64)) == ONE


def test_a_small_constant_stays_as_it_is() -> None:
    angles = torch.arange(64 * 64).view(64, 64).float()
    assert _kept(lambda h: h.expand(16, 64, 64) * angles.cos()) == 4 * 64 * 64


def test_masks_take_a_bit_an_element_and_are_packed_once() -> None:
    def chain(h: Tensor) -> Tensor:
        mask = h > 0.3
        for _ in range(3):
            h = torch.where(mask, h, -h).masked_fill(mask, 0)
        return h

    assert _kept(chain) == 64 * 64 // 8
    assert _kept(lambda x, one, other: torch.where(x > 0, one, other), (), ()) == 64 * 64 // 8


def test_a_repeated_mask_is_packed_as_it_was() -> None:
    mask = torch.rand(64, 64) > 0.5
    assert _kept(lambda h: h.expand(8, 64, 64).masked_fill((mask | mask).expand(8, 64, 64), 0)) == 512


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 6.0, 0.5, -0.5, 3.0, 1e-30]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        *((F.relu, ()), (F.relu6, ()), (F.hardtanh, ()), (F.hardshrink, ()), (F.softshrink, ())),
        *((torch.abs, ()), (F.leaky_relu, (0.1,)), (F.threshold, (0.5, 2.0))),
        *((torch.clamp, (-0.5, 1.0)), (torch.clamp_min, (0.5,)), (torch.clamp_max, (0.5,))),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_bits_also_at_bounds_and_odd_numbers(function: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
    assert _kept(lambda h: function(h, *args)) == (2 if function is torch.abs else 1) * 64 * 64 // 8
    x = torch.tensor(SPECIAL * 2, requires_grad=True)
    found, wanted = gradients(served(function, EIGHT, x, *args), [x]), gradients(function(x, *args), [x])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


WITH_FLAG = ("relu", "silu", "mish", "hardswish", "hardsigmoid", "selu", "relu6", "hardtanh", "leaky_relu")
IN_PLACE: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    **{name: (getattr(F, name), (), {"inplace": True}) for name in WITH_FLAG},
    **{f"{name}_": (getattr(torch, f"{name}_"), (), {}) for name in ("relu", "selu", "sigmoid")},
    **{f"Tensor.{name}_": (getattr(Tensor, f"{name}_"), (), {}) for name in ("relu", "tanh", "exp")},
    "elu": (F.elu, (0.5, True), {}),
    "elu_": (F.elu_, (0.5,), {}),
    "celu": (F.celu, (0.5,), {"inplace": True}),
    "hardtanh_": (F.hardtanh_, (-0.5, 0.5), {}),
    "leaky_relu_": (F.leaky_relu_, (0.3,), {}),
    "leaky_relu of slope 0": (F.leaky_relu, (0.0,), {"inplace": True}),
    "threshold": (F.threshold, (0.1, 3.0, True), {}),
    "threshold_": (torch.threshold_, (0.1, 5.0), {}),
    "dropout": (F.dropout, (0.3, True, True), {}),
    "alpha_dropout": (F.alpha_dropout, (0.3, True, True), {}),
    "clamp_": (Tensor.clamp_, (-0.5, 0.5), {}),
    "clamp_max_": (torch.clamp_max_, (0.5,), {}),
    "masked_fill_": (Tensor.masked_fill_, (torch.arange(50) % 3 == 0, 2.0), {}),
}


@pytest.mark.parametrize("name", list(IN_PLACE))
@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
def test_in_place(name: str, view: bool) -> None:
    function, rest, named = IN_PLACE[name]

    def run(call: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(6, 50, requires_grad=True)
        middle = x * 2
        given = middle[1:] if view else middle
        assert call(given, *rest, **named) is given
        return middle.detach().clone(), gradients(middle * 1, [x])[0]

    found, wanted = run(partial(served, function, RAW)), run(function)
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1])


def test_a_negative_slope_in_place_is_refused_as_by_pytorch() -> None:
    y = served(F.leaky_relu, RAW, torch.randn(6, 50, requires_grad=True) * 2, -0.1, inplace=True)
    with pytest.raises(RuntimeError, match="negative slope which is not supported"):
        y.sum().backward()


@pytest.mark.parametrize("form", [Tensor.mul_, Tensor.div_], ids=["mul_", "div_"])
@pytest.mark.parametrize(
    "chosen", [(True, True), (True, False), (False, True)], ids=["both", "first", "last"]
)
def test_products_in_place(form: Callable[..., Tensor], chosen: tuple[bool, bool]) -> None:
    def run(multiply: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        a, b = torch.randn(6, 50, dtype=torch.float64), torch.rand(50, dtype=torch.float64) + 0.5
        leaves = [each.requires_grad_(flag) for each, flag in zip((a, b), chosen, strict=True) if flag]
        y = multiply(a * 1 if chosen[0] else a.clone(), b)
        return y, gradients(y, leaves)

    found, wanted = run(lambda a, b: served(form, RAW, a, b)), run(form)
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1])


@pytest.mark.parametrize("kind", sorted(set(CURVES) - {"base", "gelu", "pow"}))
def test_half_precision_keeps_derivatives_finite(kind: str) -> None:
    """Where the derivative overflows float16 but the gradient does not."""
    function = getattr(torch, kind, None) or getattr(F, kind)
    x = torch.full((8, 50), 1e-3, dtype=torch.float16, requires_grad=True)
    y = served(function, EIGHT, x)
    (found,) = torch.autograd.grad(y, x, torch.full_like(y, 1e-4))
    z = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(function(z), z, torch.full_like(z, 1e-4))
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=1e-4)


def test_powers_that_need_nothing_keep_nothing_of_ours() -> None:
    x = torch.randn(8, 50, requires_grad=True)
    for exponent in (0, 1):
        assert type(served(torch.pow, EIGHT, x, exponent).grad_fn).__name__ == "PowBackward0"


@pytest.mark.parametrize(
    ("equation", "ranks", "expected"),
    [
        *(("ij,jk->ik", (2, 2), ("ij", "jk", "ik")), (" i j , j k ", (2, 2), ("ij", "jk", "ik"))),
        *(("kj,ji", (2, 2), ("kj", "ji", "ik")), ("Ba,ac", (2, 2), ("Ba", "ac", "Bc"))),
        ("...ij,...jk->...ik", (4, 3), ("abij", "bjk", "abik")),
        *(("...i,ij", (3, 2), ("abi", "ij", "abj")), ("...,...", (2, 2), ("ab", "ab", "ab"))),
        *(("...ij,j->i", (2, 1), ("ij", "j", "i")), ("ii,ij->j", (2, 2), None)),
    ],
)
def test_equations_spelled_out(equation: str, ranks: tuple[int, ...], expected: Any) -> None:
    assert spelled_out(equation, ranks) == expected


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [
        *(("ij,jk->ik", (5, 1), (6, 7)), ("abij,bjk->bik", (2, 3, 4, 5), (3, 5, 6)), ("i,j", (5,), (6,))),
        *(("...ij,...j->...", (3, 1, 4, 5), (2, 5)), ("ij,ij", (5, 6), (5, 6)), ("ij,->ij", (5, 6), ())),
        ("...i,...i", (2, 5), (2, 5)),
    ],
)
def test_equations_have_pytorchs_gradients(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (a, b)]
    y, expected = served(torch.einsum, RAW, equation, *operands), torch.einsum(equation, *operands)
    assert torch.equal(y, expected)
    torch.testing.assert_close(gradients(y, operands), gradients(expected, operands))


@pytest.mark.parametrize(
    ("function", "make"),
    [
        pytest.param(torch.einsum, lambda x: ("ij,jk,kl->il", x, x.mT, x), id="einsum-of-three"),
        pytest.param(torch.einsum, lambda x: ("ii,ij->j", x[:, :8], x), id="einsum-diagonal"),
        pytest.param(torch.pow, lambda x: (x, x), id="pow-of-two-tensors"),
        pytest.param(torch.clamp, lambda x: (x, x - 1, x + 1), id="clamp-between-tensors"),
        pytest.param(F.kl_div, lambda x: (x.log(), x, None, None, "sum"), id="divergence-from-what-learns"),
    ],
)
def test_refused(function: Callable[..., Tensor], make: Callable[[Tensor], tuple[Any, ...]]) -> None:
    notice._given.clear()
    x = (torch.rand(8, 50) + 0.5).requires_grad_()
    with pytest.warns(UserWarning, match="formula"):
        y = served(function, EIGHT, *make(x))
    assert torch.equal(y, function(*make(x)))


@pytest.mark.parametrize("level", [16, 4])
def test_bias_of_the_gates_is_as_small_as_said(level: int) -> None:
    """1 − y² and y (1 − y) with y rounded fall short by at most (range / (level − 1))² / 4 on average."""
    torch.manual_seed(0)
    x = torch.randn(64, 256, dtype=torch.float32, requires_grad=True)
    spec = EIGHT._replace(bits=(level - 1).bit_length(), levels=level)
    for function, span in ((torch.tanh, 2.0), (torch.sigmoid, 1.0)):
        (found,) = torch.autograd.grad(served(function, spec, x).sum(), x)
        (wanted,) = torch.autograd.grad(function(x).sum(), x)
        short = float((wanted - found).mean())
        assert -1e-3 < short < (span / (level - 1)) ** 2 / 4


def test_what_has_no_formula_goes_to_the_hooks() -> None:
    model = model_of(lambda h: torch.einsum("ij,jk,kl->il", h, h.mT, h.square()))
    x = torch.randn(64, 64)
    plain = saved_bytes(model, x)
    notice._given.clear()
    coded = mt.convert(copy.deepcopy(model), Policy.uniform(16), min_elements=0)
    with pytest.warns(UserWarning, match=r"'einsum.0' is left to the hooks"):
        assert saved_bytes(coded, x) < 0.5 * plain
    work = workload(lambda: copy.deepcopy(model), lambda _: x, mean, batch_size=1)
    (layer,) = [each for each in mt.profile(work, options=[], seeds=1).layers if each.tag == "matmul"]
    assert layer.bytes == 3 * 4 * 64 * 64
