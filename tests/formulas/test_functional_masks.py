"""Masks and window offsets: bits exactly as many as needed, and masks that are sums kept as their parts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.autograd.graph import saved_tensors_hooks

import mesa_tune as mt
import mesa_tune.functional as mf
from mesa_tune.policy import Policy
from tests.functional_cases import RAW, gradients, served
from tests.step_memory import Composed


def _saved_bytes(y: Tensor) -> int:
    node: Any = y.grad_fn
    return sum(each.nbytes for each in node.saved_tensors if each is not None)


@pytest.mark.parametrize(
    ("function", "shape", "per_output"),
    [
        pytest.param(partial(mf.dropout, p=0.3), (8, 100), 1 / 8, id="dropout"),
        pytest.param(partial(served, F.dropout, RAW), (8, 100), 1 / 8, id="F.dropout"),
        pytest.param(lambda x: mf.max_pool2d(x, 3, 2, 1), (2, 4, 16, 16), 1 / 2, id="of nine"),
        pytest.param(lambda x: served(F.adaptive_max_pool2d, RAW, x, 8), (2, 4, 16, 16), 1 / 4, id="of four"),
        pytest.param(lambda x: mf.avg_pool2d(x, 2), (2, 4, 16, 16), 0, id="average"),
    ],
)
def test_bits_kept(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], per_output: float) -> None:
    y = function(torch.randn(shape, requires_grad=True))
    assert _saved_bytes(y) == per_output * y.numel()


def test_traced_dropout_is_one_kernel() -> None:
    code: list[str] = []

    def keep(graph: Any, _: Any) -> Any:
        code.append(graph.code)
        return make_boxed_func(graph.forward)

    run: Any = lambda x: served(F.dropout, RAW, x, 0.3)  # noqa: E731
    compiled: Any = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    assert compiled(torch.randn(8, 100, requires_grad=True)).requires_grad
    assert "aten.native_dropout" in code[0]
    assert "bernoulli" not in code[0]


@pytest.mark.parametrize("part", [slice(None), slice(1, 7)], ids=["whole", "part"])
def test_relu_in_place_on_a_view_keeps_one_bit(part: slice) -> None:
    def run(apply: Any) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        x = torch.randn(8, 100, requires_grad=True)
        middle = x * 2
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda each: each):
            y = apply(middle.view(10, 80)[part], inplace=True)
        return middle.detach().clone(), y, gradients((middle * y.sum()).sin(), [x]), saved

    ours, plain = run(partial(served, F.relu, RAW)), run(F.relu)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    assert torch.equal(ours[2][0], plain[2][0])
    assert sum(each.nbytes for each in ours[3]) == ours[1].numel() // 8


def test_relu_in_place_on_a_view_that_others_could_derive_from_has_pytorchs_gradient() -> None:
    def run(convert: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        layers = nn.Linear(64, 64), nn.LayerNorm(64), nn.Unflatten(1, (4, 16)), nn.ReLU(inplace=True)
        model = nn.Sequential(*layers, nn.Linear(16, 16))
        if convert:
            mt.convert(model, Policy.uniform(level=16, store="derive"), seed=0)
        model(x)  # shows who derives from whom
        y = model(x)
        return y, gradients(y, [layers[1].bias])[0]  # which nothing rounded reaches

    x = torch.randn(256, 64)
    (ours, found), (plain, wanted) = run(True), run(False)
    assert torch.equal(ours, plain)
    torch.testing.assert_close(found, wanted)


def test_in_place_on_a_part_of_several_raises_as_pytorch_does() -> None:
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        served(F.relu, RAW, (torch.randn(8, 100, requires_grad=True) * 2).chunk(2)[0], inplace=True)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
@settings(deadline=None, max_examples=60)
def test_max_pool_gradient_is_pytorchs(size: int, kernel: int, stride: int, dilation: int, seed: int) -> None:
    torch.manual_seed(seed)
    if dilation * (kernel - 1) + 1 > size:
        return
    x = torch.randn(2, 3, size, size, requires_grad=True)
    args = (kernel, stride, kernel // 2, dilation, bool(seed % 2))
    y, expected = served(F.max_pool2d, RAW, x, *args), F.max_pool2d(x, *args)
    assert torch.equal(y, expected)
    assert torch.equal(gradients(y, [x])[0], gradients(expected, [x])[0])


def _biased(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Attention with a bias for each head and a mask for each window, as Swin adds them."""
    q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in model.project(x).chunk(3, -1))
    bias = model.table.permute(2, 0, 1).unsqueeze(0) * 1
    total = bias + mask
    if model.changed:
        total.mul_(0.5)
    return F.scaled_dot_product_attention(q, k, v, total)


@pytest.mark.parametrize("changed", [False, True], ids=["sum as it is", "sum changed in place"])
def test_a_summed_mask_is_kept_as_its_parts(changed: bool) -> None:
    torch.manual_seed(0)
    parts = {"table": nn.Parameter(torch.randn(16, 16, 4)), "project": nn.Linear(32, 96)}
    model, x = Composed(_biased, **parts, changed=changed), torch.randn(64, 16, 32)
    mask = torch.zeros(64, 1, 16, 16).masked_fill(torch.rand(64, 1, 16, 16) < 0.2, -100.0)
    expected = model(x, mask)
    wanted = gradients(expected, list(model.parameters()))
    coded = mt.convert(model, Policy.uniform(256), min_elements=0, seed=1)
    y = coded(x, mask)
    assert torch.equal(y, expected)
    node: Any = y.grad_fn
    largest = max(each.nbytes for each in node.saved_tensors if each is not None and each.is_floating_point())
    assert (largest == 64 * 4 * 16 * 16 * 4) == changed
    for found, right in zip(gradients(y, list(model.parameters())), wanted, strict=True):
        assert (found - right).norm() < 0.02 * right.norm()
