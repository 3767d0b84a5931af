"""`attention_backward`: the kernel gives the reference's numbers, whatever the shapes, masks and layouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune import ops
from mesa_tune.formulas.attention.by_heads import Scores
from mesa_tune.ops import fused as fused_ops

SHAPES = {  # samples, heads, queries, keys, width, width of the values
    "small": (3, 2, 37, 37, 16, 16),
    "one key": (2, 2, 5, 1, 4, 4),
    "wide": (1, 3, 300, 400, 24, 40),  # more queries than are taken at a time
    "tall": (2, 1, 700, 129, 8, 8),
    "flat": (1, 2, 3, 3000, 1, 8),
}
MASKS = ("none", "causal", "bool", "float", "shared")
DROPOUTS = (0.0, 0.3, 0.0, 0.3, 0.3)


def heads(samples: int, count: int, tokens: int, width: int) -> Tensor:
    """As projections lay them out: heads beside one another."""
    return torch.randn(samples, tokens, count, width).transpose(1, 2)


def arguments(name: str, mask: str, dropout: float) -> list[Any]:
    samples, count, queries, keys, width, values = SHAPES[name]
    torch.manual_seed(0)
    shape = (samples, count, queries, keys)
    q, k = heads(samples, count, queries, width), heads(samples, count, keys, width)
    v, grad = heads(samples, count, keys, values), heads(samples, count, queries, values)
    bias = None
    if mask == "bool":
        bias = torch.zeros(shape).masked_fill_(torch.rand(shape) < 0.4, -torch.inf)
        bias[0, 0, 2] = -torch.inf
    elif mask == "float":
        bias = torch.randn(count, 1, keys).expand(shape)
    elif mask == "shared":
        bias = torch.randn(keys, queries).t().expand(shape)
    first = 3 if dropout else 0
    through = torch.cat([torch.zeros(first, dtype=torch.bool), torch.rand(math.prod(shape)) > dropout])
    bits = ops.pack_bits(through) if dropout else None
    raised = Scores(0.3, dropout=dropout).raised
    return [q, k, v, grad, bias, bits, first, 0.3, mask == "causal", raised]


def outputs(given: list[Any]) -> list[Tensor]:
    """Memory for the gradients, full of what must not stay there."""
    return [torch.full_like(like, torch.nan) for like in given[:3]]


@pytest.mark.parametrize(
    ("name", "mask", "dropout"),
    [
        *(("small", mask, dropout) for mask in MASKS for dropout in (0.0, 0.3, 1.0)),
        *((name, *pair) for name in ("wide", "tall") for pair in zip(MASKS, DROPOUTS, strict=True)),
        *((name, mask, 0.3) for name in ("one key", "flat") for mask in ("none", "causal", "bool")),
    ],
)
def test_the_kernel_gives_the_reference_s_numbers(name: str, mask: str, dropout: float) -> None:
    given = arguments(name, mask, dropout)
    found = outputs(given)
    fused_ops.ATTENTION_BACKWARD(*given, *found)
    exact: list[Any] = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
    right = outputs(exact)
    fused_ops.attention_backward(*exact, *right)
    for own, expected in zip(found, right, strict=True):
        assert (own - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("mask", ["none", "float", "causal"])
def test_the_reference_is_autograd_s(mask: str) -> None:
    given = arguments("small", mask, 0.0)
    q, k, v = leaves = [x.requires_grad_() for x in given[:3]]
    y = F.scaled_dot_product_attention(q, k, v, given[4], is_causal=given[8], scale=given[7])
    right = torch.autograd.grad(y, leaves, given[3])
    found = outputs(given)
    with torch.no_grad():
        fused_ops.attention_backward(*given, *found)
    for own, expected in zip(found, right, strict=True):
        assert (own - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("at", range(3))
def test_only_what_is_wanted_is_made(at: int) -> None:
    given = arguments("small", "none", 0.0)
    all_of_them, one = outputs(given), outputs(given)[at]
    fused_ops.ATTENTION_BACKWARD(*given, *all_of_them)
    fused_ops.ATTENTION_BACKWARD(*given, *[one if place == at else None for place in range(3)])
    assert torch.equal(one, all_of_them[at])


def test_no_number_of_threads_changes_a_bit(threads: None) -> None:
    given, made = arguments("wide", "float", 0.3), []
    for count in (1, 2, 7):
        torch.set_num_threads(count)
        made.append(outputs(given))
        fused_ops.ATTENTION_BACKWARD(*given, *made[-1])
    for others in made[1:] if ops.native() else []:
        assert all(torch.equal(one, other) for one, other in zip(made[0], others, strict=True))


def test_what_is_not_a_number_stays_with_its_head() -> None:
    given = arguments("small", "none", 0.0)
    given[0][1, 0, 7, 3] = torch.nan
    found = outputs(given)
    fused_ops.ATTENTION_BACKWARD(*given, *found)
    for made in found:
        assert made[1, 0].isnan().any()
        assert made[[0, 2]].isfinite().all()
        assert made[1, 1].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    if not ops.native():
        pytest.skip("the kernels are not loaded")
    given = arguments("small", "float", 0.3)

    def refused(match: str, place: int, other: Any) -> None:
        with pytest.raises(RuntimeError, match=match):
            fused_ops.ATTENTION_BACKWARD(*given[:place], other, *given[place + 1 :], *outputs(given))

    refused(r"expected k in float32 on the CPU of shape \(3, 2, 37, 16\)", 1, given[1].double())
    refused("expected v .* its last dimension dense", 2, given[2].mT.contiguous().mT)
    refused("expected a bias in float32", 4, torch.zeros(37, 37))
    refused("expected at least 8217 bits", 5, given[5][:-1])
