"""Attention's gradients in operations that torch.compile traces: those of autograd, for what wants one."""

import pytest
import torch
import torch.nn.functional as F

from mesa_tune.formulas.attention.by_heads import Scores
from mesa_tune.formulas.attention.traced import traced_gradients

SCALE = 0.25


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("keys", [(2, 4, 5, 16), (2, 4, 7, 16), (4, 7, 16), (7, 16)], ids=str)
def test_gradients_are_those_of_autograd(keys: tuple[int, ...], causal: bool) -> None:
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 4, 5, 16), keys, keys))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE)
    grad = torch.randn_like(y)
    right = torch.autograd.grad(y, leaves, grad)
    with torch.no_grad():
        found = traced_gradients(Scores(SCALE, causal), (True, True, True, False), q, k, v, grad)
    assert found[3] is None
    torch.testing.assert_close(list(found[:3]), list(right))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_mask_has_a_gradient_of_its_own_dtype_or_none(wanted: bool) -> None:
    q, k, v, grad = (torch.randn(2, 4, 5, 16, dtype=torch.bfloat16) for _ in range(4))
    mask = torch.randn(5, 5)
    *_, found = traced_gradients(Scores(SCALE, mask=mask), (True, True, True, wanted), q, k, v, grad)
    assert (None if found is None else found.dtype) == (torch.float32 if wanted else None)
