"""What holds of single functions: sharing, in-place forms, empty batches, what is refused, what is packed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mesa_tune as mt
import mesa_tune.functional as mf
from mesa_tune import notice
from mesa_tune.policy.settings import LayerSettings
from tests.functional_cases import CASES, EIGHT, RAW, fresh, gradients, leaves, served

FOUR = LayerSettings(level=16, group_size=64)
attend: Callable[..., Tensor] = F.scaled_dot_product_attention


class _Count(TorchDispatchMode):
    """Counts calls of our ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mesa_tune":
            self.calls.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_softmax_and_product_share_one_copy() -> None:
    x, v = torch.randn(2, 8, 64, requires_grad=True), torch.randn(2, 64, 5)
    with _Count() as count:
        y = mf.matmul(mf.softmax(x, -1, settings=FOUR), v.requires_grad_(), settings=FOUR)
    assert count.calls == ["quantize_map", "quantize"]  # the attention weights once, and v
    y.sum().backward()
    assert x.grad is not None


def test_frozen_weight_keeps_no_input() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    weight, bias = torch.randn(8, 64), torch.randn(8)
    weight, bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias)
    for y in (mf.linear(x, weight, bias), mf.conv1d(x.unsqueeze(-1), weight.unsqueeze(-1), bias)):
        saved = [each for each in y.grad_fn.saved_tensors if each is not None]
        assert all(each.data_ptr() == weight.data_ptr() for each in saved)


def test_relu_in_place_on_a_leaf_raises_as_pytorch_does() -> None:
    with pytest.raises(RuntimeError, match="leaf Variable"):
        served(F.relu, EIGHT, torch.randn(64, requires_grad=True), inplace=True)


def test_attentions_output_may_change_in_place() -> None:
    """PyTorch refuses, which keeps it."""
    case = CASES["attention"]
    ours, plain = fresh(case, torch.float32), fresh(case, torch.float32)
    found, wanted = served(attend, RAW, *ours).mul_(2), attend(*plain) * 2
    torch.testing.assert_close(gradients(found, ours), gradients(wanted, plain), rtol=1e-4, atol=1e-5)


def test_attention_to_no_keys() -> None:
    args = [torch.randn(4, 2, tokens, 8, requires_grad=True) for tokens in (5, 0, 0)]
    y, expected = served(attend, EIGHT, *args), attend(*args)
    assert y.shape == expected.shape
    for a, b in zip(gradients(y, args), gradients(expected, args), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("level", [4, 16])
def test_attention_with_large_scores_stays_bounded(level: int) -> None:
    torch.manual_seed(0)
    args = [torch.randn(2, 2, 32, 64).mul_(8).requires_grad_() for _ in range(3)]
    y = mf.scaled_dot_product_attention(*args, settings=LayerSettings(level=level, group_size=64))
    found, wanted = gradients(y, args), gradients(attend(*args), args)
    assert all(torch.isfinite(each).all() for each in found)
    assert found[2].norm() < 3 * wanted[2].norm()


def test_attention_with_dropout_replays_its_mask_and_moves_no_generator() -> None:
    args = [torch.randn(2, 2, 32, 16, requires_grad=True) for _ in range(3)]
    torch.manual_seed(5)
    y = served(attend, RAW, *args, dropout_p=0.5)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    found = gradients(y, args)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    torch.testing.assert_close(found, gradients(attend(*args, dropout_p=0.5), args))


def test_fused_qkv_views() -> None:
    joint = torch.randn(2, 16, 3, 4, 8, requires_grad=True)
    ours, plain = (call(*joint.permute(2, 0, 3, 1, 4)) for call in (partial(served, attend, RAW), attend))
    torch.testing.assert_close(gradients(ours, [joint]), gradients(plain, [joint]))


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda x: served(F.linear, EIGHT, x, x[0]),
    "matmul": lambda x: served(torch.matmul, EIGHT, x, x.t(), out=None),
    "mm": lambda x: served(torch.mm, EIGHT, x, x.t(), out=None),
    "addmm": lambda x: served(torch.addmm, EIGHT, x, x, x, out=None),
    "softmax": lambda x: served(torch.softmax, EIGHT, x, -1, out=None),
    "cross_entropy": lambda x: served(F.cross_entropy, EIGHT, x, x.detach().argmax(1), reduce=False),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_has_no_formula_stays_plain_and_says_so(name: str) -> None:
    notice._given.clear()
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.warns(UserWarning, match="'layer' is left uncompressed"):
        y = REFUSED[name](x)
    assert type(y.grad_fn).__name__ != "ApplyBackward"


def test_channels_last_gradient_keeps_its_layout() -> None:
    for name in ("batch_norm_channels_last", "conv2d_channels_last"):
        case = CASES[name]
        args = fresh(case, torch.float32)
        y = served(case.function, EIGHT, *args)
        incoming = torch.randn_like(y)
        assert y.is_contiguous(memory_format=torch.channels_last)
        (grad,) = torch.autograd.grad(y, leaves(args)[:1], incoming)
        assert grad.is_contiguous(memory_format=torch.channels_last)


def test_backward_inside_a_routed_context_leaves_attention_alone() -> None:
    q, k, v = (torch.randn(2, 4, 64, 16, requires_grad=True) for _ in range(3))
    with mt.compress_saved(mt.Policy.uniform(level=256), seed=0):
        y = attend(q * 1, k * 1, v * 1, is_causal=True)  # runs again in backward
        with _Count() as count:
            y.sum().backward()
    assert "quantize" not in count.calls
    assert count.calls.count("dequantize_out") >= 3


def test_relu_in_place_traces() -> None:
    run: Any = lambda x: mf.relu(x * 2, inplace=True)  # noqa: E731
    x = torch.randn(64, 64, requires_grad=True)
    compiled: Any = torch.compile(run, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert torch.equal(y, run(x))
    assert torch.equal(gradients(y, [x])[0], gradients(run(x), [x])[0])


def test_a_factor_that_changes_with_the_product_is_refused_as_by_pytorch() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            h = super().forward(input)
            return h.mul_(h.view_as(h))

    for model in (Scaled(64, 64), mt.convert(Scaled(64, 64), mt.Policy.uniform(level=16), min_elements=0)):
        y = model(torch.randn(256, 64))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
