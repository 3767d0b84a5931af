"""What holds for every function: PyTorch's output bit for bit, and its gradients as far as storage allows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import functional_cases
from tests.functional_cases import CASES, EIGHT, RAW, Case, fresh, gradients, leaves, served

NAMES = sorted(CASES)
IN_DOUBLE = [name for name in NAMES if not CASES[name].limited]
HALVES = (torch.bfloat16, torch.float16)


def _plain_and_ours(case: Case, dtype: torch.dtype, spec: Any) -> tuple[Tensor, list[Any], Tensor, list[Any]]:
    ours, plain = fresh(case, dtype), fresh(case, dtype)
    torch.manual_seed(3)
    y = served(case.function, spec, *ours, **case.kwargs)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    expected = case.function(*plain, **case.kwargs)
    assert torch.equal(after, torch.get_rng_state())
    return y, ours, expected, plain


def _same_bits(ours: Tensor, expected: Tensor) -> None:
    assert ours.dtype == expected.dtype
    assert ours.stride() == expected.stride()
    assert torch.equal(ours, expected)


def _error(ours: list[Tensor], expected: list[Tensor]) -> float:
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(ours, expected, strict=True))
    return apart / sum(float(b.double().square().sum()) for b in expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_output_and_buffers_have_pytorchs_bits(name: str, dtype: torch.dtype) -> None:
    y, ours, expected, plain = _plain_and_ours(CASES[name], dtype, EIGHT)
    _same_bits(y, expected)
    for mine, theirs in zip(ours, plain, strict=True):
        if isinstance(mine, Tensor):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-12), (torch.float64, 1e-28)], ids=str)
def test_formula_is_pytorchs_gradient(name: str, dtype: torch.dtype, tolerance: float) -> None:
    if dtype == torch.float64 and name not in IN_DOUBLE:
        pytest.skip("PyTorch has no such function of float64")
    y, ours, expected, plain = _plain_and_ours(CASES[name], dtype, RAW)
    torch.manual_seed(3)
    found, wanted = gradients(y, ours), gradients(expected, plain)
    assert [each.shape for each in found] == [each.shape for each in wanted]
    assert _error(found, wanted) < tolerance


@pytest.mark.parametrize("name", NAMES)
def test_gradient_at_8_bits_is_near(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    for key in range(8):
        monkeypatch.setattr(functional_cases, "KEY", torch.tensor([key]))
        y, ours, expected, plain = _plain_and_ours(CASES[name], torch.float32, EIGHT)
        errors.append(_error(gradients(y, ours), gradients(expected, plain)))
    # Attention with a large scale has 3.1e-4, everything else at most 2.1e-4.
    assert sum(errors) / len(errors) < 4e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradient_in_half_precision_is_near(name: str, dtype: torch.dtype) -> None:
    y, ours, expected, plain = _plain_and_ours(CASES[name], dtype, EIGHT)
    found, wanted = gradients(y, ours), gradients(expected, plain)
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    assert _error(found, wanted) < 2e-3


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y, ours, expected, plain = _plain_and_ours(CASES[name], torch.float32, EIGHT)
    _same_bits(y, expected)
    found, wanted = gradients(y, ours), gradients(expected, plain)
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    assert _error(found, wanted) < 2e-3


@pytest.mark.parametrize("name", IN_DOUBLE)
def test_each_gradient_alone(name: str) -> None:
    case = CASES[name]
    count = len(leaves(fresh(case, torch.float64)))
    for chosen in range(count):
        args, plain = fresh(case, torch.float64), fresh(case, torch.float64)
        for given in (args, plain):
            for place, each in enumerate(leaves(given)):
                each.requires_grad_(place == chosen)
        torch.manual_seed(3)
        y = served(case.function, RAW, *args, **case.kwargs)
        torch.manual_seed(3)
        expected = case.function(*plain, **case.kwargs)
        assert torch.equal(y, expected)
        assert _error(gradients(y, args), gradients(expected, plain)) < 1e-28


@pytest.mark.parametrize("name", NAMES)
def test_keeps_less_than_pytorch(name: str) -> None:
    case = CASES[name]
    args = fresh(case, torch.float32)
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        expected = case.function(*args, **case.kwargs)
    plain = _bytes(kept)
    assert expected.requires_grad
    y = served(case.function, EIGHT, *args, **case.kwargs)
    if type(y.grad_fn) is not type(expected.grad_fn):  # else it is left to PyTorch
        assert _bytes(y.grad_fn.saved_tensors) <= plain


def _bytes(tensors: Any) -> int:
    """Bytes of distinct storages: what the arguments' tensors hold counts as well, for both sides."""
    storages = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors if each is not None
    }
    return sum(storages.values())
