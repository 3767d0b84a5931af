"""Attention's backward some heads at a time: the gradients of the forward run again, packed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.functional import attention, attention_by_heads
from mesa_tune.functional.held import Held

BATCH, TOKENS, HEADS, WIDTH = 9, 37, 4, 16


class Block(nn.Module):
    """Attention over queries, keys and values that `split` makes of one projection."""

    def __init__(self, split: Callable[[Tensor], Any], **arguments: Any) -> None:
        super().__init__()
        self.projection = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.split = split
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.split(self.projection(x)), **self.arguments)


def of_one_tensor(x: Tensor) -> Any:
    return x.view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)


def of_their_own(x: Tensor) -> Any:
    parts = (part.contiguous() for part in x.chunk(3, -1))
    return [part.view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2) for part in parts]


def fewer_queries(x: Tensor) -> Any:
    q, k, v = of_their_own(x)
    return q[:, :, :11].contiguous(), k, v


SPLITS = {"one": of_one_tensor, "own": of_their_own, "oblong": fewer_queries}


def gradients(block: Block, level: int | None, scores: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Of the input and the weights, with P so large at a time (0: the forward runs again)."""
    monkeypatch.setattr(attention_by_heads, "SCORES", scores)
    monkeypatch.setattr(attention_by_heads, "_MOST", 1 << 20 if scores else 0)
    torch.manual_seed(1)
    x = torch.randn(BATCH, TOKENS, HEADS * WIDTH, requires_grad=True)
    for parameter in block.parameters():
        parameter.grad = None
    if level is not None:
        mt.convert(block, mt.Policy.uniform(level=level), seed=1, min_elements=0)
    y = block(x)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    mt.revert(block)
    assert x.grad is not None
    return torch.cat(
        [x.grad.flatten(), *(p.grad.flatten() for p in block.parameters() if p.grad is not None)]
    )


@pytest.mark.parametrize("scores", [1, TOKENS * TOKENS * 2, TOKENS * TOKENS * HEADS * 4, 1 << 30])
@pytest.mark.parametrize("name", list(SPLITS))
@pytest.mark.parametrize("level", [16, 256])
def test_the_gradients_are_those_of_the_forward_run_again(
    name: str, level: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    block = Block(SPLITS[name], scale=0.3)
    found, again = (gradients(block, level, each, monkeypatch) for each in (scores, 0))
    assert (found - again).norm() < 2e-6 * again.norm()


def test_parts_are_decoded_by_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, counts = Held.contiguous_samples, []

    def counted(self: Held, each: int) -> Iterator[Tensor]:
        for place, some in enumerate(samples(self, each)):
            assert some.is_contiguous()
            whole = self.whole()[place * each : (place + 1) * each]
            assert torch.equal(some, whole)
            counts.append(whole.shape[0])
            yield some

    monkeypatch.setattr(Held, "contiguous_samples", counted)
    torch.manual_seed(0)
    gradients(Block(of_their_own), 16, TOKENS * TOKENS * HEADS * 2, monkeypatch)
    # The 37 x 64 elements of a sample are 9.25 groups of 256: 4 samples are the fewest that begin with one.
    assert counts == [min(4, BATCH - first) for first in range(0, BATCH, 4) for _ in range(3)]


@pytest.mark.parametrize("arguments", [{"is_causal": True}, {"attn_mask": torch.zeros(TOKENS, TOKENS)}])
def test_what_has_a_mask_runs_again(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(attention_by_heads, "gradients", refused)
    torch.manual_seed(0)
    gradients(Block(of_their_own, **arguments), 16, 1 << 20, monkeypatch)
    with pytest.raises(AssertionError):
        gradients(Block(of_their_own), 16, 1 << 20, monkeypatch)


def shuts_a_row() -> Tensor:
    mask = torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.4
    mask[2, :, 5] = False
    return mask


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "bool": lambda: {"attn_mask": shuts_a_row()},
    "float": lambda: {"attn_mask": torch.randn(HEADS, 1, TOKENS)},
}


@pytest.mark.parametrize("scores", [1, TOKENS * TOKENS * HEADS * 8, 1 << 30])
@pytest.mark.parametrize("mask", list(MASKS))
def test_dropout_is_that_of_the_forward(mask: str, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    block = Block(of_their_own, dropout_p=0.2, **MASKS[mask]())
    plain = gradients(block, None, 1, monkeypatch)
    fine = gradients(block, 256, scores, monkeypatch)
    assert (fine - plain).norm() < 0.02 * plain.norm()
    coarse, at_once = (gradients(block, 16, each, monkeypatch) for each in (scores, 0))
    assert (coarse - at_once).norm() < 2e-6 * at_once.norm()


@pytest.mark.parametrize("scores", [0, 1 << 30])
def test_dropout_of_everything_gives_zeros(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    assert not gradients(Block(of_their_own, dropout_p=1.0), 16, scores, monkeypatch).any()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_gradients_that_are_wanted_are_made(wanted: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3, HEADS, TOKENS, WIDTH, requires_grad=place in wanted) for place in range(3)]
    needs = (*(each.requires_grad for each in tensors), False, False, False)
    q, k, v = tensors
    y = F.scaled_dot_product_attention(q, k, v)
    grad = torch.randn_like(y)
    plain = iter(torch.autograd.grad(y, [each for each in tensors if each.requires_grad], grad))
    lossy = [each.detach() for each in tensors]
    found = attention.backward((0.0, False, None, False, None), needs, lossy, (None,) * 5, grad)
    assert [each is not None for each in found] == list(needs)
    for each in found[:3]:
        if each is not None:
            torch.testing.assert_close(each, next(plain), atol=1e-5, rtol=1e-4)
