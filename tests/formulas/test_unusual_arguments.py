"""Arguments at the border of what formulas take: by a formula or by PyTorch, the gradients are PyTorch's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.codecs import Spec
from tests.functional_cases import served

EXACT = Spec("quantize", 8, 0, 256, 0, True, 0)
CODED = EXACT._replace(levels=256)
Call = tuple[Callable[..., Any], list[Any], dict[str, Any]]


def call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Call:
    return function, list(arguments), keywords


def x(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def probabilities(*shape: int) -> Tensor:
    return torch.rand(shape).softmax(0)


def with_zeros(*shape: int) -> Tensor:
    """Rows of which the first is zero."""
    return torch.randn(shape).index_fill_(0, torch.tensor([0]), 0).requires_grad_()


FORMULA: dict[str, Callable[[], Call]] = {
    "norm of a vector": lambda: call(torch.linalg.norm, x(500)),
    "sum norm of a vector": lambda: call(torch.linalg.norm, x(500), 1),
    "norm along a dimension": lambda: call(torch.linalg.norm, x(20, 30), 2, 1),
    "positive base": lambda: call(torch.pow, 2.0, x(500)),
    "power three": lambda: call(torch.pow, x(500), 3),
    "weighted probabilities": lambda: call(F.cross_entropy, x(50), probabilities(50), weight=torch.rand(50)),
    "weighted smooth class": lambda: call(
        F.cross_entropy, x(50), torch.tensor(3), weight=torch.rand(50), label_smoothing=0.1
    ),
    "images of one channel": lambda: call(F.instance_norm, x(4, 1, 9)),
    "reflected images": lambda: call(F.pad, x(2, 3, 9, 9), (1, 1, 1, 1), mode="reflect"),
    "groups of one channel": lambda: call(F.group_norm, x(2, 6, 5), 6),
    "one sample in groups": lambda: call(F.group_norm, x(1, 6, 5), 3),
    "as many rows as matrices": lambda: call(torch.matmul, x(1, 4, 5), x(4, 5, 3)),
    "an image without a batch": lambda: call(F.max_pool2d, x(3, 20, 20), 2),
    "keys of width one": lambda: (F.scaled_dot_product_attention, [x(1, 1, 3, 1) for _ in range(3)], {}),
    "rows over their lengths": lambda: call(F.normalize, x(20, 30)),
    "a row of zeros over its length": lambda: call(F.normalize, with_zeros(20, 30)),
    "the angle of zeros": lambda: call(F.cosine_similarity, with_zeros(20, 30), x(20, 30)),
    "softplus beyond its threshold": lambda: call(
        F.softplus, torch.full((500,), 20.5, dtype=torch.float64, requires_grad=True)
    ),
    "rows without a batch": lambda: call(F.max_pool1d, x(3, 20), 2),
    "a volume without a batch": lambda: call(F.max_pool3d, x(3, 8, 8, 8), 2),
    "a kernel of one row": lambda: call(F.conv2d, x(2, 3, 8, 9), x(4, 3, 1, 5), padding="same"),
    "factors by name": lambda: call(torch.addcmul, x(500), tensor1=x(500), tensor2=x(500)),
    "a statistic of a constant": lambda: call(torch.mul, torch.randn(40, 500), x(40, 1)),
    "products of no rows": lambda: call(torch.einsum, "...d,...d->...", x(1, 500), x(0, 500)),
    "a target that is a parameter": lambda: call(F.mse_loss, x(500), nn.Parameter(torch.randn(500), False)),
}
PLAIN: dict[str, Callable[[], Call]] = {
    "norm of a matrix": lambda: call(torch.linalg.norm, x(20, 30), "fro"),
    "negative base": lambda: call(torch.pow, -2.0, x(500).detach().round().requires_grad_()),
    "power of one": lambda: call(torch.pow, x(500), 1),
    "an image to pad": lambda: call(F.pad, x(3, 9, 9), (1, 1, 1, 1), mode="reflect"),
    "no samples": lambda: call(F.instance_norm, x(0, 3, 9)),
    "rows over their sums": lambda: call(F.normalize, x(20, 30), 1.0),
    "rows of one class": lambda: call(torch.log_softmax, x(50, 1), -1),
    "shares that are a parameter": lambda: call(
        F.kl_div, x(500), nn.Parameter(probabilities(500), False), reduction="sum"
    ),
    "the variance of one number": lambda: call(torch.var, x(500, 1), -1),
    "a sum over columns": lambda: call(torch.einsum, "ij->i", x(20, 30)),
    "a slope in a tensor": lambda: call(F.leaky_relu, x(500), torch.tensor(0.1)),
}


def check(made: Call) -> Any:
    """Run the call by its route and by PyTorch, compare, and return the node."""
    function, arguments, keywords = made
    y, expected = served(function, EXACT, *arguments, **keywords), function(*arguments, **keywords)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    inputs = [argument for argument in arguments if isinstance(argument, Tensor) and argument.requires_grad]
    weights = torch.randn_like(y)
    found, right = (torch.autograd.grad(out, inputs, weights) for out in (y, expected))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, equal_nan=True)
    return y.grad_fn


@pytest.mark.parametrize("name", FORMULA)
def test_a_formula_takes(name: str) -> None:
    assert type(check(FORMULA[name]())).__name__ == "ApplyBackward"


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("name", PLAIN)
def test_pytorch_itself_takes(name: str) -> None:
    assert type(check(PLAIN[name]())).__name__ != "ApplyBackward"


def attention(*inputs: Tensor) -> Call:
    weights = (8, 2, x(24, 8), x(24), None, None, False, 0.0, x(8, 8), x(8))
    return call(F.multi_head_attention_forward, *inputs, *weights)


REFUSED: dict[str, Callable[[], Call]] = {
    "one value per group": lambda: call(F.group_norm, x(1, 6), 6),
    "queries of four dimensions": lambda: attention(*[x(2, 3, 4, 8)] * 3),
    "more keys than values": lambda: attention(*[x(5, 3, 8)] * 2, x(4, 3, 8)),
    "three sizes of an image": lambda: call(F.adaptive_avg_pool2d, x(2, 3, 9, 9), (3, 3, 3)),
    "one row in place of an image": lambda: call(F.adaptive_avg_pool2d, x(500), (3, 3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pytorch_refuses_in_its_own_words(name: str) -> None:
    function, arguments, keywords = REFUSED[name]()
    with pytest.raises((ValueError, AssertionError, RuntimeError)) as expected:
        function(*arguments, **keywords)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        served(function, EXACT, *arguments, **keywords)


def test_what_is_expanded_is_stored_once() -> None:
    large = torch.randn(1, 64, 1).expand(32, 64, 40).requires_grad_()
    factor = torch.randn(32, 64, 40, requires_grad=True)
    y = served(torch.mul, CODED, large, factor)
    assert min(part.nbytes for part in y.grad_fn.saved_tensors if part.dtype is torch.uint8) == 64
    for found, right in zip(torch.autograd.grad(y.sum(), (large, factor)), (factor, large), strict=True):
        assert (found - right).norm() < 0.02 * right.norm()


@pytest.mark.parametrize("first", [True, False], ids=["the first", "the second"])
def test_a_product_packs_what_one_gradient_needs(first: bool) -> None:
    wants, factor = x(40, 50), torch.randn(40, 50)
    y = served(torch.mul, CODED, *((wants, factor) if first else (factor, wants)))
    assert type(y.grad_fn).__name__ == "ApplyBackward"
    (found,) = torch.autograd.grad(y.sum(), wants)
    assert 0 < (found - factor).norm() < 0.02 * factor.norm()


def test_a_small_image_is_left_to_pytorch() -> None:
    y = served(F.max_pool2d, EXACT._replace(min_elements=1000), x(1, 3, 9, 9), 2)
    assert type(y.grad_fn).__name__ != "ApplyBackward"


def test_the_length_of_zeros_passes_no_gradient_however_coarse_the_copy() -> None:
    rows = with_zeros(20, 30)
    y = served(torch.linalg.vector_norm, CODED._replace(bits=2, levels=4), rows, dim=-1)
    (found,) = torch.autograd.grad(y.sum(), rows)
    assert found[1:].any(-1).all()
    assert not found[0].any()


def test_a_transposed_input_has_a_linear_layers_gradients() -> None:
    rows, weight = torch.randn(30, 40).mT.requires_grad_(), x(7, 30)
    y = served(F.linear, CODED, rows, weight)
    incoming = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, weight, incoming)
    assert 0 < (found - incoming.mT @ rows).norm() < 0.02 * found.norm()


def test_a_large_image_without_a_batch_has_pytorchs_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesa_tune.engine.saved.LARGE", 1)
    image, kernel = x(8, 16, 16), x(4, 8, 3, 3)
    y, expected = served(F.conv2d, CODED, image, kernel), F.conv2d(image, kernel)
    (found,), (right,) = (torch.autograd.grad(out.sum(), kernel) for out in (y, expected))
    assert 0 < (found - right).norm() < 0.02 * right.norm()


def test_a_quotient_packs_only_what_the_divisors_gradient_needs() -> None:
    wants, other = x(40, 50), torch.rand(40, 50) + 1
    assert type(served(torch.div, CODED, wants, other).grad_fn).__name__ == "DivBackward0"
    assert type(served(torch.div, CODED, other, wants.exp()).grad_fn).__name__ == "ApplyBackward"


def test_beside_a_statistic_only_the_large_factor_is_stored() -> None:
    large, statistic = x(40, 500), x(40, 1)
    y = served(torch.mul, CODED, large, statistic)
    parts = [part for part in y.grad_fn.saved_tensors if part is not None]
    assert sum(part.nbytes for part in parts) < 1.2 * large.numel() + statistic.nbytes
    outputs = (y, large * statistic)
    gradients = [torch.autograd.grad(out.square().sum(), (large, statistic)) for out in outputs]
    for found, right in zip(*gradients, strict=True):
        assert (found - right).norm() < 0.02 * right.norm()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradient_of_experts_is_laid_out_as_they_are(transposed: bool) -> None:
    weight = x(3, 16, 32).mT.detach().requires_grad_() if transposed else x(3, 32, 16)
    rows, offs = x(24, 32), torch.tensor([5, 14, 24], dtype=torch.int32)
    y = served(torch._grouped_mm, EXACT, rows, weight, offs)  # pyright: ignore[reportPrivateImportUsage]
    (found,) = torch.autograd.grad(y.sum(), weight)
    assert found.stride() == weight.stride()
