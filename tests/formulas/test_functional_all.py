"""What holds for every function: PyTorch's output, near gradients, fewer bytes, one graph."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests import functional_cases
from tests.functional_cases import CASES, EIGHT, RAW, Case, fresh, gradients, leaves, served

by_name = pytest.mark.parametrize("name", sorted(CASES))


def _plain_and_ours(
    case: Case, dtype: torch.dtype, spec: Any, wanted: tuple[int, ...] | None = None
) -> tuple[Tensor, list[Any], Tensor, list[Any]]:
    """Output and arguments of our function and of PyTorch's; gradients of the leaves `wanted`, or of all."""
    ours, plain = fresh(case, dtype), fresh(case, dtype)
    for given in (ours, plain):
        for place, each in enumerate(leaves(given)):
            if wanted is not None and place not in wanted:
                each.requires_grad_(False)
    torch.manual_seed(3)
    y = served(case.function, spec, *ours, **case.kwargs)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    expected = case.function(*plain, **case.kwargs)
    assert torch.equal(after, torch.get_rng_state())
    for mine, theirs in zip(ours, plain, strict=True):
        if isinstance(mine, Tensor):
            assert torch.equal(mine, theirs)  # buffers included
    return y, ours, expected, plain


def _same_bits(ours: Tensor, expected: Tensor) -> None:
    assert ours.dtype == expected.dtype
    assert ours.stride() == expected.stride()
    assert torch.equal(ours, expected)


def _error(ours: list[Tensor], expected: list[Tensor]) -> float:
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(ours, expected, strict=True))
    return apart / sum(float(b.double().square().sum()) for b in expected)


@by_name
def test_formula_is_pytorchs_gradient(name: str) -> None:
    """In float64, where PyTorch has it: of all tensors that may want a gradient, and of each alone."""
    case = CASES[name]
    dtype, tolerance = (torch.float32, 1e-12) if case.limited else (torch.float64, 1e-28)
    count = len(leaves(fresh(case, dtype)))
    alone = () if case.limited else ((place,) for place in range(count))
    for wanted in {tuple(range(count)), *alone}:
        y, ours, expected, plain = _plain_and_ours(case, dtype, RAW, wanted)
        _same_bits(y, expected)
        torch.manual_seed(3)
        found, right = gradients(y, ours), gradients(expected, plain)
        assert [each.shape for each in found] == [each.shape for each in right]
        assert _error(found, right) < tolerance


@by_name
def test_no_more_is_kept_and_the_gradient_is_near(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    for key in range(2):
        monkeypatch.setattr(functional_cases, "KEY", torch.tensor([key]))
        y, ours, expected, plain = _plain_and_ours(CASES[name], torch.float32, EIGHT)
        _same_bits(y, expected)
        assert expected.requires_grad
        if type(y.grad_fn) is not type(expected.grad_fn):  # else it is left to PyTorch
            assert _bytes(cast(Any, y.grad_fn).saved_tensors) <= _bytes_of_pytorch(CASES[name])
        errors.append(_error(gradients(y, ours), gradients(expected, plain)))
    # Attention with a large scale has 3.1e-4, everything else at most 2.1e-4.
    assert sum(errors) / len(errors) < 4e-4


@by_name
def test_in_16_bits_the_output_is_pytorchs_and_the_gradient_near(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            y, ours, expected, plain = _plain_and_ours(CASES[name], dtype, EIGHT)
        _same_bits(y, expected)
        found, wanted = gradients(y, ours), gradients(expected, plain)
        assert [each.dtype for each in found] == [each.dtype for each in wanted], dtype
        assert _error(found, wanted) < 2e-3, dtype


def _bytes_of_pytorch(case: Case) -> int:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: torch.empty(0)):
        y = case.function(*fresh(case, torch.float32), **case.kwargs)
    assert y.requires_grad  # its graph lives while what it saved is counted
    return _bytes(kept)


def _bytes(tensors: Any) -> int:
    """Bytes of distinct storages: what the arguments' tensors hold counts as well, for both sides."""
    storages = [each.untyped_storage() for each in tensors if each is not None]
    return sum({each._cdata: each.nbytes() for each in storages}.values())


BY_FORMULA = {
    *("amax", "cosine_similarity", "std", "linear", "conv2d_same", "conv_transpose2d", "batch_norm"),
    *("layer_norm", "rms_norm", "instance_norm_all", "gelu", "relu", "mul_repeated", "where_repeated"),
    *("einsum_dots", "softmax", "matmul_folded", "attention_trained_mask", "attention_dropout", "kl_div"),
    *("nll_loss_all", "cross_entropy_all", "dropout", "max_pool2d_all", "avg_pool2d", "pad_reflect"),
}
"""A function or two of each kind of formula; `make test-slow` traces the others."""
TRACED = [
    pytest.param(name, marks=() if name in BY_FORMULA else pytest.mark.slow("sweep"))
    for name in sorted(CASES)
    if name != "softmax_method" and not CASES[name].limited
]


@pytest.mark.parametrize("name", TRACED)
def test_traces_in_one_graph(name: str) -> None:
    case = CASES[name]
    ours, plain = fresh(case, torch.float32), fresh(case, torch.float32)
    torch.manual_seed(3)
    run = partial(served, case.function, RAW, **case.kwargs)
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(*ours)
    torch.manual_seed(3)
    expected = case.function(*plain, **case.kwargs)
    torch.testing.assert_close(y, expected)
    for found, wanted in zip(gradients(y, ours), gradients(expected, plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(ours, plain, strict=True):
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, theirs)
